"""Which pages of the cache a tile of queries reads. Plain torch, no vLLM, no state.

A tile is a run of `Selector.tile` queries at positions that are a multiple of it. For every tile and head, the share of
its attention that falls on each page is estimated from means: neighbouring queries are averaged in groups, the keys of
a page are averaged, and a softmax over the pages of their products is taken for the shares. Pages are kept by a rule on
these shares. Always kept are the first tokens, those right before the tile, and the tile's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["mass", "alpha", "budget"]


@dataclass(frozen=True, slots=True)
class Selector:
    """How pages are chosen.

    `rule` reads `value` as: `mass`, the share of the attention that the kept pages must have together; `alpha`, the
    least share of a page relative to the largest one; `budget`, the most tokens kept. `tile` is the number of queries
    that read the same pages, `group` the number averaged to one for the scores, in tokens. `sink` and `window` are the
    first tokens and those right before the tile, which are always kept. `heads` tells who shares a choice: every query
    head has its own, or all query heads of a KV head have one.
    """

    rule: Rule = "mass"
    value: float = 0.9
    tile: int = 64
    group: int = 16
    sink: int = 32
    window: int = 64
    heads: Literal["query", "kv"] = "query"


def group_means(query: Tensor, first: int, selector: Selector) -> Tensor:
    """Means of neighbouring queries.

    Args:
        query: [tokens, query heads, head size], consecutive positions.
        first: position of the first of them.

    Returns:
        [query heads, tiles, groups, head size] in float32. Tiles and groups lie at multiples of their size; a group
        that is only partly there is the mean of what is there, and one that is not there at all is zero.
    """
    tokens, heads, size = query.shape
    front = first % selector.tile
    tiles = -(-(front + tokens) // selector.tile)
    back = tiles * selector.tile - front - tokens
    padded = torch.nn.functional.pad(query, (0, 0, 0, 0, front, back)) if front or back else query
    means = padded.view(-1, selector.group, heads, size).sum(1, dtype=torch.float32)
    present = torch.full((tiles * selector.tile // selector.group, 1, 1), selector.group, dtype=torch.float32)
    if front or back:
        starts = torch.arange(len(present)) * selector.group
        there = (starts + selector.group).clamp(max=front + tokens) - starts.clamp(min=front)
        present = there.clamp(min=1).to(torch.float32).view(-1, 1, 1)
    means /= present.to(means.device)
    return means.view(tiles, -1, heads, size).permute(2, 0, 1, 3)


def page_shares(groups: Tensor, means: Tensor, first: int, page: int, scale: float, selector: Selector) -> Tensor:
    """Estimated share of each tile's attention that falls on each page.

    Args:
        groups: [query heads, tiles, groups, head size], from `group_means`.
        means: [KV heads, pages, head size] in float32: means of the keys of each page, from position 0.
        first: position of the first query.
        page: tokens of a page.
        scale: factor of the attention's logits.

    Returns:
        [heads, tiles, pages], rows sum to 1, pages after the tile have 0; heads as `selector.heads` says.
    """
    heads, tiles, rows, size = groups.shape
    kv_heads, pages, _ = means.shape
    logits = torch.bmm(groups.reshape(kv_heads, -1, size), means.mT).view(heads, tiles, rows, pages)
    start = first // selector.tile * selector.tile
    last = start + torch.arange(tiles * rows, device=groups.device).view(tiles, rows) * selector.group + selector.group - 1
    hidden = torch.arange(pages, device=groups.device) * page > last[..., None]
    logits.mul_(scale).masked_fill_(hidden, float("-inf"))
    shares = torch.softmax(logits, -1).mean(2)
    return shares if selector.heads == "query" else shares.view(kv_heads, -1, tiles, pages).mean(1)


def always_kept(tiles: int, pages: int, first: int, page: int, selector: Selector) -> tuple[Tensor, Tensor]:
    """Masks [tiles, pages]: the pages that every tile must read, and all that it may read."""
    start = (first // selector.tile + torch.arange(tiles)).view(-1, 1) * selector.tile
    begin = torch.arange(pages) * page
    visible = begin < start + selector.tile
    kept = (begin < selector.sink) | (begin + page > start - selector.window)
    return kept & visible, visible


def keep(shares: Tensor, kept: Tensor, visible: Tensor, page: int, selector: Selector) -> Tensor:
    """The pages that each tile reads.

    Args:
        shares: [heads, tiles, pages], from `page_shares`.
        kept: [tiles, pages], those that are read in any case.
        visible: [tiles, pages], all that may be read.

    Returns:
        [heads, tiles, pages], bool.
    """
    if selector.rule == "alpha":
        chosen = shares >= selector.value * shares.amax(-1, keepdim=True)
    elif selector.rule == "mass":
        # What is kept anyway counts first, so only what it lacks has to be found among the others.
        order = (shares + 2.0 * kept).sort(-1, descending=True).indices
        ordered = shares.gather(-1, order)
        enough = ordered.cumsum(-1) - ordered >= selector.value
        chosen = torch.empty_like(enough).scatter_(-1, order, ~enough)
    else:
        most = min(shares.shape[-1], max(1, int(selector.value) // page))
        order = (shares + 2.0 * kept).topk(most, -1).indices
        chosen = torch.zeros_like(shares, dtype=torch.bool).scatter_(-1, order, True)
    return (chosen | kept) & visible
