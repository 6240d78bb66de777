"""The CPU attention backend of vLLM, with sparse prefill for the requests that ask for it.

Everything else goes to vLLM's own code: metadata, writing the cache, decode, exact requests, layers that are no plain
causal attention. A step without a sparse tile runs the stock kernel on the stock metadata, so that it is bitwise what
vLLM computes. Otherwise the stock kernel is called twice: for the other rows as they are, and for the tiles of sparse
rows as virtual sequences.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from serving.accel import channel, pictures
from serving.accel.page_means import KeyOrder, find_key_order, span_means
from serving.accel.page_tables import VirtualSequences, joined, virtual_sequences
from serving.accel.policy import Selector, Tiling, group_means, keep, page_shares
from serving.accel.requests import Asked, Requests
from serving.accel.steps import SparseRow, follow_runner, introduce, sparse_rows

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class _Split:
    """A step with sparse rows. `stock` is the metadata of the other rows, whose tokens are `stock_tokens`."""

    sparse: list[SparseRow]
    stock: CPUAttentionMetadata | None
    stock_tokens: Tensor


@dataclass
class SparseMetadata(CPUAttentionMetadata):  # type: ignore[misc]
    """vLLM's metadata, and how the step is split."""

    split: _Split | None = None


class SparseCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Stands where vLLM expects its own CPU backend, and keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return SparseCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SparseCPUMetadataBuilder


class SparseCPUMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Finds the rows that asked for sparse prefill and cuts them into tiles, once a step for all layers."""

    # One for the process: several groups of layers share the requests.
    requests: ClassVar[Requests | None] = None

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        order = _key_order(self)
        for name in layer_names:
            vllm_config.compilation_config.static_forward_context[name].impl.key_order = order
        self._refusal = introduce(layer_names, vllm_config, _refusal)
        self._layers = len(layer_names)
        if SparseCPUMetadataBuilder.requests is None:
            SparseCPUMetadataBuilder.requests = follow_runner(vllm_config, Selector(), _report)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        assert self.requests is not None
        if not any(self.requests.row(number) for number in range(len(stock.seq_lens))):
            return stock
        starts, ends = stock.query_start_loc.tolist(), stock.seq_lens.tolist()

        def refusal(asked: Asked) -> str | None:
            return self._refusal or _misfit(asked.selector, stock, self.block_size)

        sparse = sparse_rows(self.requests, starts, ends, self.block_size, refusal, self.num_heads * self._layers)
        if not sparse:
            return stock
        chosen = {row.number for row in sparse}
        others = [number for number in range(len(ends)) if number not in chosen]
        return SparseMetadata(**vars(stock), split=_Split(sparse, *self._others(stock, others)))

    def _others(self, stock: CPUAttentionMetadata, numbers: list[int]) -> tuple[CPUAttentionMetadata | None, Tensor]:
        """The metadata of these rows alone, and the places of their tokens in the batch."""
        starts = stock.query_start_loc
        tokens = [torch.arange(int(starts[number]), int(starts[number + 1])) for number in numbers]
        if not numbers:
            return None, torch.empty(0, dtype=torch.int64)
        places = torch.cat(tokens)
        lengths = torch.tensor([0, *map(len, tokens)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = stock.seq_lens[numbers].contiguous()
        schedule = _schedule(
            lengths,
            seq_lens,
            heads=(self.num_heads, self.num_kv_heads, self.head_dim),
            types=(self.dtype, self.kv_cache_dtype, self.isa),
            split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        alone = replace(
            stock,
            num_actual_tokens=len(places),
            max_query_len=max(map(len, tokens)),
            query_start_loc=lengths,
            max_seq_len=int(seq_lens.max()),
            seq_lens=seq_lens,
            block_table=stock.block_table[numbers].contiguous(),
            slot_mapping=stock.slot_mapping[places],
            scheduler_metadata=schedule,
        )
        return alone, places


class SparseCPUAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer."""

    layer: int = 0
    layers: int = 1
    key_order: KeyOrder | None = None
    refusal: str | None = "not set up"

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        split = getattr(attn_metadata, "split", None)
        if split is None or self.refusal is not None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if split.stock is not None:
            places = split.stock_tokens
            own = torch.empty_like(query[: len(places)])
            # Keys and values are in the cache; a layer that shares another's has none.
            super().forward(layer, query[places], key, value, kv_cache, split.stock, own)
            output.view(query.shape)[places] = own
        assert attn_metadata is not None
        self._sparse(layer, query, kv_cache, attn_metadata.block_table, split.sparse, output.view(query.shape))
        return output

    def _sparse(
        self, layer: Any, query: Tensor, cache: Tensor, tables: Tensor, rows: list[SparseRow], output: Tensor
    ) -> None:
        sequences, queries = [], []
        for row in rows:
            started = time.perf_counter()
            pages = tables[row.number, : row.tiles.pages].long()
            kept = self._choose(layer, query[row.tokens], cache, pages, row.tiles)
            virtual = virtual_sequences(kept, pages, self.num_kv_heads, row.tiles)
            row.asked.selector_s += time.perf_counter() - started
            if (into := pictures.folder()) is not None:
                pictures.draw(into, row.asked.trace or "", self.layer, row.tiles.first, kept)
            # A choice of a KV head is one of all its query heads.
            row.asked.kept_pages += virtual.kept * (self.num_heads // len(kept))
            row.asked.total_pages += row.tiles.total * self.num_heads
            sequences.append(virtual)
            queries.append(_heads_first(query[row.tokens], len(kept)))
        attended = self._attend(layer, queries, cache, joined(sequences))
        done = 0
        for row, one in zip(rows, queries, strict=True):
            heads, tokens, group, size = one.shape
            mine = attended[done : done + heads * tokens].view(one.shape)
            output[row.tokens].view(tokens, heads, group, size).copy_(mine.transpose(0, 1))
            done += heads * tokens

    def _choose(self, layer: Any, query: Tensor, cache: Tensor, pages: Tensor, tiles: Tiling) -> Tensor:
        assert self.key_order is not None
        scale = 1.0
        if self.kv_cache_dtype in _FP8:
            cache, scale = cache.view(_FP8[self.kv_cache_dtype]), layer._k_scale_float
        filled = (tiles.end - 1) % tiles.page + 1
        means = span_means(cache, pages, filled, tiles.selector.span, self.key_order, scale)
        shares = page_shares(group_means(query, tiles), means, self.scale, tiles)
        return keep(shares, tiles.selector.at(self.layer, self.layers), tiles)

    def _attend(self, layer: Any, queries: list[Tensor], cache: Tensor, sequences: VirtualSequences) -> Tensor:
        """Attention of virtual sequences, [queries of all heads, query heads of a choice, head size]."""
        flat = [one.reshape(-1, *one.shape[2:]) for one in queries]
        query = flat[0] if len(flat) == 1 else torch.cat(flat)
        pages, heads, page, twice = cache.shape
        folded = cache.view(pages * heads, 1, page * 2, twice // 2)
        key_cache, value_cache = folded.chunk(2, dim=2)
        schedule = _schedule(
            sequences.starts,
            sequences.lengths,
            heads=(query.shape[1], 1, self.head_size),
            types=(query.dtype, self.kv_cache_dtype, layer.isa),
            split=False,
        )
        output = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            query_start_loc=sequences.starts,
            seq_lens=sequences.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=sequences.tables,
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return output


def _schedule(
    starts: Tensor, lengths: Tensor, *, heads: tuple[int, int, int], types: tuple[torch.dtype, str, str], split: bool
) -> Tensor:
    """The kernel's plan for causal sequences without a window, which is what a step with sparse rows has.

    Args:
        heads: query heads, KV heads, head size.
        types: of queries, of the cache, and the instruction set.
        split: whether the keys of one sequence may be divided among threads.
    """
    query_heads, kv_heads, size = heads
    dtype, kv_cache_dtype, isa = types
    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=query_heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        seq_lens=lengths,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=split,
        kv_cache_dtype=kv_cache_dtype,
    )


def _heads_first(query: Tensor, heads: int) -> Tensor:
    """[tokens, query heads, head size] as [heads, tokens, query heads of each, head size]."""
    tokens, query_heads, size = query.shape
    return query.reshape(tokens, heads, query_heads // heads, size).transpose(0, 1)


def _refusal(impl: SparseCPUAttentionImpl) -> str | None:
    """Why a layer is always read exactly, in a few fixed words, or None."""
    if impl.attn_type != AttentionType.DECODER:
        return "not a decoder layer"
    if impl.sliding_window != -1:
        return "sliding window"
    if impl.alibi_slopes is not None:
        return "ALiBi"
    if impl.logits_soft_cap:
        return "soft cap"
    if impl.sinks is not None:
        return "attention sinks"
    if impl.key_order is None:
        return "unknown order of keys"
    return None


def _misfit(selector: Selector, metadata: CPUAttentionMetadata, page: int) -> str | None:
    """Why a request cannot be read sparsely as it asked, or None."""
    if page % selector.span:
        return "span does not divide page"
    if metadata.causal is not True or metadata.dynamic_causal is not None:
        return "not causal"
    return None


def _key_order(builder: CPUAttentionMetadataBuilder) -> KeyOrder | None:
    """Found out by writing a page with the kernel that the engine uses."""
    quantised = builder.kv_cache_dtype in _FP8
    dtype = _FP8[builder.kv_cache_dtype] if quantised else builder.dtype
    cache = torch.zeros(1, 1, builder.block_size, 2 * builder.head_dim, dtype=dtype)

    def write(keys: Tensor, cache: Tensor) -> None:
        raw = cache.view(torch.uint8) if quantised else cache
        key_cache, value_cache = raw.view(1, 1, builder.block_size * 2, -1).chunk(2, dim=2)
        stored = keys.to(builder.dtype)
        ops.cpu_attn_reshape_and_cache(
            stored,
            stored,
            key_cache,
            value_cache,
            torch.arange(len(keys)),
            builder.isa,
            kv_cache_dtype=builder.kv_cache_dtype if quantised else "auto",
        )

    return find_key_order(write, cache)


def _report(sender: channel.Sender, asked: Asked) -> None:
    sender.send(asked.report())
