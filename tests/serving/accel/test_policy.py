"""The selection against loops written out, and the same for every way to cut a prompt into chunks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving.accel.policy import (
    BadSelector,
    Heads,
    Rule,
    Selector,
    Tiling,
    group_means,
    keep,
    page_shares,
)

steady = settings(deadline=None, derandomize=True, database=None, max_examples=100)
few = settings(steady, max_examples=20)

PAGE = 32
SMALL = Selector(tile=16, group=8, span=8, sink=8, window=16, start=32, late=0.02)


_sizes = st.integers(0, 2**31 - 1)
_values = {"alpha": st.floats(0, 1), "mass": st.floats(0, 1), "budget": st.floats(1e-3, 1e9)}


@st.composite
def _selectors(draw: st.DrawFn) -> Selector:
    rule: Rule = draw(st.sampled_from(get_args(Rule)))
    group, span = draw(st.integers(4, 32)), draw(st.integers(4, 32))
    return Selector(
        rule=rule,
        value=draw(_values[rule]),
        late=draw(_values[rule]),
        tile=math.lcm(group, span) * draw(st.integers(1, 4)),
        group=group,
        span=span,
        sink=draw(_sizes),
        window=draw(_sizes),
        start=draw(_sizes),
        heads=draw(st.sampled_from(get_args(Heads))),
    )


@steady
@given(_selectors())
def test_a_selector_reads_back_what_it_writes(selector: Selector) -> None:
    assert Selector.parse(str(selector)) == selector


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        pytest.param("alpha:0.02", Selector(), id="the default"),
        pytest.param("alpha", Selector(), id="the default rule has a default value"),
        pytest.param("alpha:0.5,tile=128", Selector(value=0.5, tile=128), id="a setting"),
        pytest.param("alpha:0.5,heads=kv,late=0", Selector(value=0.5, heads="kv", late=0), id="two settings"),
        pytest.param("mass:0.9", Selector("mass", 0.9, late=0.9), id="late follows another rule's value"),
        pytest.param("mass,value=0.9", Selector("mass", 0.9, late=0.9), id="the value by its name"),
        pytest.param("mass:0.9,late=0.5", Selector("mass", 0.9, late=0.5), id="late on its own"),
        pytest.param("budget:4096", Selector("budget", 4096, late=4096), id="a budget"),
    ],
)
def test_settings(text: str, selector: Selector) -> None:
    assert Selector.parse(text) == selector


def test_settings_are_written_as_people_write_them() -> None:
    assert str(Selector.parse("budget:4096,late=2048")) == (
        "budget:4096,late=2048,tile=64,group=16,span=16,sink=32,window=64,start=1024,heads=query"
    )


POSITIVE = "a budget is positive, and so is late"
SMALL_PARTS = "group and span are at least 4 tokens"
SIZES = "a tile is a whole number of groups and of spans"
NEGATIVE = "sink, window and start are not negative"
LARGE = "a tile is at most 4096 tokens, everything else 2147483647"
KNOWN = "it has value, tile, group, span, sink, window, start, late, heads"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with ''; use one of mass, alpha, budget"),
        ("best:1", "begins with 'best'; use one of mass, alpha, budget"),
        ("tile=64", "begins with 'tile=64'; use one of mass, alpha, budget"),
        ("alpha:0.02,size=64", f"has no setting 'size'; {KNOWN}"),
        ("alpha:0.02,rule=mass", f"has no setting 'rule'; {KNOWN}"),
        ("alpha:0.02,", f"has no setting ''; {KNOWN}"),
        ("alpha:much", "has value='much'; give a number"),
        ("alpha:0.02,tile=6.4", "has tile='6.4'; give a number"),
        ("alpha:0.02,tile", "has tile=''; give a number"),
        ("mass", "has value=''; give a number"),
        ("budget,late=64", "has value=''; give a number"),
        ("alpha:0.02,heads=all", "cannot be used: heads='all'; use query or kv"),
        ("alpha:1.1", "cannot be used: alpha is a share from 0 to 1, and so is late"),
        ("alpha:nan", "cannot be used: alpha is a share from 0 to 1, and so is late"),
        ("alpha:0.02,late=-1", "cannot be used: alpha is a share from 0 to 1, and so is late"),
        ("mass:2", "cannot be used: mass is a share from 0 to 1, and so is late"),
        ("budget:0", f"cannot be used: {POSITIVE}"),
        ("budget:64,late=0", f"cannot be used: {POSITIVE}"),
        ("budget:64,late=nan", f"cannot be used: {POSITIVE}"),
        ("budget:inf", f"cannot be used: {POSITIVE}"),
        ("alpha:0.02,tile=0", f"cannot be used: {SIZES}"),
        ("alpha:0.02,tile=-64", f"cannot be used: {SIZES}"),
        ("alpha:0.02,group=0", f"cannot be used: {SMALL_PARTS}"),
        ("alpha:0.02,group=3", f"cannot be used: {SMALL_PARTS}"),
        ("alpha:0.02,span=-1", f"cannot be used: {SMALL_PARTS}"),
        ("alpha:0.02,tile=40", f"cannot be used: {SIZES}"),
        ("alpha:0.02,span=128", f"cannot be used: {SIZES}"),
        ("alpha:0.02,span=24", f"cannot be used: {SIZES}"),
        ("alpha:0.02,sink=-1", f"cannot be used: {NEGATIVE}"),
        ("alpha:0.02,window=-1", f"cannot be used: {NEGATIVE}"),
        ("alpha:0.02,start=-1", f"cannot be used: {NEGATIVE}"),
        ("alpha:0.02,tile=8192", f"cannot be used: {LARGE}"),
        ("alpha:0.02,sink=2147483648", f"cannot be used: {LARGE}"),
        ("alpha:0.02,window=1" + "0" * 30, f"cannot be used: {LARGE}"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadSelector) as refusal:
        Selector.parse(text)
    assert str(refusal.value) == f"the selector {text!r} {message}"


@pytest.mark.parametrize(("layers", "first_late"), [(1, 1), (3, 2), (4, 3), (30, 20), (32, 22)])
def test_the_last_third_of_the_layers_is_late(layers: int, first_late: int) -> None:
    late = [Selector(value=0.25, late=0.75).at(layer, layers) == 0.75 for layer in range(layers)]
    assert late == [layer >= first_late for layer in range(layers)]


@st.composite
def _tilings(draw: st.DrawFn) -> Tiling:
    group = draw(st.sampled_from([1, 4, 8]))
    selector = Selector(
        tile=group * draw(st.integers(1, 4)),
        group=group,
        span=draw(st.sampled_from([4, 8, 16, 32])),
        sink=draw(st.integers(0, 80)),
        window=draw(st.integers(0, 80)),
        start=8 * draw(st.integers(0, 15)),
    )
    first, tokens = draw(st.integers(0, 150)), draw(st.integers(1, 150))
    return Tiling(first, tokens, draw(st.integers(0, 350)), PAGE, selector)


@steady
@given(st.data(), _tilings())
def test_tiles(data: st.DataObject, drawn: Tiling) -> None:
    selector, first, end = drawn.selector, drawn.first, drawn.first + drawn.tokens
    dense_from = data.draw(st.integers(0, end + 10))
    tiles = Tiling(first, drawn.tokens, dense_from, PAGE, selector)
    pages = range(-(-end // PAGE))
    sparse, total = False, 0
    for number, tile in enumerate(range(first // selector.tile, -(-end // selector.tile))):
        start = tile * selector.tile
        queries = [position for position in range(start, start + selector.tile) if first <= position < end]
        dense = start < selector.start or any(query >= dense_from for query in queries)
        visible = [page * PAGE <= queries[-1] for page in pages]
        needed = {*range(selector.sink), *range(max(0, start - selector.window), queries[-1] + 1)}
        always = [
            seen and (dense or not needed.isdisjoint(range(page * PAGE, page * PAGE + PAGE)))
            for page, seen in zip(pages, visible, strict=True)
        ]
        assert (int(tiles.lengths[number]), int(tiles.ends[number])) == (len(queries), queries[-1] + 1)
        assert tiles.visible[number].tolist() == visible
        assert tiles.always[number].tolist() == always
        for group in range(selector.tile // selector.group):
            last = min(start + (group + 1) * selector.group, end) - 1
            spans = [span * selector.span > last for span in range(len(pages) * PAGE // selector.span)]
            assert tiles.hidden[number, group].tolist() == spans
        there = {(query - start) // selector.group for query in queries}
        weights = [(group in there) / len(there) for group in range(selector.tile // selector.group)]
        if tiles.weights is None:
            assert all(weights)
        else:
            assert tiles.weights[number].tolist() == pytest.approx(weights)
        sparse, total = sparse or not dense, total + sum(visible)
    assert (len(tiles.ends), tiles.sparse, tiles.total) == (number + 1, sparse, total)


@pytest.mark.parametrize(
    ("start", "dense_from", "sparse"),
    [
        pytest.param(96, 144, [96, 112, 128], id="borders of tiles"),
        pytest.param(97, 143, [112], id="one token further in"),
        pytest.param(95, 145, [96, 112, 128], id="one token further out"),
        pytest.param(0, 1000, [64, 80, 96, 112, 128, 144, 160, 176], id="nothing is dense"),
        pytest.param(176, 176, [], id="before and behind the same border"),
        pytest.param(1000, 1000, [], id="a short prompt"),
    ],
)
def test_dense_tiles(start: int, dense_from: int, sparse: list[int]) -> None:
    tiles = Tiling(64, 128, dense_from, PAGE, replace(SMALL, sink=0, window=0, start=start))
    chosen = (tiles.always != tiles.visible).any(-1)
    assert [64 + 16 * number for number in chosen.nonzero()[:, 0].tolist()] == sparse
    assert tiles.sparse == bool(sparse)


def _tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _shares(seed: int, tiles: Tiling, heads: int = 4, kv_heads: int = 2, size: int = 8) -> Tensor:
    """Of a prompt that is the same for every chunk of it."""
    query = _tensor(seed, 1024, heads, size)[tiles.first : tiles.first + tiles.tokens]
    spans = tiles.hidden.shape[-1]
    means = _tensor(seed + 1, kv_heads, size, 1024)[..., :spans].contiguous()
    return page_shares(group_means(query, tiles), means, 1.5, tiles)


@few
@given(_tilings(), st.integers(1, 3))
def test_group_means(tiles: Tiling, heads: int) -> None:
    query = _tensor(1, tiles.tokens, heads, 4)
    means = group_means(query, tiles)
    group = tiles.selector.group
    assert means.shape == (heads, len(tiles.ends), tiles.selector.tile // group, 4)
    first_group = tiles.first // tiles.selector.tile * tiles.selector.tile // group
    for number, mean in enumerate(means.flatten(1, 2).unbind(1)):
        begin = (first_group + number) * group - tiles.first
        there = query[max(0, begin) : max(0, begin + group)]
        expected = there.mean(0) if len(there) else torch.zeros(heads, 4)
        torch.testing.assert_close(mean, expected)


def test_group_means_of_half_precision_are_summed_in_float32() -> None:
    tiles = Tiling(0, 16, 0, PAGE, replace(SMALL, tile=16, group=16))
    query = torch.ones(16, 1, 1, dtype=torch.bfloat16)
    query[0] = 256
    assert group_means(query, tiles).tolist() == [[[[271 / 16]]]]


@pytest.mark.parametrize("heads", get_args(Heads))
@few
@given(tiles=_tilings())
def test_page_shares(heads: Heads, tiles: Tiling) -> None:
    tiles = replace(tiles, selector=replace(tiles.selector, heads=heads))
    groups = _tensor(2, 4, len(tiles.ends), tiles.hidden.shape[1], 8)
    means = _tensor(3, 2, 8, tiles.hidden.shape[-1])
    shares = page_shares(groups, means, 0.5, tiles)
    logits = torch.einsum("htgd,hds->htgs", groups.double(), means.double().repeat_interleave(2, 0)) * 0.5
    weights = torch.where(tiles.hidden, 0.0, logits.exp())
    weights /= weights.sum(-1, keepdim=True)
    group = tiles.selector.group
    begins = torch.arange(tiles.first // tiles.selector.tile * tiles.selector.tile, tiles.first + tiles.tokens, group)
    there = (begins + group > tiles.first).split(tiles.selector.tile // group)
    # Of a tile that a step cuts, only the groups that are there count.
    weights = torch.stack([weights[:, n, : len(ok)][:, ok].mean(1) for n, ok in enumerate(there)], 1)
    expected = torch.stack([page.sum(-1) for page in weights.split(PAGE // tiles.selector.span, -1)], -1)
    if heads == "kv":
        expected = torch.stack([pair.mean(0) for pair in expected.split(2)])
    torch.testing.assert_close(shares, expected.float())
    torch.testing.assert_close(shares.sum(-1), torch.ones(shares.shape[:2]))
    assert not shares[:, ~tiles.visible].any()


def test_a_page_that_is_asked_for_has_the_largest_share() -> None:
    tiles = Tiling(480, 16, 1000, PAGE, SMALL)
    means = torch.zeros(1, 4, tiles.hidden.shape[-1])
    means[0, 0, 5 * PAGE // SMALL.span] = 10
    query = torch.tensor([1.0, 0, 0, 0]).expand(16, 1, 4)
    assert page_shares(group_means(query, tiles), means, 1.0, tiles).argmax(-1).tolist() == [[5]]


@st.composite
def _choices(draw: st.DrawFn) -> tuple[Tensor, Tiling]:
    """Shares without ties, and their tiles."""
    tiles = draw(_tilings())
    shares = _tensor(draw(st.integers(0, 1000)), 2, *tiles.visible.shape).mul(3).exp() * tiles.visible
    return shares / shares.sum(-1, keepdim=True), tiles


def _rows(shares: Tensor, tiles: Tiling) -> list[tuple[list[float], list[bool], list[bool]]]:
    """(shares, always, visible) of each head and tile."""
    always, visible = tiles.always.tolist() * len(shares), tiles.visible.tolist() * len(shares)
    return list(zip(shares.flatten(0, 1).tolist(), always, visible, strict=True))


def _ordered(shares: list[float], always: list[bool]) -> list[int]:
    return sorted(range(len(shares)), key=lambda page: (not always[page], -shares[page]))


def _by_alpha(shares: list[float], always: list[bool], visible: list[bool], value: float) -> set[int]:
    return {page for page, share in enumerate(shares) if visible[page] and share >= value * max(shares)}


def _by_mass(shares: list[float], always: list[bool], visible: list[bool], value: float) -> set[int]:
    kept: set[int] = set()
    for page in _ordered(shares, always):
        if math.fsum(shares[one] for one in kept) >= value:
            break
        kept.add(page)
    return kept


def _by_budget(shares: list[float], always: list[bool], visible: list[bool], value: float) -> set[int]:
    most = value / PAGE if value >= 1 else float(torch.tensor(float(sum(visible))) * value)
    return set(_ordered(shares, always)[: int(most)])


@pytest.mark.parametrize(
    ("rule", "values", "oracle"),
    [
        ("alpha", st.floats(0.001, 0.999), _by_alpha),
        ("mass", st.floats(0.001, 0.999), _by_mass),
        ("budget", st.integers(1, 500).map(float), _by_budget),
        ("budget", st.floats(0.01, 0.99), _by_budget),
    ],
)
@steady
@given(data=st.data(), choice=_choices())
def test_rules(rule: Rule, values: Any, oracle: Any, data: st.DataObject, choice: tuple[Tensor, Tiling]) -> None:
    shares, tiles = choice
    tiles = replace(tiles, selector=replace(tiles.selector, rule=rule))
    value = data.draw(values)
    kept = keep(shares, value, tiles).flatten(0, 1).tolist()
    for row, (share, always, visible) in zip(kept, _rows(shares, tiles), strict=True):
        chosen = oracle(share, always, visible, value)
        assert row == [always[page] or (visible[page] and page in chosen) for page in range(len(row))]


@pytest.mark.parametrize(("rule", "value"), [("alpha", 0.0), ("mass", 1.0), ("budget", 1e6), ("budget", 1e18)])
@steady
@given(choice=_choices())
def test_everything_visible_is_kept(rule: Rule, value: float, choice: tuple[Tensor, Tiling]) -> None:
    shares, tiles = choice
    tiles = replace(tiles, selector=replace(tiles.selector, rule=rule))
    assert torch.equal(keep(shares, value, tiles), tiles.visible.expand(2, -1, -1))


def test_a_mass_of_one_keeps_what_rounding_hides() -> None:
    tiles = Tiling(16 * PAGE - 16, 16, 10**6, PAGE, replace(SMALL, rule="mass"))
    shares = torch.full((1, 1, 16), 1e-9)
    shares[..., 0] = 1
    assert keep(shares, 1.0, tiles).all()


@pytest.mark.parametrize(("rule", "value"), [("alpha", 1.0), ("mass", 0.0), ("budget", 1.0)])
@steady
@given(choice=_choices())
def test_the_least_is_what_is_always_kept_and_one_page(rule: Rule, value: float, choice: tuple[Tensor, Tiling]) -> None:
    shares, tiles = choice
    tiles = replace(tiles, selector=replace(tiles.selector, rule=rule))
    kept = keep(shares, value, tiles)
    assert not (tiles.always & ~kept).any()
    assert not (kept & ~tiles.visible).any()
    assert (kept.sum(-1) - tiles.always.sum(-1)).max() <= 1


TOKENS, DENSE = 700, 650
CHUNKED = replace(SMALL, value=0.3)


def _kept(first: int, tokens: int) -> dict[int, Tensor]:
    """By the beginning of the tile: [heads, pages] of the whole prompt."""
    tiles = Tiling(first, tokens, DENSE, PAGE, CHUNKED)
    kept = keep(_shares(7, tiles), CHUNKED.value, tiles)
    padded = torch.nn.functional.pad(kept, (0, -(-TOKENS // PAGE) - kept.shape[-1]))
    begin = first // CHUNKED.tile * CHUNKED.tile
    return {begin + number * CHUNKED.tile: tile for number, tile in enumerate(padded.unbind(1))}


@cache
def _whole() -> dict[int, Tensor]:
    return _kept(0, TOKENS)


def _chunks(borders: list[int]) -> list[tuple[int, int]]:
    return [(begin, end - begin) for begin, end in zip([0, *borders], [*borders, TOKENS], strict=True)]


@few
@given(st.sets(st.integers(1, (TOKENS - 1) // CHUNKED.tile)))
def test_chunks_of_whole_tiles_choose_as_the_whole_prompt_does(borders: set[int]) -> None:
    assert sum(int(tile.sum()) for tile in _whole().values()) < 0.9 * 4 * Tiling(0, TOKENS, DENSE, PAGE, CHUNKED).total
    for first, tokens in _chunks(sorted(border * CHUNKED.tile for border in borders)):
        for begin, kept in _kept(first, tokens).items():
            assert torch.equal(kept, _whole()[begin]), (first, tokens, begin)


@pytest.mark.parametrize("budget", [256, 512, 1000, 8192])
def test_budgets_of_the_engine_choose_as_the_whole_prompt_does(budget: int) -> None:
    # A tile of 16 is cut by chunks of 1000; what is cut here is checked below.
    for first, tokens in _chunks(list(range(budget, TOKENS, budget))):
        for begin, kept in _kept(first, tokens).items():
            assert torch.equal(kept, _whole()[begin]), (first, tokens, begin)


@few
@given(st.sets(st.integers(1, TOKENS - 1), max_size=6))
def test_a_tile_cut_by_a_chunk_still_keeps_what_it_must(borders: set[int]) -> None:
    for first, tokens in _chunks(sorted(borders)):
        tiles = Tiling(first, tokens, DENSE, PAGE, CHUNKED)
        kept = keep(_shares(7, tiles), CHUNKED.value, tiles)
        assert not (tiles.always & ~kept).any()
        assert not (kept & ~tiles.visible).any()
        for begin, tile in _kept(first, tokens).items():
            if begin >= first and begin + CHUNKED.tile <= first + tokens:
                assert torch.equal(tile, _whole()[begin]), (first, tokens, begin)
