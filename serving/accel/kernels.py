"""Selection on CUDA: short page tables from queries and cache, in four launches a row and layer. Written in Triton.

`span_means` averages neighbouring keys and `fold` neighbouring queries, `estimate` multiplies them, `page_tables`
applies the rule and lists the pages that are kept. They compute what `policy.py` and `page_tables.py` say, with these
differences: the softmax is put together from blocks of keys (Milakov and Gimelshein 2018, arXiv:1805.02867), so that
all of them can be computed at once; products take their inputs in the precision of the model; and the rules `mass` and
`budget` search for their threshold among the shares' bit patterns instead of sorting.

Virtual sequences are in another order than on the CPU. The dense tiles at the end of a prompt read the most; they come
first, so that they overlap with everything else. Then comes one KV head after another, so that most of what is read at
a time is in the device's cache. Within these, later tiles come first, and within a tile head after head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.accel.policy import Selector, Tiling

_RULES = {"alpha": 0, "mass": 1, "budget": 2}
_LOG2_E = math.log2(math.e)

_LARGEST_TILE = 256
# What a program has before it: tokens whose keys are averaged; groups of queries, spans, and how many times so many
# spans; estimates, pages, pages that are searched for a threshold.
_MEANS_TOKENS = 256
_ROWS = 128
_SPANS = 64
_BLOCKS = 8
_ESTIMATE_PAGES = 4096
_TABLE_PAGES = 512
_SEARCHED_PAGES = 512


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


@dataclass(frozen=True, slots=True)
class Estimate:
    """Attention of groups of queries on pages, in parts that can be computed in any order.

    A group's rows are those of `fold`. `pages` [KV heads, tiles, rows of a tile, pages] in half precision are sums of
    2 ** (logit - top), where `tops` [KV heads, tiles, rows of a tile, blocks] is the largest logit of the group among
    `block` neighbouring spans; `totals`, of the same shape, sums the pages of a block.
    """

    pages: Tensor
    tops: Tensor
    totals: Tensor
    block: int

    @classmethod
    def empty(cls, tiles: Tiling, kv_heads: int, each: int, device: torch.device) -> Estimate:
        """Room for the estimate of one row of the batch."""
        selector = tiles.selector
        shape = (kv_heads, tiles.count, each * selector.tile // selector.group)
        block = max(_SPANS, tiles.page // selector.span)
        blocks = math.ceil(tiles.spans / block)
        tops = torch.empty(*shape, blocks, dtype=torch.float32, device=device)
        # Rows are aligned, so that pages are written in whole words.
        padded = math.ceil(tiles.pages / 8) * 8
        return cls(torch.empty(*shape, padded, dtype=torch.float16, device=device), tops, torch.empty_like(tops), block)


def fits_head(size: int) -> bool:
    """Whether the kernels can serve heads of this size."""
    return size in (64, 128, 256)


def fits_sizes(selector: Selector) -> bool:
    """Whether the kernels can serve the sizes of a selector."""
    sizes = (selector.tile, selector.group, selector.span)
    return not any(size & (size - 1) for size in sizes) and selector.tile <= _LARGEST_TILE


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


def fold(query: Tensor, tiles: Tiling, kv_heads: int, folded: Tensor, groups: Tensor) -> None:
    """Put queries in the order of the virtual sequences, and average neighbours.

    Args:
        query: [tokens, query heads, head size], with any strides but the last.
        folded: [tokens * query heads, head size], written.
        groups: [KV heads, tiles, query heads of each, groups, head size], written; groups without queries are zero.
    """
    heads, size = query.shape[1:]
    selector = tiles.selector
    _fold[tiles.count, heads](
        query,
        folded,
        groups,
        tiles.first,
        tiles.tail,
        tiles.end,
        query.stride(0),
        query.stride(1),
        TILE=selector.tile,
        GROUP=selector.group,
        EACH=heads // kv_heads,
        TOGETHER=1 if selector.heads == "query" else heads // kv_heads,
        SIZE=size,
        num_warps=4,
    )


def estimate(groups: Tensor, means: Tensor, scale: float, tiles: Tiling, out: Estimate) -> None:
    """The attention of each group of queries on each page, up to factors that `out` holds, too.

    Args:
        groups: from `fold`.
        means: [KV heads, spans, head size], from `span_means`.
        scale: factor of the attention's logits, that of quantised queries and keys included.
    """
    selector = tiles.selector
    kv_heads, _, each, count, size = groups.shape
    spans = means.shape[1]
    block = out.block
    rows = tiles.count * each * count
    _estimate[triton.cdiv(rows, _ROWS), kv_heads, triton.cdiv(spans, block * _BLOCKS)](
        groups,
        means,
        out.pages,
        out.tops,
        out.totals,
        tiles.first,
        tiles.tail,
        tiles.end,
        selector.start,
        rows,
        spans,
        out.pages.shape[-1],
        out.tops.shape[-1],
        scale * _LOG2_E,
        TILE=selector.tile,
        GROUP=selector.group,
        SPAN=selector.span,
        SPANS_OF_PAGE=tiles.page // selector.span,
        EACH=each,
        ROWS=_ROWS,
        SIZE=size,
        BLOCK=block,
        BLOCKS=_BLOCKS,
        num_warps=4,
        num_stages=3,
    )


def page_tables(
    estimate: Estimate,
    value: float,
    table: Tensor,
    tiles: Tiling,
    folding: Folding,
    page: int,
    shares: Tensor,
    tables: Tensor,
    lengths: Tensor,
    kept: Tensor,
) -> None:
    """Choose pages and list them.

    Args:
        value: of the selector's rule, in this layer.
        table: [pages of the request], int32.
        page: tokens of a page of the cache; several are chosen together if the tiling's are larger.
        shares: [heads, tiles, pages] in float32, written: the estimated share of each tile's attention on each page.
            Heads as the selector says. Undefined for dense tiles.
        tables: [virtual sequences, any width that suffices], int32, written.
        lengths: [virtual sequences], int32, written: keys that each reads.
        kept: [1], int64: the number of pages kept is added.
    """
    selector = tiles.selector
    heads, count, units = shares.shape
    kv_heads, _, rows_of_tile, _ = estimate.pages.shape
    rows = rows_of_tile * kv_heads // heads
    _page_tables[count, heads](
        estimate.pages,
        estimate.tops,
        estimate.totals,
        shares,
        table,
        tables,
        lengths,
        kept,
        tiles.first,
        tiles.tail,
        tiles.end,
        tiles.before_tail,
        selector.start,
        selector.sink,
        selector.window,
        units,
        estimate.pages.shape[-1],
        estimate.tops.shape[-1],
        tables.stride(0),
        folding.pages,
        # A budget is given in pages, or as a share of those that a tile sees.
        float(value // tiles.page if selector.rule == "budget" and value >= 1 else value),
        int(value < 1),
        RULE=_RULES[selector.rule],
        TILE=selector.tile,
        GROUP=selector.group,
        SPANS_OF_PAGE=tiles.page // selector.span,
        BLOCK_OF_ESTIMATE=estimate.block,
        UNIT=tiles.page,
        PAGE=page,
        CHOOSERS=heads // kv_heads,
        ROWS=rows,
        SOME_ROWS=triton.next_power_of_2(rows),
        SOME_BLOCKS=64,
        SOME_PAGES=max(16, _ESTIMATE_PAGES // triton.next_power_of_2(rows)),
        SEARCHED=_SEARCHED_PAGES,
        BLOCK=_TABLE_PAGES,
        num_warps=4,
    )


def unfold(folded: Tensor, tiles: Tiling, heads: int, kv_heads: int, out: Tensor) -> None:
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
        tiles.tail,
        tiles.end,
        out.stride(0),
        out.stride(1),
        TILE=tiles.selector.tile,
        CHOOSERS=heads // kv_heads,
        TOGETHER=query_heads // heads,
        SIZE=size,
        num_warps=4,
    )


def sequence_starts(tiles: Tiling, heads: int, kv_heads: int) -> Tensor:
    """Where the queries of each virtual sequence begin among those of the request, [sequences + 1], int32.

    Args:
        heads: that choose, query or KV.
    """
    backwards = tiles.lengths.flip(0)
    tail = tiles.count - tiles.before_tail
    lengths = [
        backwards[:tail].repeat_interleave(heads),
        backwards[tail:].repeat_interleave(heads // kv_heads).repeat(kv_heads),
    ]
    starts = torch.zeros(tiles.count * heads + 1, dtype=torch.int32)
    torch.cumsum(torch.cat(lengths), 0, dtype=torch.int32, out=starts[1:])
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
    span = tl.program_id(0) * SPANS + tl.arange(0, SPANS)
    size = tl.arange(0, SIZE)
    sums = tl.zeros((SPANS, SIZE), dtype=tl.float32)
    for n in tl.static_range(SPAN):
        position = span * SPAN + n
        written = position < end
        page = tl.load(table + position // PAGE, mask=written, other=0).to(tl.int64)
        rows = cache + page * page_stride + (position % PAGE) * token_stride + head * head_stride
        sums += tl.load(rows[:, None] + size[None, :], mask=written[:, None], other=0.0).to(tl.float32)
    count = tl.minimum(tl.maximum(end - span * SPAN, 1), SPAN).to(tl.float32)
    mean = (sums / count[:, None]).to(means.dtype.element_ty)
    tl.store(means + (head * spans + span)[:, None] * SIZE + size[None, :], mean, mask=(span < spans)[:, None])


@triton.jit
def _folded_row(
    position, head, tile_first, stop, first, tail, end, choosing, CHOOSERS: tl.constexpr, TOGETHER: tl.constexpr
):
    """Where the query of a head at a position of the tile [tile_first, stop) is put.

    Queries of heads that choose together are neighbours; `CHOOSERS` heads choose for a KV head.
    """
    last = stop > tail
    # Heads that are side by side within a tile; others stand before or behind all of its part of the prompt.
    bundle = tl.where(last, choosing, CHOOSERS)
    part_stop = tl.where(last, end, tail)
    part_tokens = part_stop - tl.where(last, tail, first)
    chooser = head // TOGETHER
    row = tl.where(last, 0, end - tail) * choosing + chooser // bundle * bundle * part_tokens
    row += (part_stop - stop) * bundle + chooser % bundle * (stop - tile_first) + position - tile_first
    # int64: the queries of all heads of a long step are many.
    return row.to(tl.int64) * TOGETHER + head % TOGETHER


@triton.jit(do_not_specialize=["first", "tail", "end"])
def _fold(
    query,
    folded,
    groups,
    first,
    tail,
    end,
    token_stride,
    head_stride,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    EACH: tl.constexpr,
    TOGETHER: tl.constexpr,
    SIZE: tl.constexpr,
):
    GROUPS: tl.constexpr = TILE // GROUP
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    head = tl.program_id(1)
    choosing = tl.num_programs(1) // TOGETHER
    begin = (first // TILE + tile) * TILE
    stop = tl.minimum(begin + TILE, end)
    tile_first = tl.maximum(begin, first)
    group = tl.arange(0, GROUPS)
    size = tl.arange(0, SIZE)
    sums = tl.zeros((GROUPS, SIZE), dtype=tl.float32)
    for n in tl.static_range(GROUP):
        position = begin + group * GROUP + n
        there = ((position >= first) & (position < end))[:, None]
        source = (position - first).to(tl.int64) * token_stride + head * head_stride
        value = tl.load(query + source[:, None] + size[None, :], mask=there, other=0.0)
        target = _folded_row(position, head, tile_first, stop, first, tail, end, choosing, EACH // TOGETHER, TOGETHER)
        tl.store(folded + target[:, None] * SIZE + size[None, :], value, mask=there)
        sums += value.to(tl.float32)
    group_begin = begin + group * GROUP
    count = tl.minimum(group_begin + GROUP, end) - tl.maximum(group_begin, first)
    mean = (sums / tl.maximum(count, 1).to(tl.float32)[:, None]).to(groups.dtype.element_ty)
    row = (((head // EACH) * tiles + tile) * EACH + head % EACH) * GROUPS + group
    tl.store(groups + row[:, None] * SIZE + size[None, :], mean)


@triton.jit(
    do_not_specialize=["first", "tail", "end", "start", "rows", "spans", "width", "blocks", "scale"],
)
def _estimate(
    groups,
    means,
    sums,
    tops,
    totals,
    first,
    tail,
    end,
    start,
    rows,
    spans,
    width,
    blocks,
    scale,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS_OF_PAGE: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    GROUPS: tl.constexpr = TILE // GROUP
    PAGES: tl.constexpr = BLOCK // SPANS_OF_PAGE
    kv_head = tl.program_id(1)
    row0 = tl.program_id(0) * ROWS
    last_row = tl.minimum(row0 + ROWS, rows) - 1
    earliest = (first // TILE + row0 // (EACH * GROUPS)) * TILE
    latest = (first // TILE + last_row // (EACH * GROUPS)) * TILE
    at0 = tl.program_id(2) * (BLOCK * BLOCKS)
    # Only what the last of these tiles sees, and nothing if all of them are dense.
    seen = (tl.minimum(latest + TILE, end) + SPAN - 1) // SPAN
    if (latest >= start) & (tl.minimum(earliest + TILE, end) <= tail):
        row = row0 + tl.arange(0, ROWS)
        real = row < rows
        begin = (first // TILE + row // (EACH * GROUPS)) * TILE
        group_end = tl.minimum(begin + row % GROUPS * GROUP + GROUP, end)
        size = tl.arange(0, SIZE)
        place = (kv_head * rows + row).to(tl.int64)
        query = tl.load(groups + place[:, None] * SIZE + size[None, :], mask=real[:, None], other=0.0)
        for at in range(at0, tl.minimum(at0 + BLOCK * BLOCKS, seen), BLOCK):
            span = at + tl.arange(0, BLOCK)
            source = means + (kv_head * spans + span)[None, :] * SIZE + size[:, None]
            keys = tl.load(source, mask=(span < spans)[None, :], other=0.0)
            logits = tl.dot(query, keys) * scale
            logits = tl.where((span * SPAN)[None, :] < group_end[:, None], logits, float("-inf"))
            top = tl.max(logits, axis=1)
            # A group that sees nothing of this block has no largest logit.
            power = tl.exp2(logits - tl.where(top == float("-inf"), 0.0, top)[:, None])
            of_page = tl.sum(tl.reshape(power, (ROWS, PAGES, SPANS_OF_PAGE)), axis=2)
            page = at // SPANS_OF_PAGE + tl.arange(0, PAGES)
            into = sums + place[:, None] * width + page[None, :]
            tl.store(into, of_page.to(tl.float16), mask=real[:, None] & (page < width)[None, :])
            block = place * blocks + at // BLOCK
            tl.store(tops + block, top, mask=real)
            tl.store(totals + block, tl.sum(of_page, axis=1), mask=real)


@triton.jit
def _boosted(row, page, visible, begin, sink, window, UNIT: tl.constexpr):
    """Shares of some pages, where those that are kept in any case have 2 more; invisible ones have none."""
    share = tl.load(row + page, mask=page < visible, other=0.0)
    always = (page * UNIT < sink) | (page * UNIT + UNIT > begin - window)
    return tl.where(page < visible, share + tl.where(always, 2.0, 0.0), -1.0), share


@triton.jit(
    do_not_specialize=[
        "first",
        "tail",
        "end",
        "before_tail",
        "start",
        "sink",
        "window",
        "units",
        "padded",
        "blocks",
        "width",
        "folds",
        "value",
        "relative",
    ],
    do_not_specialize_on_alignment=["table", "tables", "lengths", "kept"],
)
def _page_tables(
    sums,
    tops,
    totals,
    shares,
    table,
    tables,
    lengths,
    kept,
    first,
    tail,
    end,
    before_tail,
    start,
    sink,
    window,
    units,
    padded,
    blocks,
    width,
    folds,
    value,
    relative,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SPANS_OF_PAGE: tl.constexpr,
    BLOCK_OF_ESTIMATE: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    CHOOSERS: tl.constexpr,
    ROWS: tl.constexpr,
    SOME_ROWS: tl.constexpr,
    SOME_BLOCKS: tl.constexpr,
    SOME_PAGES: tl.constexpr,
    SEARCHED: tl.constexpr,
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
    sparse = (begin >= start) & (stop <= tail)
    everything = tl.where(sparse, 0, visible)
    row = shares + (head * tiles + tile).to(tl.int64) * units

    least = value * 0.0
    threshold = first * 0
    missing = value * 0.0
    if sparse:
        GROUPS: tl.constexpr = TILE // GROUP
        # The rows of this chooser: the groups of one query head, or of all query heads of a KV head.
        line = tl.arange(0, SOME_ROWS)
        real = line < ROWS
        place = (((head // CHOOSERS) * tiles + tile) * CHOOSERS + head % CHOOSERS).to(tl.int64) * ROWS + line
        top = tl.full((SOME_ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((SOME_ROWS,), dtype=tl.float32)
        seen = (visible * SPANS_OF_PAGE + BLOCK_OF_ESTIMATE - 1) // BLOCK_OF_ESTIMATE
        for at in range(0, seen, SOME_BLOCKS):
            block = at + tl.arange(0, SOME_BLOCKS)
            source = place[:, None] * blocks + block[None, :]
            known = real[:, None] & (block < seen)[None, :]
            some_tops = tl.load(tops + source, mask=known, other=float("-inf"))
            some_totals = tl.load(totals + source, mask=known, other=0.0)
            now = tl.maximum(top, tl.max(some_tops, axis=1))
            # Rows that are only there to make a power of two have no largest logit.
            base = tl.where(now == float("-inf"), 0.0, now)
            total = total * tl.exp2(top - base) + tl.sum(some_totals * tl.exp2(some_tops - base[:, None]), axis=1)
            top = now
        group_begin = begin + line % GROUPS * GROUP
        there = real & (tl.minimum(group_begin + GROUP, end) > tl.maximum(group_begin, first))
        groups = tl.sum(tl.where(there, 1.0, 0.0), axis=0)
        weight = tl.where(there, 1.0 / (total * groups), 0.0)
        top = tl.where(real, top, 0.0)
        best = tl.zeros((SOME_PAGES,), dtype=tl.float32)
        for at in range(0, visible, SOME_PAGES):
            page = at + tl.arange(0, SOME_PAGES)
            known = there[:, None] & (page < visible)[None, :]
            block = page * SPANS_OF_PAGE // BLOCK_OF_ESTIMATE
            some_tops = tl.load(tops + place[:, None] * blocks + block[None, :], mask=known, other=float("-inf"))
            some = tl.load(sums + place[:, None] * padded + page[None, :], mask=known, other=0.0).to(tl.float32)
            share = tl.sum(some * tl.exp2(some_tops - top[:, None]) * weight[:, None], axis=0)
            tl.store(row + page, share, mask=page < visible)
            best = tl.maximum(best, share)
        # What follows reads the shares in another order.
        tl.debug_barrier()
        if RULE == 0:
            least = value * tl.max(best, axis=0)
        else:
            # Positive numbers are in the order of their bits. `low` becomes the largest threshold that keeps enough or
            # too much; sixteen are tried at once, because each look at the shares waits for the memory.
            low = first * 0
            most = tl.where(relative != 0, tl.floor(value * visible.to(tl.float32)), value)
            trial = tl.arange(0, 16)
            for shift in tl.static_range(27, -5, -4):
                thresholds = low + (trial << max(shift, 0))
                number = tl.zeros((16, SEARCHED), dtype=tl.float32)
                for at in range(0, visible, SEARCHED):
                    page = at + tl.arange(0, SEARCHED)
                    boosted, share = _boosted(row, page, visible, begin, sink, window, UNIT)
                    above = boosted.to(tl.int32, bitcast=True)[None, :] >= thresholds[:, None]
                    number += tl.where(above, 1.0 if RULE == 2 else share[None, :], 0.0)
                enough = tl.sum(number, axis=1)
                little = (enough <= most) if RULE == 2 else ((enough < value) | (value >= 1.0))
                last = tl.sum(tl.where(little | (trial == 0), 0, 1), axis=0)
                # What is kept above the threshold; in the last round it is always among those that were tried.
                missing = most - tl.sum(tl.where(trial == last + 1, enough, 0.0), axis=0)
                low += last << max(shift, 0)
            threshold = low + 1 if RULE == 2 else low

    # In the order of `_folded_row`.
    if tile < before_tail:
        sequence = (tiles - before_tail) * heads + head // CHOOSERS * CHOOSERS * before_tail
        sequence += (before_tail - 1 - tile) * CHOOSERS + head % CHOOSERS
    else:
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
            bits = boosted.to(tl.int32, bitcast=True)
            keep = keep | (bits >= threshold)
            if RULE == 2:
                # Of equal pages at the border the first ones.
                equal = tl.where((bits == threshold - 1) & (page < visible), 1.0, 0.0)
                keep = keep | ((equal > 0.5) & (tl.cumsum(equal, axis=0) <= missing))
                missing -= tl.sum(equal, axis=0)
        keep = (keep & (page < visible)) | (page < everything)
        one = tl.where(keep, 1, 0)
        place = found + tl.cumsum(one, axis=0) - 1
        found += tl.sum(one, axis=0)
        part = tl.arange(0, PAGES)
        cache_page = page[:, None] * PAGES + part[None, :]
        listed = keep[:, None] & (cache_page * PAGE < stop)
        physical = tl.load(table + cache_page, mask=listed, other=0)
        tl.store(target + place[:, None] * PAGES + part[None, :], physical * folds + head // CHOOSERS, mask=listed)
    tl.store(lengths + sequence, (found - visible) * UNIT + stop)
    tl.atomic_add(kept, found.to(tl.int64))


@triton.jit(do_not_specialize=["first", "tail", "end"])
def _unfold(
    folded,
    out,
    first,
    tail,
    end,
    token_stride,
    head_stride,
    TILE: tl.constexpr,
    CHOOSERS: tl.constexpr,
    TOGETHER: tl.constexpr,
    SIZE: tl.constexpr,
):
    head = tl.program_id(1)
    choosing = tl.num_programs(1) // TOGETHER
    begin = (first // TILE + tl.program_id(0)) * TILE
    stop = tl.minimum(begin + TILE, end)
    position = begin + tl.arange(0, TILE)
    there = ((position >= first) & (position < end))[:, None]
    tile_first = tl.maximum(begin, first)
    source = _folded_row(position, head, tile_first, stop, first, tail, end, choosing, CHOOSERS, TOGETHER)
    size = tl.arange(0, SIZE)
    value = tl.load(folded + source[:, None] * SIZE + size[None, :], mask=there, other=0.0)
    target = (position - first).to(tl.int64) * token_stride + head * head_stride
    tl.store(out + target[:, None] + size[None, :], value, mask=there)
