"""The reference against PyTorch's own attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from serving.accel.policy import Selector, Tiling
from serving.accel.reference import dense_attention, sparse_attention

PAGE, SIZE, SCALE = 32, 16, 0.3
SELECTOR = Selector(tile=16, group=8, span=8)

# Positions of the first query, queries, query heads, KV heads.
shapes = pytest.mark.parametrize(
    ("first", "tokens", "heads", "kv_heads"),
    [
        pytest.param(0, 70, 4, 4, id="a prompt"),
        pytest.param(0, 1, 4, 4, id="one token"),
        pytest.param(100, 50, 4, 2, id="a chunk that begins inside a tile"),
        pytest.param(96, 64, 9, 3, id="whole tiles"),
        pytest.param(130, 1, 6, 1, id="decode"),
    ],
)


def _prompt(first: int, tokens: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.Generator().manual_seed(3)
    query = torch.randn(tokens, heads, SIZE, generator=seed)
    key, value = torch.randn(2, first + tokens, kv_heads, SIZE, generator=seed)
    return query, key, value


def _by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """In float64. `mask` [heads or 1, queries, keys]."""
    query, key, value = (each.double().transpose(0, 1)[None] for each in (query, key, value))
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask[None], scale=SCALE, enable_gqa=True)
    return out[0].transpose(0, 1).float()


def _causal(first: int, tokens: int) -> Tensor:
    return torch.ones(first + tokens, first + tokens).tril().bool()[None, first:]


@shapes
def test_dense(first: int, tokens: int, heads: int, kv_heads: int) -> None:
    query, key, value = _prompt(first, tokens, heads, kv_heads)
    expected = _by_torch(query, key, value, _causal(first, tokens))
    torch.testing.assert_close(dense_attention(query, key, value, first, SCALE), expected)


@pytest.mark.parametrize("per_kv_head", [False, True])
@shapes
def test_every_page_kept_is_dense(first: int, tokens: int, heads: int, kv_heads: int, per_kv_head: bool) -> None:
    query, key, value = _prompt(first, tokens, heads, kv_heads)
    tiles = Tiling(first, tokens, 0, PAGE, SELECTOR)
    kept = tiles.visible.expand(kv_heads if per_kv_head else heads, -1, -1)
    expected = dense_attention(query, key, value, first, SCALE)
    assert torch.equal(sparse_attention(query, key, value, kept, SCALE, tiles), expected)


@pytest.mark.parametrize("per_kv_head", [False, True])
@shapes
def test_some_pages_kept_is_a_mask(first: int, tokens: int, heads: int, kv_heads: int, per_kv_head: bool) -> None:
    query, key, value = _prompt(first, tokens, heads, kv_heads)
    tiles = Tiling(first, tokens, 0, PAGE, SELECTOR)
    choices = kv_heads if per_kv_head else heads
    seed = torch.Generator().manual_seed(4)
    kept = torch.rand(choices, *tiles.visible.shape, generator=seed) < 0.5
    kept[:, torch.arange(len(tiles.ends)), (tiles.ends - 1) // PAGE] = True
    mask = _causal(first, tokens).repeat(heads, 1, 1)
    for head in range(heads):
        for query_number in range(tokens):
            tile = (first + query_number) // SELECTOR.tile - first // SELECTOR.tile
            for page, read in enumerate(kept[head * choices // heads, tile].tolist()):
                if not read:
                    mask[head, query_number, page * PAGE : (page + 1) * PAGE] = False
    expected = _by_torch(query, key, value, mask)
    torch.testing.assert_close(sparse_attention(query, key, value, kept, SCALE, tiles), expected)


def test_half_precision_is_computed_in_float32() -> None:
    query, key, value = (each.bfloat16() for each in _prompt(0, 20, 4, 2))
    exact = dense_attention(query.float(), key.float(), value.float(), 0, SCALE)
    assert torch.equal(dense_attention(query, key, value, 0, SCALE), exact)
    assert exact.dtype == torch.float32
