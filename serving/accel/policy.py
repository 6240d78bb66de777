"""Which pages of the cache a tile of queries reads. Plain torch: no engine, no state, any device.

A tile is a run of queries at positions that are a multiple of its size. For every tile and head, the share of its
attention that falls on each page is estimated from means: neighbouring queries are averaged in groups, neighbouring
keys in spans, and a softmax over the products is summed over each page. Pages are kept by a rule on these shares.
Always kept are the first tokens, those right before the tile, and the tile's own; a dense tile keeps everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

Rule = Literal["mass", "alpha", "budget"]
Heads = Literal["query", "kv"]

# Without a word from the request, so many last tokens of a prompt attend to everything: they hold the question.
DENSE_TAIL = 256

# Requests set sizes; these keep estimates small and numbers within what torch compares with.
_SMALLEST = 4
_LARGEST_TILE = 4096
_LARGEST = 2**31 - 1


class BadSelector(ValueError):
    """Settings of a selector that cannot be used; the message says which."""


@dataclass(frozen=True, slots=True)
class Selector:
    """How pages are chosen. Sizes in tokens.

    `rule` reads `value` as: `mass`, the share of the attention that the kept pages have together; `alpha`, the least
    share of a page relative to the tile's largest; `budget`, the most tokens kept, or below 1 the most of those that
    the tile sees. `tile` queries read the same pages; `group` queries and `span` keys are averaged for the estimate.
    `sink` first tokens and `window` tokens before the tile are always kept. Tiles that begin before `start` are dense.
    `heads`: each query head chooses for itself, or all query heads of a KV head together. `late` stands for `value` in
    the last third of the layers: what is left out there reaches few layers, and in the last one nothing but the logits
    of the last token.
    """

    rule: Rule = "alpha"
    value: float = 0.02
    tile: int = 64
    group: int = 16
    span: int = 16
    sink: int = 32
    window: int = 64
    start: int = 1024
    late: float = 0.5
    heads: Heads = "query"

    @classmethod
    def parse(cls, text: str, default: Selector | None = None) -> Selector:
        """A selector from `rule:value` and settings after commas, such as `alpha:0.02,tile=128,heads=kv`.

        What is not given is the default's; devices have different ones.

        Raises:
            BadSelector: a setting does not exist or has an unusable value.
        """
        first, *rest = text.split(",")
        rule, _, value = first.partition(":")
        if rule not in get_args(Rule):
            raise BadSelector(f"the selector {text!r} begins with {rule!r}; use one of {', '.join(get_args(Rule))}")
        given: dict[str, str] = {"value": value} if value else {}
        for setting in rest:
            name, _, one = setting.partition("=")
            given[name] = one
        default = default or cls()
        # The defaults of `value` and `late` fit the default rule only.
        if rule != default.rule:
            given = {"value": "", "late": given.get("value", ""), **given}
        known = {field.name: field.type for field in fields(cls) if field.name != "rule"}
        values: dict[str, object] = {"rule": rule}
        for name, one in given.items():
            if name not in known:
                raise BadSelector(f"the selector {text!r} has no setting {name!r}; it has {', '.join(known)}")
            try:
                values[name] = one if name == "heads" else float(one) if name in ("value", "late") else int(one)
            except ValueError as error:
                raise BadSelector(f"the selector {text!r} has {name}={one!r}; give a number") from error
        selector = replace(default, **values)  # type: ignore[arg-type]
        if fault := selector._fault():
            raise BadSelector(f"the selector {text!r} cannot be used: {fault}")
        return selector

    def __str__(self) -> str:
        """All settings, as `parse` reads them."""
        rest = ("tile", "group", "span", "sink", "window", "start", "heads")
        settings = ",".join(f"{name}={getattr(self, name)}" for name in rest)
        value, late = (repr(one).removesuffix(".0") for one in (self.value, self.late))
        return f"{self.rule}:{value},late={late},{settings}"

    def at(self, layer: int, layers: int) -> float:
        """The rule's value in this layer, counted from 0."""
        return self.late if 3 * layer >= 2 * layers else self.value

    def _fault(self) -> str | None:
        if self.heads not in get_args(Heads):
            return f"heads={self.heads!r}; use {' or '.join(get_args(Heads))}"
        values = (self.value, self.late)
        if self.rule == "budget" and not all(0 < value < math.inf for value in values):
            return "a budget is positive, and so is late"
        if self.rule != "budget" and not all(0 <= value <= 1 for value in values):
            return f"{self.rule} is a share from 0 to 1, and so is late"
        if min(self.group, self.span) < _SMALLEST:
            return f"group and span are at least {_SMALLEST} tokens"
        # A span beyond its tile would be seen in full or in part, as the prompt happens to be cut into steps.
        if self.tile < 1 or self.tile % self.group or self.tile % self.span:
            return "a tile is a whole number of groups and of spans"
        if min(self.sink, self.window, self.start) < 0:
            return "sink, window and start are not negative"
        if self.tile > _LARGEST_TILE or max(self.span, self.sink, self.window, self.start) > _LARGEST:
            return f"a tile is at most {_LARGEST_TILE} tokens, everything else {_LARGEST}"
        return None


