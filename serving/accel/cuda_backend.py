"""The FlashAttention backend of vLLM on Hopper, with sparse prefill for the requests that ask for it.

Everything else goes to vLLM's own code: metadata, writing the cache, decode, CUDA graphs, exact requests, layers that
are no plain causal attention. In a step with sparse rows vLLM's kernel runs on the whole batch, told that these rows
have no keys, and again for their tiles as virtual sequences. Nothing waits for the device: sizes come from what the
CPU knows of the batch, tables are as wide as the longest row, and what was kept is counted on the device.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from serving.accel import channel, kernels
from serving.accel.policy import Rule, Selector, Tiling
from serving.accel.requests import Asked, Requests
from serving.accel.steps import SparseRow, follow_runner, introduce, sparse_rows

# The kernel works on 128 queries of a head at once: fewer in a tile would leave it half idle. And among so few keys as
# come before `start`, all of attention takes no longer than the choice.
DEFAULT = Selector(tile=128, start=4096)
# Smaller pages are chosen together: the kernel reads 64 keys as fast as 16.
_LEAST_CHOICE = 64


class _Counted:
    """What the device counts of a request: `kept` pages, and the time between pairs of `marks`."""

    def __init__(self, device: torch.device, heads_of_choice: int) -> None:
        self.kept = torch.zeros(1, dtype=torch.int64, device=device)
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._heads = heads_of_choice
        self._host = torch.empty(1, dtype=torch.int64, pin_memory=True)
        self._done = torch.cuda.Event()

    def close(self) -> None:
        self._host.copy_(self.kept, non_blocking=True)
        self._done.record()

    def read(self) -> tuple[int, float]:
        self._done.synchronize()
        return int(self._host) * self._heads, sum(begin.elapsed_time(end) for begin, end in self.marks) / 1000


class _Reports:
    """Sends reports once the device has counted, without stopping the engine."""

    def __init__(self) -> None:
        self._waiting = ThreadPoolExecutor(1, "foreword-reports")

    def __call__(self, sender: channel.Sender, asked: Asked) -> None:
        if asked.counted is None:
            sender.send(asked.report())
            return
        asked.counted.close()
        self._waiting.submit(self._send, sender, asked)

    @staticmethod
    def _send(sender: channel.Sender, asked: Asked) -> None:
        asked.settle()
        sender.send(asked.report())


@dataclass(slots=True)
class _Rows:
    """Sparse rows of a step that one call of the kernel reads: in all of them as many heads choose.

    `starts` [virtual sequences + 1], int32, is on the device; `longest_tile` and `longest` bound their queries and
    keys. `buffers` are those of the layer before.
    """

    sparse: list[SparseRow]
    starts: Tensor
    longest_tile: int
    longest: int
    buffers: _Buffers | None = None


@dataclass(frozen=True, slots=True)
class _Split:
    """A step with sparse rows, for all layers; `stock` is the metadata for the other rows, if there are any."""

    sparse: list[_Rows]
    stock: FlashAttentionMetadata | None


@dataclass(frozen=True, slots=True)
class _Room:
    """For the selection of one sparse row; what it holds is described where it is written."""

    means: Tensor
    groups: Tensor
    estimate: kernels.Estimate
    shares: Tensor


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What a layer computes on the way; layers run one after another, so the next one takes the same."""

    query: Tensor
    output: Tensor
    tables: Tensor
    lengths: Tensor
    rows: list[_Room]


@dataclass(frozen=True, slots=True)
class Scales:
    """What quantised queries, keys and values are multiplied with; `logits` is the product of the first two."""

    query: Tensor
    key: Tensor
    value: Tensor
    logits: float


@dataclass
class SparseMetadata(FlashAttentionMetadata):  # type: ignore[misc]
    """vLLM's metadata, and how the step is split. Pages are looked up in `block_table`, which vLLM may exchange."""

    split: _Split | None = None


class SparseFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    """Stands where vLLM expects its own FlashAttention backend, and keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return SparseFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return SparseFlashMetadataBuilder


class SparseFlashMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Finds the rows that asked for sparse prefill and cuts them into tiles, once a step for all layers."""

    # A graph of a step that may hold prompts would be replayed without asking how they are read.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    # One for the process: several groups of layers share the requests.
    requests: ClassVar[Requests | None] = None

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._choice = chosen_together(self.block_size)
        self._layers = len(layer_names)
        self._refusal = introduce(layer_names, vllm_config, lambda impl: _refusal(impl, vllm_config, self.block_size))
        if SparseFlashMetadataBuilder.requests is None:
            SparseFlashMetadataBuilder.requests = follow_runner(vllm_config, DEFAULT, _Reports())
        if self._refusal is None:
            self._compile(vllm_config.compilation_config.static_forward_context[layer_names[0]].impl)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        assert self.requests is not None
        count = common_attn_metadata.num_reqs
        known = common_attn_metadata.seq_lens_cpu_upper_bound
        # A step of single tokens may be the replay of a graph.
        if common_attn_metadata.max_query_len < 2 or not any(self.requests.row(number) for number in range(count)):
            return stock
        starts = common_attn_metadata.query_start_loc_cpu.tolist()

        def refusal(asked: Asked) -> str | None:
            if known is None:
                return "lengths are on the device"
            return self._refusal or _misfit(asked.selector, stock, self._choice)

        # Exact for prompts; what it is for other rows does not matter.
        ends = (torch.zeros(count, dtype=torch.int32) if known is None else known[:count]).tolist()
        rows = sparse_rows(self.requests, starts, ends, self._choice, refusal, self.num_heads_q * self._layers)
        return SparseMetadata(**vars(stock), split=self._split(rows, stock, starts)) if rows else stock

    def _split(self, rows: list[SparseRow], stock: FlashAttentionMetadata, starts: list[int]) -> _Split:
        kinds: dict[str, list[SparseRow]] = {}
        for row in rows:
            row.asked.total_pages += row.tiles.total * self.num_heads_q * self._layers
            kinds.setdefault(row.asked.selector.heads, []).append(row)
        sparse = [together(alike, self.num_heads_q, self.num_heads_kv, self.device) for alike in kinds.values()]
        chosen = {row.number for row in rows}
        others = [number not in chosen for number in range(len(starts) - 1)]
        if not any(other and starts[number] < starts[number + 1] for number, other in enumerate(others)):
            return _Split(sparse, None)
        # Rows without keys cost nothing, and what is written for them is written again.
        keys = stock.seq_lens * _to_device(torch.tensor(others, dtype=torch.int32), self.device)
        return _Split(sparse, replace(stock, seq_lens=keys, scheduler_metadata=None))

    def _compile(self, impl: SparseFlashAttentionImpl) -> None:
        """Compile the kernels for requests that leave all but the rule to us: none of them shall wait for that."""
        heads, size, page, dtype = self.num_heads_q, self.headdim, self.block_size, self.model_config.dtype
        tokens = 2 * DEFAULT.tile
        pages = (DEFAULT.start + tokens) // page
        stored = current_platform.fp8_dtype() if impl.quantised else dtype
        asked_with = stored if impl.supports_quant_query_input and impl.quantised else dtype
        query = torch.zeros(tokens, heads, size, device=self.device).to(asked_with)
        cache = torch.zeros(pages, self.num_heads_kv, page, 2 * size, device=self.device).to(stored)
        table = torch.arange(pages, dtype=torch.int32, device=self.device)[None]
        output = torch.empty(tokens, heads, size, device=self.device, dtype=dtype)
        one = torch.ones(1, device=self.device)
        for rule in get_args(Rule):
            selector = replace(DEFAULT, rule=rule, value=1, late=1)
            tiles = Tiling(pages * page - tokens, tokens, pages * page, self._choice, selector)
            row = SparseRow(Asked(pages * page, sparse=True, selector=selector), 0, slice(0, tokens), tiles)
            rows = together([row], heads, self.num_heads_kv, self.device)
            impl.attend(query, cache, table, rows, output, Scales(one, one, one, 1.0))


