"""Virtual sequences hold exactly the kept pages, for every choice."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving.accel.page_tables import VirtualSequences, joined, virtual_sequences
from serving.accel.policy import Selector, Tiling

steady = settings(deadline=None, derandomize=True, database=None, max_examples=100)

PAGE = 32


@dataclass(frozen=True)
class Choice:
    """Of one request: some of the visible pages, always with the last of them."""

    kept: Tensor
    pages: Tensor
    kv_heads: int
    tiles: Tiling

    @property
    def sequences(self) -> VirtualSequences:
        return virtual_sequences(self.kept, self.pages, self.kv_heads, self.tiles)


@st.composite
def _choices(draw: st.DrawFn) -> Choice:
    selector = Selector(tile=draw(st.sampled_from([8, 16, 48])), group=8, span=8)
    tiles = Tiling(draw(st.integers(0, 150)), draw(st.integers(1, 120)), 0, PAGE, selector)
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    kept = torch.rand(heads, *tiles.visible.shape, generator=seed) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    kept &= tiles.visible
    kept[:, torch.arange(len(tiles.ends)), (tiles.ends - 1) // PAGE] = True
    return Choice(kept, torch.randperm(50, generator=seed)[: tiles.visible.shape[1]], kv_heads, tiles)


@steady
@given(_choices())
def test_a_sequence_for_each_head_and_tile(choice: Choice) -> None:
    sequences, tiles = choice.sequences, choice.tiles
    heads, count, _ = choice.kept.shape
    width = sequences.tables.shape[1]
    start = 0
    for head in range(heads):
        kv_head = head // (heads // choice.kv_heads)
        for tile in range(count):
            number = head * count + tile
            kept = choice.kept[head, tile].nonzero()[:, 0].tolist()
            table = [int(choice.pages[page]) * choice.kv_heads + kv_head for page in kept]
            assert sequences.tables[number].tolist() == table + [0] * (width - len(table))
            # Whole pages, and of the last one what is there when the tile's last query is.
            filled = (int(tiles.ends[tile]) - 1) % PAGE + 1
            assert int(sequences.lengths[number]) == (len(kept) - 1) * PAGE + filled
            assert int(sequences.starts[number]) == start
            start += int(tiles.lengths[tile])
    assert sequences.starts.tolist()[-1] == start == heads * tiles.tokens
    assert len(sequences.starts) - 1 == len(sequences.lengths) == len(sequences.tables) == heads * count
    assert sequences.kept == int(choice.kept.sum())
    assert width == int(choice.kept.sum(-1).max())


@steady
@given(_choices())
def test_a_folded_page_is_the_page_of_its_head(choice: Choice) -> None:
    cache = torch.arange(50 * choice.kv_heads).view(50, choice.kv_heads, 1, 1)
    folded = cache.view(-1, 1, 1, 1)
    heads, count, _ = choice.kept.shape
    for number, (table, row) in enumerate(
        zip(choice.sequences.tables, choice.kept.flatten(0, 1), strict=True),
    ):
        kv_head = number // count // (heads // choice.kv_heads)
        expected = cache[choice.pages[row], kv_head]
        assert torch.equal(folded[table[: len(expected)].long()].view_as(expected), expected)


@steady
@given(st.lists(_choices(), min_size=1, max_size=4))
def test_requests_follow_each_other(choices: list[Choice]) -> None:
    parts = [choice.sequences for choice in choices]
    sequences = joined(parts)
    assert sequences.kept == sum(part.kept for part in parts)
    assert sequences.lengths.tolist() == [length for part in parts for length in part.lengths.tolist()]
    assert sequences.starts.diff().tolist() == [each for part in parts for each in part.starts.diff().tolist()]
    assert sequences.starts[0] == 0
    width = max(part.tables.shape[1] for part in parts)
    tables = [table + [0] * (width - len(table)) for part in parts for table in part.tables.tolist()]
    assert sequences.tables.tolist() == tables


@pytest.mark.parametrize("requests", [1, 2])
def test_kernels_get_contiguous_int32(requests: int) -> None:
    tiles = Tiling(20, 40, 0, PAGE, Selector(tile=16, group=8, span=8))
    kept = tiles.visible.expand(2, -1, -1).contiguous()
    sequences = joined([virtual_sequences(kept, torch.tensor([3, 1]), 1, tiles)] * requests)
    for tensor in (sequences.starts, sequences.lengths, sequences.tables):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_a_small_one_written_out() -> None:
    # Queries 40 to 69 in tiles of 16: 40-47, 48-63, 64-69.
    tiles = Tiling(40, 30, 0, PAGE, Selector(tile=16, group=8, span=8))
    kept = torch.tensor(
        [
            [[1, 1, 0], [0, 1, 0], [1, 0, 1]],
            [[0, 1, 0], [1, 1, 0], [1, 1, 1]],
        ]
    ).bool()
    sequences = virtual_sequences(kept, torch.tensor([7, 2, 9]), 2, tiles)
    assert sequences.starts.tolist() == [0, 8, 24, 30, 38, 54, 60]
    assert sequences.lengths.tolist() == [48, 32, 38, 16, 64, 70]
    assert sequences.tables.tolist() == [[14, 4, 0], [4, 0, 0], [14, 18, 0], [5, 0, 0], [15, 5, 0], [15, 5, 19]]
    assert sequences.kept == 11
