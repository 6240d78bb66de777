"""The memory of read prompts: whole blocks, one namespace per salt, and what is evicted first."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.prefix_memory import PrefixMemory

BLOCK = 4


def _memory(blocks: int = 100) -> PrefixMemory:
    return PrefixMemory(BLOCK, capacity_tokens=blocks * BLOCK)


@pytest.mark.parametrize(
    ("read", "asked", "cached"),
    [
        pytest.param(0, 0, 0, id="nothing"),
        pytest.param(3, 3, 0, id="less than a block"),
        pytest.param(7, 7, 4, id="a block and a rest"),
        # The last token is computed in any case, because its output is the first word; so its block is, too.
        pytest.param(8, 8, 4, id="the last token is never cached"),
        pytest.param(8, 9, 8, id="one token more"),
        pytest.param(20, 9, 8, id="shorter than what was read"),
        pytest.param(9, 20, 8, id="longer than what was read"),
    ],
)
def test_whole_blocks_and_never_the_last_token(read: int, asked: int, cached: int) -> None:
    memory = _memory()
    memory.add("salt", range(read))
    assert memory.cached_tokens("salt", range(asked)) == cached


def test_a_block_counts_only_after_the_same_beginning() -> None:
    memory = _memory()
    memory.add("salt", [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert memory.cached_tokens("salt", [9, 9, 9, 9, 2, 2, 2, 2, 3]) == 0
    assert memory.cached_tokens("salt", [2, 2, 2, 2, 3]) == 0


@pytest.mark.parametrize(
    ("salt", "prompt", "other_salt", "other_prompt"),
    [
        pytest.param("a", [1, 2, 3, 4, 5], "b", [1, 2, 3, 4, 5], id="other salt"),
        pytest.param("", [1, 2, 3, 4, 5], "1", [1, 2, 3, 4, 5], id="empty salt"),
        pytest.param("a1", [2, 3, 4, 5, 6], "a", [12, 3, 4, 5, 6], id="salt runs into the first token"),
        pytest.param("a", [1, 23, 4, 5, 6], "a", [12, 3, 4, 5, 6], id="tokens run into each other"),
    ],
)
def test_other_salts_and_other_tokens_share_nothing(
    salt: str, prompt: list[int], other_salt: str, other_prompt: list[int]
) -> None:
    memory = _memory()
    memory.add(salt, prompt)
    assert memory.cached_tokens(salt, prompt) == BLOCK
    assert memory.cached_tokens(other_salt, other_prompt) == 0


def test_the_least_recently_read_prompt_goes_first() -> None:
    memory = _memory(blocks=4)
    old, middle, new = [list(range(start, start + 9)) for start in (0, 100, 200)]
    memory.add("salt", old)
    memory.add("salt", middle)
    memory.add("salt", old)
    memory.add("salt", new)
    assert [memory.cached_tokens("salt", prompt) for prompt in (old, middle, new)] == [8, 0, 8]


def test_a_prompt_loses_its_end_first() -> None:
    # As in vLLM, which frees a prompt's blocks from the last to the first: what remains is a usable prefix.
    memory = _memory(blocks=4)
    memory.add("salt", range(17))
    memory.add("salt", range(100, 105))
    assert memory.cached_tokens("salt", range(17)) == 12
    assert memory.cached_tokens("salt", range(100, 105)) == 4


def test_a_capacity_below_one_block_holds_one_block() -> None:
    memory = PrefixMemory(BLOCK, capacity_tokens=0)
    memory.add("salt", range(5))
    assert memory.cached_tokens("salt", range(5)) == 4


# Two token values make long common prefixes likely.
def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


_prompts = st.lists(st.integers(0, 1), max_size=40)


@settings(deadline=None, max_examples=150)
@given(read=st.lists(_prompts, max_size=5), asked=_prompts, blocks=st.integers(0, 12))
def test_cached_tokens_lie_within_a_common_prefix(read: list[list[int]], asked: list[int], blocks: int) -> None:
    memory = _memory(blocks)
    for prompt in read:
        memory.add("salt", prompt)
    cached = memory.cached_tokens("salt", asked)
    longest = max((_common(prompt, asked) for prompt in read), default=0)
    assert cached % BLOCK == 0
    assert cached <= longest
    assert cached <= max(0, len(asked) - 1)
    assert cached <= max(1, blocks) * BLOCK


@settings(deadline=None, max_examples=50)
@given(read=st.lists(_prompts, max_size=5), asked=_prompts)
def test_with_room_for_all_every_whole_block_is_found(read: list[list[int]], asked: list[int]) -> None:
    memory = _memory()
    for prompt in read:
        memory.add("salt", prompt)
    longest = max((_common(prompt, asked) for prompt in read), default=0)
    assert memory.cached_tokens("salt", asked) == min(longest, max(0, len(asked) - 1)) // BLOCK * BLOCK
