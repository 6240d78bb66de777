"""The CUDA backend on vLLM's kernels and caches, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.accel.channel import TRACE
from serving.accel.policy import Tiling, group_means, keep, page_shares
from serving.accel.reference import dense_attention, sparse_attention
from serving.accel.requests import Asked, Requests
from tests.serving.accel.batches import (
    Prompt,
    alike,
    announce,
    describe_llama,
    exact,
    places,
    sparse,
    table,
    virtual_sequences,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore"),
]

SCALE = 0.3
PAGES = 200
SELECTOR_TEXT = "alpha:0.9,late=0.9,tile=64,group=16,span=16,sink=0,window=0,start=64"
EVERYTHING = "alpha:0,late=0,start=0"


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype = torch.bfloat16
    kv_cache: str = "auto"
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    page: int = 16
    layout: str = "LBNHC"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}-{self.kv_cache}-{self.heads}/{self.kv_heads}-{self.size}-page{self.page}-{self.layout}"

    @property
    def tolerance(self) -> dict[str, float]:
        # With eight bits the weights of the sum are rounded to three bits of mantissa.
        return {"rtol": 0.1, "atol": 0.05} if self.kv_cache != "auto" else {"rtol": 0.02, "atol": 0.01}


SHAPES = [
    Shape(),
    Shape(layout="LBHNC"),
    Shape(page=32),
    Shape(page=128, size=128),
    Shape(page=128, size=128, layout="LBHNC"),
    Shape(torch.float16, heads=9, kv_heads=3),
    Shape(heads=8, kv_heads=1, size=128),
    Shape(heads=4, kv_heads=4, size=128),
    Shape(heads=8, kv_heads=2, size=256),
    Shape(kv_cache="fp8_e4m3", size=128),
    Shape(kv_cache="fp8_e4m3", size=128, page=128, layout="LBHNC"),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_choice = pytest.mark.parametrize("heads", ["query", "kv"])


_sparse = partial(sparse, selector=SELECTOR_TEXT)


class Model:
    """One layer, its cache, and its metadata builder."""

    def __init__(self, folder: Path, requests: Requests, shape: Shape, **settings: Any) -> None:
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

        from serving.accel.cuda_backend import SparseFlashAttentionBackend, SparseFlashMetadataBuilder

        describe_llama(folder, shape.heads, shape.kv_heads, shape.size)
        model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype=shape.dtype)
        memory = CacheConfig(block_size=shape.page, cache_dtype=shape.kv_cache)
        config = VllmConfig(model_config=model, cache_config=memory, device_config=DeviceConfig("cuda"))
        self.shape, self.requests = shape, requests
        self.quantised = shape.kv_cache != "auto"
        name = "model.layers.0.self_attn.attn"
        SparseFlashMetadataBuilder.requests = requests
        with set_current_vllm_config(config):
            self.layer = Attention(
                shape.heads,
                shape.size,
                SCALE,
                shape.kv_heads,
                cache_config=memory,
                prefix=name,
                attn_backend=SparseFlashAttentionBackend,
                **settings,
            ).to("cuda")
            spec = FullAttentionSpec(
                block_size=shape.page,
                num_kv_heads=shape.kv_heads,
                head_size=shape.size,
                dtype=torch.float8_e4m3fn if self.quantised else shape.dtype,
                kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if self.quantised else KVQuantMode.NONE,
            )
            self.builder = SparseFlashMetadataBuilder(spec, [name], config, torch.device("cuda"))
        stored = torch.float8_e4m3fn if self.quantised else shape.dtype
        if shape.layout == "LBNHC":
            physical = torch.zeros(PAGES, shape.page, shape.kv_heads, 2 * shape.size, device="cuda")
            self.cache = physical.to(stored).transpose(1, 2)
        else:
            physical = torch.zeros(PAGES, shape.kv_heads, shape.page, 2 * shape.size, device="cuda")
            self.cache = physical.to(stored)
        self.cache.copy_(torch.full((), float("nan")).to(stored))
        self._free = (1 + torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(5))).tolist()
        self._pages: dict[str, list[int]] = {}
        self._tokens: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def tokens(self, id: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        if id not in self._tokens:
            shape, eight_bits = self.shape, torch.float8_e4m3fn if self.quantised else None
            self._tokens[id] = alike(id, shape.heads, shape.kv_heads, shape.size, shape.dtype, eight_bits)
        return self._tokens[id]

    def build(self, rows: Sequence[Prompt]) -> Any:
        """A step begins: the cache then holds the rows' tokens."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        announce(self.requests, rows)
        tables = [self._write(row) for row in rows]
        starts, ends = places(rows)
        common = CommonAttentionMetadata(
            query_start_loc=starts.cuda(),
            query_start_loc_cpu=starts,
            seq_lens=ends.cuda(),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(row.tokens for row in rows),
            max_seq_len=int(ends.max()),
            block_table_tensor=table(tables).cuda(),
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64, device="cuda"),
        )
        return self.builder.build(0, common)

    def _write(self, row: Prompt) -> list[int]:
        page = self.shape.page
        table = self._pages.setdefault(row.id, [])
        while len(table) * page < row.end:
            table.append(self._free.pop())
            # Kernels multiply what lies behind a sequence with zero, so it must be finite, but may be anything.
            self.cache[table[-1]] = torch.tensor(200).to(self.cache.dtype).cuda()
        _, key, value = self.tokens(row.id)
        for number, where in enumerate(table):
            span = slice(number * page, min(row.end, (number + 1) * page))
            both = torch.cat([key[span], value[span]], -1).transpose(0, 1).to(self.cache.dtype)
            self.cache[where, :, : both.shape[1]] = both.cuda()
        return table

    def forward(self, metadata: Any, rows: Sequence[Prompt], stock: bool = False) -> Tensor:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

        query = torch.cat([self.tokens(row.id)[0][row.first : row.end] for row in rows]).cuda()
        output = torch.full_like(query, float("nan"))
        if self.quantised:
            query = query.to(torch.float8_e4m3fn)
        forward = FlashAttentionImpl.forward if stock else type(self.layer.impl).forward
        cache = self.cache.view(torch.uint8) if self.quantised else self.cache
        forward(self.layer.impl, self.layer, query, query, query, cache, metadata, output)
        return output.cpu()

    def step(self, rows: Sequence[Prompt]) -> list[Tensor]:
        output = self.forward(self.build(rows), rows)
        self.requests.end()
        return list(output.split([row.tokens for row in rows]))