class SparseFlashAttentionImpl(FlashAttentionImpl):  # type: ignore[misc]
    """Attention of one layer."""

    layer: int = 0
    layers: int = 1
    refusal: str | None = "not set up"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = get_current_vllm_config_or_none()

    @property
    def quantised(self) -> bool:
        """Whether keys and values are stored in eight bits."""
        return bool(is_quantized_kv_cache(self.kv_cache_dtype))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            self._profile(query, output)
        split = getattr(attn_metadata, "split", None)
        if split is None or self.refusal is not None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert attn_metadata is not None
        if split.stock is not None:
            super().forward(layer, query, key, value, kv_cache, split.stock, output)
        scale = 1.0
        if self.quantised:
            kv_cache = kv_cache.view(current_platform.fp8_dtype())
            scale = layer._k_scale_float * (layer._q_scale_float if self.supports_quant_query_input else 1.0)
        scales = Scales(layer._q_scale, layer._k_scale, layer._v_scale, scale)
        shape = (-1, self.num_heads, self.head_size)
        for rows in split.sparse:
            self.attend(query.view(shape), kv_cache, attn_metadata.block_table, rows, output.view(shape), scales)
        return output

    def _profile(self, query: Tensor, output: Tensor) -> None:
        """Take what a sparse step at the end of the longest prompt needs, while vLLM looks how much a step needs."""
        if self._config is None or torch.cuda.is_current_stream_capturing():
            return
        page, end = self._config.cache_config.block_size, self._config.model_config.max_model_len
        tokens = min(len(query), end)
        tiles = Tiling(end - tokens, tokens, end, chosen_together(page), DEFAULT)
        row = SparseRow(Asked(end, sparse=True, selector=DEFAULT), 0, slice(0, tokens), tiles)
        rows = together([row], self.num_heads, self.num_kv_heads, query.device)
        shape = (-1, self.num_heads, self.head_size)
        self.buffers(query.view(shape), page, rows, output.view(shape))

    def attend(
        self, query: Tensor, cache: Tensor, block_table: Tensor, rows: _Rows, output: Tensor, scales: Scales
    ) -> None:
        """Attention of sparse rows.

        Args:
            query: [tokens, query heads, head size].
            cache: [pages, KV heads, page size, 2 * head size], keys beside values, in any order in memory.
            block_table: [rows, pages], int32.
            output: [tokens, query heads, head size], written where the sparse rows are.
        """
        buffers = rows.buffers = rows.buffers or self.buffers(query, cache.shape[2], rows, output)
        self.choose(query, cache, block_table, rows, buffers, scales)
        self.read(cache, rows, buffers, scales)
        tokens = 0
        for row, room in zip(rows.sparse, buffers.rows, strict=True):
            count = row.tiles.tokens * self.num_heads
            folded = buffers.output[tokens : tokens + count]
            kernels.unfold(folded, row.tiles, len(room.shares), self.num_kv_heads, output[row.tokens])
            tokens += count

    def choose(
        self, query: Tensor, cache: Tensor, block_table: Tensor, rows: _Rows, buffers: _Buffers, scales: Scales
    ) -> None:
        """Fold the queries, and make the page tables of their tiles."""
        keys = cache.transpose(1, 2)[..., : self.head_size]
        folding = kernels.Folding(*cache.stride()[:3])
        tokens = sequences = 0
        for row, room in zip(rows.sparse, buffers.rows, strict=True):
            tiles, table = row.tiles, block_table[row.number]
            counted = row.asked.counted
            assert isinstance(counted, _Counted)
            begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record()
            kernels.span_means(keys, table, tiles, room.means)
            folded = buffers.query[tokens : tokens + tiles.tokens * self.num_heads]
            kernels.fold(query[row.tokens], tiles, self.num_kv_heads, folded, room.groups)
            kernels.estimate(room.groups, room.means, self.scale * scales.logits, tiles, room.estimate)
            kernels.page_tables(
                room.estimate,
                tiles.selector.at(self.layer, self.layers),
                table,
                tiles,
                folding,
                cache.shape[2],
                room.shares,
                buffers.tables[sequences:],
                buffers.lengths[sequences:],
                counted.kept,
            )
            done.record()
            counted.marks.append((begun, done))
            tokens += tiles.tokens * self.num_heads
            sequences += len(room.shares) * tiles.count

    def read(self, cache: Tensor, rows: _Rows, buffers: _Buffers, scales: Scales) -> None:
        """Attention of all virtual sequences, in one call of the kernel."""
        size, group = self.head_size, self.num_heads // len(buffers.rows[0].shares)
        pages, kv_heads, page, _ = cache.shape
        folding = kernels.Folding(*cache.stride()[:3])
        # KV heads become pages: the same memory, seen with other strides.
        folded = cache.as_strided(
            ((pages - 1) * folding.pages + kv_heads, page, 1, 2 * size), (folding.head, folding.token, folding.head, 1)
        )
        scale_of_sequences = (len(buffers.lengths), 1)
        fa_utils.flash_attn_varlen_func(
            q=buffers.query.view(-1, group, size),
            k=folded[..., :size],
            v=folded[..., size:],
            out=buffers.output.view(-1, group, size),
            max_seqlen_q=rows.longest_tile,
            cu_seqlens_q=rows.starts,
            max_seqlen_k=rows.longest,
            seqused_k=buffers.lengths,
            softmax_scale=self.scale,
            causal=True,
            block_table=buffers.tables,
            fa_version=3,
            q_descale=scales.query.expand(scale_of_sequences) if self.supports_quant_query_input else None,
            k_descale=scales.key.expand(scale_of_sequences),
            v_descale=scales.value.expand(scale_of_sequences),
            num_splits=1,
        )

    def buffers(self, query: Tensor, page: int, rows: _Rows, output: Tensor) -> _Buffers:
        """Room for what the layers of a step compute on the way; `page` is the tokens of a page of the cache."""
        size, device = self.head_size, query.device
        tokens = sum(row.tiles.tokens for row in rows.sparse) * self.num_heads
        sequences = len(rows.starts) - 1
        # Rows of tables begin where memory is aligned.
        width = math.ceil(rows.longest / page / 4) * 4
        rooms = []
        for row in rows.sparse:
            tiles, selector = row.tiles, row.tiles.selector
            kv_heads = self.num_kv_heads
            each, groups = self.num_heads // kv_heads, selector.tile // selector.group
            heads = _choosing(tiles, self.num_heads, kv_heads)
            rooms.append(
                _Room(
                    means=torch.empty(kv_heads, tiles.spans, size, dtype=output.dtype, device=device),
                    groups=torch.empty(kv_heads, tiles.count, each, groups, size, dtype=output.dtype, device=device),
                    estimate=kernels.Estimate.empty(tiles, kv_heads, each, device),
                    shares=torch.empty(heads, tiles.count, tiles.pages, dtype=torch.float32, device=device),
                )
            )
        return _Buffers(
            query=torch.empty(tokens, size, dtype=query.dtype, device=device),
            output=torch.empty(tokens, size, dtype=output.dtype, device=device),
            tables=torch.empty(sequences, width, dtype=torch.int32, device=device),
            lengths=torch.empty(sequences, dtype=torch.int32, device=device),
            rows=rooms,
        )