@dataclass(frozen=True)
class Tiling:
    """Consecutive queries of one request, cut into tiles: what is the same for every layer.

    `tokens` queries from position `first`; tiles that hold a query at `dense_from` or later are dense. Pages are chosen
    as a whole; `page`, their size in tokens, is a multiple of the selector's span.
    """

    first: int
    tokens: int
    dense_from: int
    page: int
    selector: Selector

    def on(self, device: torch.device) -> Tiling:
        """The same, with what the policy needs in every layer computed once and for this device."""
        there = replace(self)
        for name in ("hidden", "visible", "always"):
            vars(there)[name] = getattr(self, name).to(device)
        return there

    @property
    def end(self) -> int:
        """The position after the last query."""
        return self.first + self.tokens

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return math.ceil(self.end / self.selector.tile) - self.first // self.selector.tile

    @property
    def tail(self) -> int:
        """The position from which on all tiles are dense because of `dense_from`, or `end`."""
        if self.end <= self.dense_from:
            return self.end
        return max(self.first, self.dense_from // self.selector.tile * self.selector.tile)

    @property
    def before_tail(self) -> int:
        """How many tiles there are before `tail`."""
        tile = self.selector.tile
        return self.count if self.tail == self.end else self.tail // tile - self.first // tile

    @property
    def pages(self) -> int:
        """How many pages the last query sees."""
        return math.ceil(self.end / self.page)

    @property
    def spans(self) -> int:
        """How many spans of keys these pages have."""
        return self.pages * self.page // self.selector.span

    @cached_property
    def sparse(self) -> bool:
        """Whether any tile has a choice."""
        tile = self.selector.tile
        begin = max(self.first // tile, math.ceil(self.selector.start / tile)) * tile
        return begin < self.end and min(begin + tile, self.end) <= self.dense_from

    @cached_property
    def total(self) -> int:
        """The number of pages that a head would read if all tiles were dense."""
        return int(self.visible_pages.sum())

    @cached_property
    def starts(self) -> Tensor:
        """[tiles], the position at which each begins, also when its first queries are not there."""
        tile = self.selector.tile
        return torch.arange(self.first // tile * tile, self.end, tile)

    @cached_property
    def ends(self) -> Tensor:
        """[tiles], the position after the last query of each that is there."""
        return (self.starts + self.selector.tile).clamp(max=self.end)

    @cached_property
    def lengths(self) -> Tensor:
        """[tiles], how many queries of each are there."""
        return self.ends - self.starts.clamp(min=self.first)

    @cached_property
    def visible_pages(self) -> Tensor:
        """[tiles], how many pages the queries of each see."""
        return (self.ends + self.page - 1) // self.page

    @cached_property
    def weights(self) -> Tensor | None:
        """[tiles, groups], the part of each in its tile's estimate, zero if it is not there; None: all are equal."""
        last = self._group_ends
        there = (last > self.first) & (last - self.selector.group < self.end)
        return None if bool(there.all()) else there / there.sum(1, keepdim=True)

    @cached_property
    def hidden(self) -> Tensor:
        """[tiles, groups, spans], the spans of keys that no query of a group sees."""
        spans = torch.arange(self.spans) * self.selector.span
        # A group may reach beyond the last query, and then sees keys that do not exist yet.
        return spans >= self._group_ends.clamp(max=self.end)[..., None]

    @cached_property
    def visible(self) -> Tensor:
        """[tiles, pages], what each may read."""
        return self._pages < self.ends[:, None]

    @cached_property
    def always(self) -> Tensor:
        """[tiles, pages], what each reads in any case."""
        begins, selector = self._pages, self.selector
        dense = (self.starts < selector.start) | (self.ends > self.dense_from)
        near = begins + self.page > self.starts[:, None] - selector.window
        return ((begins < selector.sink) | near | dense[:, None]) & self.visible

    @property
    def _pages(self) -> Tensor:
        """[pages], the position of the first token of each."""
        return torch.arange(self.pages) * self.page

    @property
    def _group_ends(self) -> Tensor:
        """[tiles, groups], the position after the last query of each, there or not."""
        tile, group = self.selector.tile, self.selector.group
        return self.starts[:, None] + torch.arange(group, tile + 1, group)


def group_means(query: Tensor, tiles: Tiling) -> Tensor:
    """Means of neighbouring queries, [query heads, tiles, groups, head size] in float32.

    A group that is only partly there is the mean of what is there; one that is not there at all is zero.

    Args:
        query: [tokens, query heads, head size].
    """
    tile, group = tiles.selector.tile, tiles.selector.group
    tokens, heads, size = query.shape
    front = tiles.first % tile
    back = len(tiles.ends) * tile - front - tokens
    if front or back:
        query = torch.nn.functional.pad(query, (0, 0, 0, 0, front, back))
    means = query.reshape(-1, group, heads, size).sum(1, dtype=torch.float32)
    if front or back:
        edges = torch.arange(0, len(means) * group + 1, group).clamp(front, front + tokens)
        means /= edges.diff().clamp(min=1).to(means.device)[:, None, None]
    else:
        means /= group
    return means.view(-1, tile // group, heads, size).permute(2, 0, 1, 3)


def page_shares(groups: Tensor, means: Tensor, scale: float, tiles: Tiling) -> Tensor:
    """The estimated share of each tile's attention on each page.

    Args:
        groups: [query heads, tiles, groups, head size], from `group_means`.
        means: [KV heads, head size, spans] in float32, the means of the keys from position 0.
        scale: factor of the attention's logits.

    Returns:
        [heads, tiles, pages], rows sum to 1; heads as the selector says.
    """
    heads, count, rows, size = groups.shape
    kv_heads, _, spans = means.shape
    logits = torch.bmm(groups.reshape(kv_heads, -1, size), means).view(heads, count, rows, spans)
    logits.mul_(scale).masked_fill_(tiles.hidden.to(logits.device), float("-inf"))
    shares = torch.softmax(logits, -1)
    if tiles.weights is None:
        shares = shares.mean(2)
    else:
        shares = torch.einsum("htgs,tg->hts", shares, tiles.weights.to(shares.device))
    if tiles.selector.heads == "kv":
        shares = shares.view(kv_heads, -1, count, spans).mean(1)
    return shares.view(len(shares), count, -1, tiles.page // tiles.selector.span).sum(-1)


def keep(shares: Tensor, value: float, tiles: Tiling) -> Tensor:
    """The pages that each tile reads, bool [heads, tiles, pages].

    Args:
        shares: [heads, tiles, pages], from `page_shares`.
        value: of the selector's rule, in this layer.
    """
    rule = tiles.selector.rule
    always, visible = tiles.always.to(shares.device), tiles.visible.to(shares.device)
    if rule == "alpha":
        chosen = shares >= value * shares.amax(-1, keepdim=True)
    elif rule == "mass":
        # What is kept anyway counts first, so only what it lacks has to be found among the others.
        order = (shares + 2.0 * always).argsort(-1, descending=True)
        ordered = shares.gather(-1, order)
        # Rounded sums may reach 1 before the last page.
        enough = ordered.cumsum(-1) - ordered >= (value if value < 1 else math.inf)
        chosen = torch.empty_like(enough).scatter_(-1, order, ~enough)
    else:
        seen = tiles.visible_pages.to(shares.device, torch.float32)
        most = (seen * value).floor() if value < 1 else torch.full_like(seen, value // tiles.page)
        order = (shares + 2.0 * always).argsort(-1, descending=True)
        fits = torch.arange(shares.shape[-1], device=shares.device) < most[:, None]
        chosen = torch.empty_like(always.expand_as(shares)).scatter_(-1, order, fits.expand_as(shares))
    return chosen.logical_and_(visible).logical_or_(always)
