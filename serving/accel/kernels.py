"""Selection on CUDA: three launches a row and layer make short page tables from queries and cache. Written in Triton.

`span_means` averages neighbouring keys, `page_shares` estimates the attention of each tile, `page_tables` applies the
rule and lists the pages that are kept. They compute what `policy.py` and `page_tables.py` say, with these differences:
the softmax is online (Milakov and Gimelshein 2018), products take their inputs in the precision of the model, and the
rules `mass` and `budget` find their threshold by halving the interval of the shares' bit patterns instead of sorting.

Virtual sequences are in another order than on the CPU: the last tile comes first, and within a tile head after head.
Dense tiles read the most and stand at the end of a prompt; begun first, they overlap with everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from serving.accel.policy import Selector, Tiling

_RULES = {"alpha": 0, "mass": 1, "budget": 2}
# Shares are kept above the smallest normal number of half precision while they are summed.
_LIFT = tl.constexpr(1024.0)
# The bits of 4.0, more than a share of what is always kept, which counts 2 more than it is.
_ABOVE_ALL = tl.constexpr(0x40800000)
_LOG2_E = math.log2(math.e)

_MEANS_TOKENS = 128
_SHARES_ROWS = 128
_MOST_ROWS = 256
_LARGEST_TILE = 256
_SHARES_SPANS = 64
_TABLE_PAGES = 1024


@dataclass(frozen=True, slots=True)
class Folding:
    """How a cache with many KV heads is read as one with a single head; strides in elements.

    Page p of head h is the virtual page p * `pages` + h of a view whose pages are `head` elements apart.
    """

    page: int
    head: int
    token: int

    @property
    def pages(self) -> int:
        return self.page // self.head


def fits_head(size: int) -> bool:
    """Whether the kernels can serve heads of this size."""
    return size in (64, 128, 256)


def fits_sizes(selector: Selector, each: int) -> bool:
    """Whether the kernels can serve the sizes of a selector, with so many query heads of a KV head."""
    sizes = (selector.tile, selector.group, selector.span)
    powers = not any(size & (size - 1) for size in sizes)
    return powers and selector.tile <= _LARGEST_TILE and each * selector.tile // selector.group <= _MOST_ROWS


def span_means(cache: Tensor, table: Tensor, tiles: Tiling, out: Tensor) -> None:
    """Means of every `span` neighbouring keys of a request.

    Args:
        cache: [pages, page size, KV heads, head size], the keys, with any strides but the last.
        table: [pages of the request], int32.
        out: [KV heads, spans, head size], whole pages of the tiling; spans that do not exist become zero.
    """
    _, page, heads, size = cache.shape
    span, spans = tiles.selector.span, out.shape[1]
    block = max(1, _MEANS_TOKENS // span)
    _span_means[triton.cdiv(spans, block), heads](
        cache,
        table,
        out,
        tiles.end,
        spans,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        PAGE=page,
        SPAN=span,
        SPANS=block,
        SIZE=size,
        num_warps=4,
    )


def page_shares(query: Tensor, means: Tensor, scale: float, tiles: Tiling, folded: Tensor, out: Tensor) -> None:
    """The estimated share of each tile's attention on each page; on the way the queries are folded.

    Dense tiles are not estimated, what `out` says of them is undefined.

    Args:
        query: [tokens, query heads, head size].
        means: [KV heads, spans, head size], from `span_means`.
        scale: factor of the attention's logits, that of quantised queries and keys included.
        folded: [tokens * query heads, head size], written: the queries in the order of the virtual sequences.
        out: [heads, tiles, pages] in float32; heads as the selector says.
    """
    selector = tiles.selector
    heads, kv_heads = query.shape[1], means.shape[0]
    each, groups = heads // kv_heads, selector.tile // selector.group
    together = max(1, _SHARES_ROWS // (each * groups))
    per_head = selector.heads == "query"
    _page_shares[triton.cdiv(tiles.count, together), kv_heads](
        query,
        means,
        folded,
        out,
        tiles.first,
        tiles.end,
        tiles.dense_from,
        selector.start,
        tiles.count,
        means.shape[1],
        out.shape[2],
        scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        TILE=selector.tile,
        GROUP=selector.group,
        SPAN=selector.span,
        SPANS_OF_PAGE=tiles.page // selector.span,
        EACH=each,
        TOGETHER=together,
        ROWS=triton.next_power_of_2(max(16, together * each * groups)),
        OUT=triton.next_power_of_2(max(16, together * (each if per_head else 1))),
        SIZE=query.shape[2],
        BLOCK=max(_SHARES_SPANS, tiles.page // selector.span),
        PER_HEAD=per_head,
        num_warps=8,
        num_stages=2,
    )


def page_tables(
    shares: Tensor,
    value: float,
    table: Tensor,
    tiles: Tiling,
    folding: Folding,
    kv_heads: int,
    page: int,
    tables: Tensor,
    lengths: Tensor,
    kept: Tensor,
) -> None:
    """Choose pages and list them.

    Args:
        shares: [heads, tiles, pages], from `page_shares`.
        value: of the selector's rule, in this layer.
        table: [pages of the request], int32.
        page: tokens of a page of the cache; several are chosen together if the tiling's are larger.
        tables: [virtual sequences, any width that suffices], int32, written.
        lengths: [virtual sequences], int32, written: keys that each reads.
        kept: [1], int64: the number of pages kept is added.
    """
    selector = tiles.selector
    heads, count, units = shares.shape
    _page_tables[count, heads](
        shares,
        table,
        tables,
        lengths,
        kept,
        tiles.first,
        tiles.end,
        tiles.dense_from,
        selector.start,
        selector.sink,
        selector.window,
        units,
        tables.stride(0),
        folding.pages,
        # A budget is given in pages, or as a share of those that a tile sees.
        float(value // tiles.page if selector.rule == "budget" and value >= 1 else value),
        int(value < 1),
        RULE=_RULES[selector.rule],
        TILE=selector.tile,
        UNIT=tiles.page,
        PAGE=page,
        EACH=heads // kv_heads,
        BLOCK=_TABLE_PAGES,
        num_warps=4,
    )


def unfold(folded: Tensor, tiles: Tiling, heads: int, out: Tensor) -> None:
    """Write what was attended in the order of virtual sequences to where the batch has it.

    Args:
        folded: [tokens * query heads, head size].
        heads: that choose, query or KV.
        out: [tokens, query heads, head size], with any strides but the last.
    """
    query_heads, size = out.shape[1:]
    _unfold[tiles.count, query_heads](
        folded,
        out,
        tiles.first,
        tiles.end,
        out.stride(0),
        out.stride(1),
        TILE=tiles.selector.tile,
        EACH=query_heads // heads,
        SIZE=size,
        num_warps=4,
    )


def sequence_starts(tiles: Tiling, heads: int) -> Tensor:
    """Where the queries of each virtual sequence begin among those of the request, [sequences + 1], int32."""
    starts = torch.zeros(tiles.count * heads + 1, dtype=torch.int32)
    torch.cumsum(tiles.lengths.flip(0).repeat_interleave(heads), 0, dtype=torch.int32, out=starts[1:])
    return starts


# Nothing that changes from step to step may lead to another compilation: that would stall a request for seconds.
@triton.jit(do_not_specialize=["end", "spans"], do_not_specialize_on_alignment=["table"])
def _span_means(
    cache,
    table,
    means,
    end,
    spans,
    page_stride,
    token_stride,
    head_stride,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    SIZE: tl.constexpr,
):
    head = tl.program_id(1)
    first = tl.program_id(0) * SPANS
    position = first * SPAN + tl.arange(0, SPANS * SPAN)
    written = position < end
    page = tl.load(table + position // PAGE, mask=written, other=0).to(tl.int64)
    rows = cache + page * page_stride + (position % PAGE) * token_stride + head * head_stride
    size = tl.arange(0, SIZE)
    keys = tl.load(rows[:, None] + size[None, :], mask=written[:, None], other=0.0).to(tl.float32)
    sums = tl.sum(tl.reshape(keys, (SPANS, SPAN, SIZE)), axis=1)
    span = first + tl.arange(0, SPANS)
    count = tl.minimum(tl.maximum(end - span * SPAN, 1), SPAN).to(tl.float32)
    mean = (sums / count[:, None]).to(means.dtype.element_ty)
    tl.store(means + (head * spans + span)[:, None] * SIZE + size[None, :], mean, mask=(span < spans)[:, None])


@triton.jit(do_not_specialize=["first", "end", "dense_from", "start", "tiles", "spans", "pages", "scale"])
def _page_shares(
    query,
    means,
    folded,
    shares,
    first,
    end,
    dense_from,
    start,
    tiles,
    spans,
    pages,
    scale,
    token_stride,
    head_stride,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS_OF_PAGE: tl.constexpr,
    EACH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    # A program has the groups of some tiles and of all query heads of a KV head as its rows, so that it reads the
    # means of that head once for all of them.
    GROUPS: tl.constexpr = TILE // GROUP
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    # The longest first.
    tile0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOGETHER
    row = tl.arange(0, ROWS)
    tile = tile0 + row // (EACH * GROUPS)
    each = row // GROUPS % EACH
    real = (row < TOGETHER * EACH * GROUPS) & (tile < tiles)
    begin = (first // TILE + tile) * TILE
    stop = tl.minimum(begin + TILE, end)
    group_begin = begin + row % GROUPS * GROUP
    group_end = tl.minimum(group_begin + GROUP, end)

    tile_first = tl.maximum(begin, first)
    length = stop - tile_first
    # int64: the queries of all heads of a long step are many.
    if PER_HEAD:
        base = ((end - stop) * (kv_heads * EACH) + (kv_head * EACH + each) * length - tile_first).to(tl.int64)
    else:
        base = ((end - stop) * kv_heads + kv_head * length - tile_first).to(tl.int64)
    size = tl.arange(0, SIZE)
    sums = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    for n in range(GROUP):
        position = group_begin + n
        there = (real & (position >= first) & (position < end))[:, None]
        source = (position - first).to(tl.int64) * token_stride + (kv_head * EACH + each) * head_stride
        value = tl.load(query + source[:, None] + size[None, :], mask=there, other=0.0)
        if PER_HEAD:
            target = base + position
        else:
            target = (base + position) * EACH + each
        tl.store(folded + target[:, None] * SIZE + size[None, :], value, mask=there)
        sums += value.to(tl.float32)

    tile0_begin = (first // TILE + tile0) * TILE
    tile0_stop = tl.minimum(tile0_begin + TILE, end)
    last_begin = tile0_begin + (TOGETHER - 1) * TILE
    if (last_begin >= start) & (tile0_stop <= dense_from):
        count = tl.minimum(group_begin + GROUP, end) - tl.maximum(group_begin, first)
        mean = (sums / tl.maximum(count, 1).to(tl.float32)[:, None]).to(means.dtype.element_ty)
        groups = (stop - begin + GROUP - 1) // GROUP - (tile_first - begin) // GROUP
        if PER_HEAD:
            chooser = tile * EACH + each - tile0 * EACH
            weight = 1.0 / tl.maximum(groups, 1).to(tl.float32)
        else:
            chooser = tile - tile0
            weight = 1.0 / (tl.maximum(groups, 1) * EACH).to(tl.float32)
        weight = tl.where(real & (count > 0), weight, 0.0)
        chosen_by = tl.arange(0, OUT)
        average = tl.where(chosen_by[:, None] == chooser[None, :], weight[None, :], 0.0).to(tl.float16)

        # Only what the last of these tiles sees.
        seen = (tl.minimum(tile0_begin + TOGETHER * TILE, end) + SPAN - 1) // SPAN
        largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        for at in range(0, seen, BLOCK):
            span = at + tl.arange(0, BLOCK)
            source = means + (kv_head * spans + span)[None, :] * SIZE + size[:, None]
            keys = tl.load(source, mask=(span < spans)[None, :], other=0.0)
            logits = tl.dot(mean, keys) * scale
            logits = tl.where((span * SPAN)[None, :] < group_end[:, None], logits, float("-inf"))
            now = tl.maximum(largest, tl.max(logits, axis=1))
            total = total * tl.exp2(largest - now) + tl.sum(tl.exp2(logits - now[:, None]), axis=1)
            largest = now
        lift = _LIFT / total

        out_tile = tile0 + (chosen_by // EACH if PER_HEAD else chosen_by)
        head = kv_head * EACH + chosen_by % EACH if PER_HEAD else kv_head + chosen_by * 0
        out_real = (chosen_by < TOGETHER * (EACH if PER_HEAD else 1)) & (out_tile < tiles)
        out_row = (head * tiles + out_tile).to(tl.int64) * pages
        for at in range(0, seen, BLOCK):
            span = at + tl.arange(0, BLOCK)
            source = means + (kv_head * spans + span)[None, :] * SIZE + size[:, None]
            keys = tl.load(source, mask=(span < spans)[None, :], other=0.0)
            logits = tl.dot(mean, keys) * scale
            logits = tl.where((span * SPAN)[None, :] < group_end[:, None], logits, float("-inf"))
            attention = (tl.exp2(logits - largest[:, None]) * lift[:, None]).to(tl.float16)
            share = tl.dot(average, attention) / _LIFT
            share = tl.sum(tl.reshape(share, (OUT, BLOCK // SPANS_OF_PAGE, SPANS_OF_PAGE)), axis=2)
            page = at // SPANS_OF_PAGE + tl.arange(0, BLOCK // SPANS_OF_PAGE)
            tl.store(shares + out_row[:, None] + page[None, :], share, mask=out_real[:, None] & (page < pages)[None, :])


@triton.jit
def _boosted(row, page, visible, begin, sink, window, UNIT: tl.constexpr):
    """Shares of some pages, where those that are kept in any case have 2 more; invisible ones have none."""
    share = tl.load(row + page, mask=page < visible, other=0.0)
    always = (page * UNIT < sink) | (page * UNIT + UNIT > begin - window)
    return tl.where(page < visible, share + tl.where(always, 2.0, 0.0), -1.0), share


@triton.jit(
    do_not_specialize=[
        "first",
        "end",
        "dense_from",
        "start",
        "sink",
        "window",
        "units",
        "width",
        "folds",
        "value",
        "relative",
    ],
    do_not_specialize_on_alignment=["table", "tables", "lengths", "kept"],
)
def _page_tables(
    shares,
    table,
    tables,
    lengths,
    kept,
    first,
    end,
    dense_from,
    start,
    sink,
    window,
    units,
    width,
    folds,
    value,
    relative,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PAGES: tl.constexpr = UNIT // PAGE
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    begin = (first // TILE + tile) * TILE
    stop = tl.minimum(begin + TILE, end)
    visible = (stop + UNIT - 1) // UNIT
    sparse = (begin >= start) & (stop <= dense_from)
    everything = tl.where(sparse, 0, visible)
    row = shares + (head * tiles + tile).to(tl.int64) * units

    least = value * 0.0
    threshold = first * 0
    if sparse:
        if RULE == 0:
            best = tl.zeros((BLOCK,), dtype=tl.float32)
            for at in range(0, visible, BLOCK):
                page = at + tl.arange(0, BLOCK)
                best = tl.maximum(best, tl.load(row + page, mask=page < visible, other=0.0))
            least = value * tl.max(best, axis=0)
        else:
            # Positive numbers are in the order of their bits. `low` keeps enough or too much, `high` too little or
            # just enough.
            low = first * 0
            high = low + _ABOVE_ALL
            most = value
            if RULE == 2:
                most = tl.where(relative != 0, tl.floor(value * visible.to(tl.float32)), value)
            for _ in range(31):
                middle = low + (high - low) // 2
                number = tl.zeros((BLOCK,), dtype=tl.float32)
                for at in range(0, visible, BLOCK):
                    page = at + tl.arange(0, BLOCK)
                    boosted, share = _boosted(row, page, visible, begin, sink, window, UNIT)
                    above = boosted.to(tl.int32, bitcast=True) >= middle
                    number += tl.where(above, 1.0 if RULE == 2 else share, 0.0)
                enough = tl.sum(number, axis=0)
                if RULE == 2:
                    little = enough <= most
                else:
                    little = (enough < value) | (value >= 1.0)
                low = tl.where(little, low, middle)
                high = tl.where(little, middle, high)
            threshold = high if RULE == 2 else low

    sequence = (tiles - 1 - tile) * heads + head
    target = tables + sequence.to(tl.int64) * width
    found = first * 0
    for at in range(0, visible, BLOCK):
        page = at + tl.arange(0, BLOCK)
        boosted, share = _boosted(row, page, visible, begin, sink, window, UNIT)
        keep = boosted >= 1.5
        if RULE == 0:
            keep = keep | (share >= least)
        else:
            keep = keep | (boosted.to(tl.int32, bitcast=True) >= threshold)
        keep = (keep & (page < visible)) | (page < everything)
        one = tl.where(keep, 1, 0)
        place = found + tl.cumsum(one, axis=0) - 1
        found += tl.sum(one, axis=0)
        part = tl.arange(0, PAGES)
        cache_page = page[:, None] * PAGES + part[None, :]
        listed = keep[:, None] & (cache_page * PAGE < stop)
        physical = tl.load(table + cache_page, mask=listed, other=0)
        tl.store(target + place[:, None] * PAGES + part[None, :], physical * folds + head // EACH, mask=listed)
    tl.store(lengths + sequence, (found - visible) * UNIT + stop)
    tl.atomic_add(kept, found.to(tl.int64))


@triton.jit(do_not_specialize=["first", "end"])
def _unfold(
    folded,
    out,
    first,
    end,
    token_stride,
    head_stride,
    TILE: tl.constexpr,
    EACH: tl.constexpr,
    SIZE: tl.constexpr,
):
    query_head = tl.program_id(1)
    heads = tl.num_programs(1) // EACH
    begin = (first // TILE + tl.program_id(0)) * TILE
    stop = tl.minimum(begin + TILE, end)
    position = begin + tl.arange(0, TILE)
    there = ((position >= first) & (position < end))[:, None]
    tile_first = tl.maximum(begin, first)
    source = ((end - stop) * heads + query_head // EACH * (stop - tile_first) + position - tile_first).to(tl.int64)
    source = source * EACH + query_head % EACH
    size = tl.arange(0, SIZE)
    value = tl.load(folded + source[:, None] * SIZE + size[None, :], mask=there, other=0.0)
    target = (position - first).to(tl.int64) * token_stride + query_head * head_stride
    tl.store(out + target[:, None] + size[None, :], value, mask=there)