@pytest.fixture
def reports() -> list[Asked]:
    return []


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[Asked]) -> Callable[..., Model]:
    from serving.accel.cuda_backend import SparseFlashMetadataBuilder

    def report(asked: Asked) -> None:
        assert asked.counted is not None
        asked.counted.close()
        asked.settle()
        reports.append(asked)

    monkeypatch.setattr(SparseFlashMetadataBuilder, "requests", None)
    requests = Requests(sparse=False, report=report)
    return lambda shape=SHAPES[0], **settings: Model(tmp_path, requests, shape, **settings)


Make = Callable[..., Model]


def _dense(model: Model, row: Prompt) -> Tensor:
    query, key, value = model.tokens(row.id)
    return dense_attention(query[row.first : row.end], key[: row.end], value[: row.end], row.first, SCALE)


def _kept(read: Any, number: int, model: Model) -> tuple[Tiling, Tensor]:
    """What a sparse row kept, read back from the tables of the rows that were read together."""
    rows, buffers = read.sparse, read.buffers
    first = sum(len(buffers.rows[n].shares) * rows[n].tiles.count for n in range(number))
    tiles, heads = rows[number].tiles, len(buffers.rows[number].shares)
    table = {page: n for n, page in enumerate(model._pages[rows[number].asked.trace])}
    kv_heads, parts = model.shape.kv_heads, tiles.page // model.shape.page
    folds = model.cache.stride(0) // model.cache.stride(1)
    kept = torch.zeros(heads, tiles.count, int(tiles.visible_pages[-1]), dtype=torch.bool)
    for sequence, (tile, head) in enumerate(virtual_sequences(tiles, heads, kv_heads), first):
        pages = -(-int(buffers.lengths[sequence]) // model.shape.page)
        for virtual in buffers.tables[sequence, :pages].tolist():
            kv_head = head * kv_heads // heads
            assert (virtual - kv_head) % folds == 0
            kept[head, tile, table[(virtual - kv_head) // folds] // parts] = True
    return tiles, kept


@each_choice
@each_shape
def test_a_mixed_batch_is_what_the_reference_says(make: Make, shape: Shape, heads: str, reports: list[Asked]) -> None:
    model = make(shape)
    selector = f"{SELECTOR_TEXT},heads={heads}"
    rows = [
        Prompt("answer", 70, 71, 60),
        _sparse("whole", 0, 650, selector=selector),
        exact("exact", 40, 101),
        _sparse("chunk", 461, 700, 790, selector=selector),
    ]
    metadata = model.build(rows)
    (read,) = metadata.split.sparse
    assert [row.asked.trace for row in read.sparse] == ["whole", "chunk"]
    outputs = list(model.forward(metadata, rows).split([row.tokens for row in rows]))
    model.requests.end()
    for number in (0, 2):
        torch.testing.assert_close(outputs[number].float(), _dense(model, rows[number]), **shape.tolerance)
    for number, which in ((0, 1), (1, 3)):
        row, output = rows[which], outputs[which]
        tiles, kept = _kept(read, number, model)
        query, key, value = model.tokens(row.id)
        expected = sparse_attention(query[row.first : row.end], key[: row.end], value[: row.end], kept, SCALE, tiles)
        torch.testing.assert_close(output.float(), expected, **shape.tolerance)
        # The choice is the policy's, but for what lies at the border.
        span, whole = tiles.selector.span, kept.shape[-1] * tiles.page
        padded = torch.nn.functional.pad(key[: row.end].float(), (0, 0, 0, 0, 0, whole - row.end))
        counts = (row.end - torch.arange(0, whole, span)).clamp(1, span)
        means = (padded.view(-1, span, *key.shape[1:]).sum(1) / counts[:, None, None]).permute(1, 2, 0).contiguous()
        # Both are rounded before they are multiplied.
        groups, means = (one.to(shape.dtype).float() for one in (group_means(query[row.first : row.end], tiles), means))
        shares = page_shares(groups, means, SCALE, tiles)
        policy = keep(shares, tiles.selector.value, tiles)
        assert (policy == kept).float().mean() > 0.99
        assert kept.sum() / tiles.visible.sum() / len(kept) < 0.95
    (told,) = reports
    tiles, kept = _kept(read, 0, model)
    assert told.kept_pages == int(kept.sum()) * (shape.heads // len(kept))
    assert told.total_pages == tiles.total * shape.heads
    assert 0 < told.selector_s < 10


@each_shape
def test_rows_in_which_other_heads_choose_share_a_step(make: Make, shape: Shape, reports: list[Asked]) -> None:
    model = make(shape)
    rows = [
        _sparse("by query head", 0, 400, selector=f"{SELECTOR_TEXT},heads=query"),
        exact("exact", 40, 101),
        _sparse("by KV head", 0, 350, selector=f"{SELECTOR_TEXT},heads=kv"),
        _sparse("by query head, too", 64, 300, selector=f"{SELECTOR_TEXT},heads=query"),
    ]
    together = model.step(rows)
    # Which rows a request shares a step with changes neither its answer nor what is reported.
    told = {asked.trace: (asked.kept_pages, asked.total_pages) for asked in reports}
    for row, output in zip(rows, together, strict=True):
        traced = {TRACE: "alone"} if row.id in told else {}
        alone = replace(row, id=f"{row.id} alone", extra_args=row.extra_args | traced)
        model._tokens[alone.id] = model.tokens(row.id)
        torch.testing.assert_close(output, model.step([alone])[0], rtol=1e-3, atol=1e-3)
        if row.id in told:
            assert told[row.id] == (reports[-1].kept_pages, reports[-1].total_pages)
    assert len(told) == 3


@each_choice
@each_shape
def test_keeping_everything_is_stock(make: Make, shape: Shape, heads: str) -> None:
    model = make(shape)
    rows = [_sparse("everything", 100, 500, selector=f"{EVERYTHING},heads={heads}")]
    metadata = model.build(rows)
    ours, stock = model.forward(metadata, rows).float(), model.forward(metadata, rows, stock=True).float()
    assert (ours - stock).norm() / stock.norm() < (0.03 if model.quantised else 2e-3)


def test_chunks_of_whole_tiles_choose_as_the_whole_prompt_does(make: Make) -> None:
    model = make(Shape(heads=8, kv_heads=2, size=128))
    (whole,) = model.step([_sparse("prompt", 0, 700)])
    other = make(Shape(heads=8, kv_heads=2, size=128))
    other._tokens = model._tokens
    parts = [other.step([replace(_sparse("prompt", a, b, 700), id="prompt")])[0] for a, b in ((0, 256), (256, 700))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"per_layer_sliding_window": 64}, "sliding window"),
        ({"logits_soft_cap": 30.0}, "soft cap"),
    ],
)
def test_layers_that_are_read_exactly(make: Make, settings: dict[str, Any], reason: str) -> None:
    model = make(**settings)
    metadata = model.build([_sparse("refused", 0, 300)])
    assert not hasattr(metadata, "split")
    assert model.requests.row(0).refusal == reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("selector", "reason"),
    [
        (f"{SELECTOR_TEXT},tile=48,span=24,group=24", "span does not divide page"),
        (f"{SELECTOR_TEXT},tile=96", "sizes of the selector"),
        (f"{SELECTOR_TEXT},tile=512", "sizes of the selector"),
        ("psychic:1", "unreadable settings"),
    ],
)
def test_requests_that_are_read_exactly(make: Make, selector: str, reason: str) -> None:
    model = make()
    rows = [_sparse("refused", 0, 300, selector=selector)]
    metadata = model.build(rows)
    assert not hasattr(metadata, "split")
    assert model.requests.row(0).refusal == reason  # type: ignore[union-attr]
    torch.testing.assert_close(model.forward(metadata, rows).float(), _dense(model, rows[0]), rtol=0.02, atol=0.01)


def test_no_full_graph_is_replayed_over_a_prompt() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    from serving.accel.cuda_backend import SparseFlashMetadataBuilder

    assert SparseFlashMetadataBuilder._cudagraph_support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
