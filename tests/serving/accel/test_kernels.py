"""The Triton kernels against the selection in plain torch. With TRITON_INTERPRET=1 they run without a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from serving.accel.policy import Selector, Tiling, group_means, keep
from serving.accel.policy import page_shares as shares_in_torch
from tests.serving.accel.batches import virtual_sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="there is no GPU"
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cannot multiply matrices of the other.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SCALE = 0.2
SELECTOR = Selector(tile=32, group=16, span=16, sink=16, window=32, start=64, value=0.3, late=0.3)


@dataclass(frozen=True)
class Shape:
    """Of a request, in tokens; `choice` tokens are chosen together, `page` tokens are a page of the cache."""

    first: int
    tokens: int
    dense_from: int
    choice: int = 32
    page: int = 16
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    selector: Selector = SELECTOR


CASES = {
    "a prompt": Shape(0, 200, 180),
    "three heads a KV head": Shape(70, 201, 250, choice=64, heads=9, kv_heads=3),
    "all heads of a KV head choose together": Shape(70, 201, 250, 64, heads=8, selector=replace(SELECTOR, heads="kv")),
    "mass": Shape(70, 201, 250, 32, 32, selector=replace(SELECTOR, rule="mass", value=0.7)),
    "all of the mass": Shape(70, 201, 250, selector=replace(SELECTOR, rule="mass", value=1.0)),
    "a budget": Shape(100, 201, 290, selector=replace(SELECTOR, rule="budget", value=130.0)),
    "no tail": Shape(100, 201, 1000),
    "one part of a tile before the tail": Shape(70, 60, 100),
    "a share of what is seen": Shape(100, 201, 290, selector=replace(SELECTOR, rule="budget", value=0.4)),
    "one head a KV head": Shape(96, 100, 500, kv_heads=4, size=128, selector=replace(SELECTOR, tile=64, group=8)),
    "few tokens, one KV head": Shape(130, 3, 500, heads=8, kv_heads=1, selector=replace(SELECTOR, tile=64, group=8)),
    "the default's sizes": Shape(1100, 200, 1290, 64, 16, 32, 8, 128, Selector(tile=128, value=0.3)),
    "large pages": Shape(1100, 200, 1290, 128, 128, 32, 8, 128, Selector(tile=128, value=0.3)),
}


class Case:
    """A request in a cache whose pages lie in any order."""

    def __init__(self, shape: Shape, dtype: torch.dtype = DTYPE) -> None:
        first, tokens, dense_from = shape.first, shape.tokens, shape.dense_from
        choice, page, heads, kv_heads, size = shape.choice, shape.page, shape.heads, shape.kv_heads, shape.size
        selector = shape.selector
        noise = torch.Generator().manual_seed(first + heads)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=noise).to(dtype).to(DEVICE)

        self.tiles = Tiling(first, tokens, dense_from, choice, selector)
        self.page, self.heads, self.kv_heads = page, heads, kv_heads
        end = self.tiles.end
        pages = -(-end // page)
        self.cache = normal(pages + 3, page, kv_heads, 2 * size)
        self.keys = self.cache[..., :size]
        self.table = torch.randperm(pages + 3, generator=noise)[:pages].int().to(DEVICE)
        self.query = normal(tokens, heads, size)
        self.pages = -(-end // choice)
        self.spans = self.pages * choice // selector.span
        in_order = self.keys[self.table.long()].reshape(-1, kv_heads, size)[:end].float().cpu()
        padded = torch.nn.functional.pad(in_order, (0, 0, 0, 0, 0, self.spans * selector.span - end))
        counts = (end - torch.arange(0, self.spans * selector.span, selector.span)).clamp(1, selector.span)
        sums = padded.view(self.spans, selector.span, kv_heads, size).sum(1)
        self.means = (sums / counts[:, None, None]).permute(1, 0, 2)
        self.choosing = heads if selector.heads == "query" else kv_heads
        means = self.means.to(dtype).float().transpose(1, 2).contiguous()
        rounded = group_means(self.query.cpu(), self.tiles).to(dtype).float()
        self.shares = shares_in_torch(rounded, means, SCALE, self.tiles)
        starts = self.tiles.starts
        self.sparse = ((starts >= selector.start) & (self.tiles.ends <= dense_from)).tolist()

    def order(self) -> list[tuple[int, int]]:
        return virtual_sequences(self.tiles, self.choosing, self.kv_heads)

    def fold(self) -> tuple[Tensor, Tensor]:
        """Folded queries, and groups of them."""
        from serving.accel import kernels

        selector, size = self.tiles.selector, self.query.shape[-1]
        folded = torch.full_like(self.query.view(-1, size), float("nan"))
        shape = (self.kv_heads, self.tiles.count, self.heads // self.kv_heads, selector.tile // selector.group, size)
        groups = torch.full(shape, float("nan"), dtype=DTYPE, device=DEVICE)
        kernels.fold(self.query, self.tiles, self.kv_heads, folded, groups)
        return folded, groups


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_span_means(case: Case) -> None:
    from serving.accel import kernels

    means = torch.full((case.kv_heads, case.spans, case.keys.shape[-1]), float("nan"), device=DEVICE)
    kernels.span_means(case.keys, case.table, case.tiles, means)
    torch.testing.assert_close(means.cpu(), case.means, rtol=1e-5, atol=1e-6)


def test_folded_queries_are_those_of_the_virtual_sequences(case: Case) -> None:
    folded, _ = case.fold()
    from serving.accel import kernels

    starts = kernels.sequence_starts(case.tiles, case.choosing, case.kv_heads).tolist()
    each = case.heads // case.choosing
    for sequence, (tile, head) in enumerate(case.order()):
        begin = max(int(case.tiles.starts[tile]), case.tiles.first) - case.tiles.first
        end = begin + int(case.tiles.lengths[tile])
        expected = case.query[begin:end, head * each : (head + 1) * each].flatten(0, 1)
        assert torch.equal(folded[starts[sequence] * each : starts[sequence + 1] * each], expected)
    # Unfolded they are as they were.
    out = torch.full_like(case.query, float("nan"))
    kernels.unfold(folded, case.tiles, case.choosing, case.kv_heads, out)
    assert torch.equal(out, case.query)


def test_groups(case: Case) -> None:
    _, groups = case.fold()
    expected = group_means(case.query.cpu(), case.tiles).unflatten(0, (case.kv_heads, -1)).transpose(1, 2)
    torch.testing.assert_close(groups.cpu(), expected.to(DTYPE), rtol=1e-2, atol=1e-3)


def test_page_tables(case: Case) -> None:
    from serving.accel import kernels

    tiles, selector = case.tiles, case.tiles.selector
    _, groups = case.fold()
    estimate = kernels.Estimate.empty(tiles, case.kv_heads, case.heads // case.kv_heads, torch.device(DEVICE))
    for tensor in (estimate.pages, estimate.tops, estimate.totals):
        tensor.fill_(float("nan"))
    means = case.means.to(DTYPE).to(DEVICE).contiguous()
    kernels.estimate(groups, means, SCALE, tiles, estimate)
    strides = case.keys.stride()
    folding = kernels.Folding(strides[0], strides[2], strides[1])
    sequences, parts = case.choosing * tiles.count, tiles.page // case.page
    tables = torch.full((sequences, case.pages * parts), -1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((sequences,), -1, dtype=torch.int32, device=DEVICE)
    count = torch.full((1,), 5, device=DEVICE)
    shares = torch.full((case.choosing, tiles.count, case.pages), float("nan"), device=DEVICE)
    kernels.page_tables(estimate, selector.value, case.table, tiles, folding, case.page, shares, tables, lengths, count)
    shares = shares.cpu()
    assert any(case.sparse)
    for tile, sparse in enumerate(case.sparse):
        if sparse:
            seen = int(tiles.visible_pages[tile])
            torch.testing.assert_close(shares[:, tile, :seen], case.shares[:, tile, :seen], rtol=5e-3, atol=2e-4)
            shares[:, tile, seen:] = 0
        else:
            shares[:, tile] = 0
    # By its own estimate, which may differ in the last bits, the choice is exactly the policy's.
    kept = keep(shares, selector.value, tiles)
    assert int(count) == 5 + int(kept.sum())
    assert 0.2 < kept.sum() / tiles.visible.sum() / case.choosing <= 1
    flat, memory = case.cache.as_strided((case.cache.numel(),), (1,)), case.cache
    for sequence, (tile, head) in enumerate(case.order()):
        chosen = [
            page * parts + part
            for page in kept[head, tile].nonzero()[:, 0].tolist()
            for part in range(parts)
            if (page * parts + part) * case.page < int(tiles.ends[tile])
        ]
        listed = [page for page in tables[sequence].tolist() if page != -1]
        kv_head = head * case.kv_heads // case.choosing
        assert len(listed) == len(chosen)
        for virtual, page in zip(listed, chosen, strict=True):
            key = flat[virtual * folding.head : virtual * folding.head + 8]
            assert torch.equal(key, memory[int(case.table[page]), 0, kv_head, :8])
        beyond = int(kept[head, tile].sum()) - int(tiles.visible_pages[tile])
        assert int(lengths[sequence]) == beyond * tiles.page + int(tiles.ends[tile])


def test_a_budget_is_filled_with_equals() -> None:
    from serving.accel import kernels

    selector = replace(SELECTOR, rule="budget", value=0.5, sink=0, window=0)
    case = Case(Shape(1024, 64, 2000, selector=selector))
    case.keys.zero_()
    tiles = case.tiles
    _, groups = case.fold()
    estimate = kernels.Estimate.empty(tiles, case.kv_heads, case.heads // case.kv_heads, torch.device(DEVICE))
    kernels.estimate(groups, torch.zeros_like(case.means, dtype=DTYPE, device=DEVICE), SCALE, tiles, estimate)
    sequences = case.heads * tiles.count
    tables = torch.full((sequences, case.pages * 2), -1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((sequences,), -1, dtype=torch.int32, device=DEVICE)
    count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    shares = torch.empty(case.heads, tiles.count, case.pages, device=DEVICE)
    folding = kernels.Folding(case.keys.stride(0), case.keys.stride(2), case.keys.stride(1))
    kernels.page_tables(estimate, selector.value, case.table, tiles, folding, case.page, shares, tables, lengths, count)
    assert int(count) == case.heads * sum(int(seen * 0.5) for seen in tiles.visible_pages.tolist())