def together(rows: list[SparseRow], num_heads: int, num_kv_heads: int, device: torch.device) -> _Rows:
    """What the layers need to read these rows, in all of which as many heads choose, in one call of the kernel."""
    starts = [torch.zeros(1, dtype=torch.int32)]
    for row in rows:
        heads = _choosing(row.tiles, num_heads, num_kv_heads)
        if row.asked.counted is None:
            row.asked.counted = _Counted(device, num_heads // heads)
        starts.append(kernels.sequence_starts(row.tiles, heads, num_kv_heads)[1:] + starts[-1][-1])
    return _Rows(
        sparse=rows,
        starts=_to_device(torch.cat(starts), device),
        longest_tile=max(row.tiles.selector.tile for row in rows),
        longest=max(row.tiles.end for row in rows),
    )


def _choosing(tiles: Tiling, num_heads: int, num_kv_heads: int) -> int:
    """How many heads choose for themselves."""
    return num_heads if tiles.selector.heads == "query" else num_kv_heads


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)


def chosen_together(page: int) -> int:
    """How many tokens are chosen as a whole, where a page of the cache has so many."""
    return page * max(1, _LEAST_CHOICE // page)


def _refusal(impl: FlashAttentionImpl, vllm_config: VllmConfig, page: int) -> str | None:
    """Why a layer is always read exactly, in a few fixed words, or None."""
    parallel = vllm_config.parallel_config
    reasons = {
        "not a decoder layer": impl.attn_type != AttentionType.DECODER,
        "sliding window": impl.sliding_window != (-1, -1),
        "ALiBi": impl.alibi_slopes is not None,
        "soft cap": bool(impl.logits_soft_cap),
        "attention sinks": impl.sinks is not None,
        "not FlashAttention 3": impl.vllm_flash_attn_version != 3,
        "context parallel": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "micro-batches": parallel.use_ubatching,
        "speculative decoding": vllm_config.speculative_config is not None,
        "batch invariance": envs.VLLM_BATCH_INVARIANT,
        "page size": bool(page & (page - 1)),
        "head size": not kernels.fits_head(impl.head_size),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _misfit(selector: Selector, metadata: FlashAttentionMetadata, choice: int) -> str | None:
    """Why a request cannot be read sparsely as it asked, or None."""
    if choice % selector.span:
        return "span does not divide page"
    if not kernels.fits_sizes(selector):
        return "sizes of the selector"
    if metadata.causal is not True or metadata.mm_prefix_query_range_tensor is not None or metadata.rswa_window:
        return "not causal"
    return None
