"""What the engine tells of its blocks, against a cache that is simulated block by block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.prefix import Prefix, prefix_of
from serving.resident import ResidentBlocks

BLOCK = 4


def _names(salt: str, tokens: range | list[int]) -> list[bytes]:
    """Names as an engine would give them: other than our digests, but as telling."""
    return [b"engine " + digest for digest in prefix_of(salt, tokens, BLOCK).digests]


def _store(blocks: ResidentBlocks, salt: str, tokens: range | list[int], first: int = 0) -> None:
    names = _names(salt, tokens)
    parent = names[first - 1] if first else None
    blocks.stored(names[first:], parent, tokens[first * BLOCK : len(names) * BLOCK], BLOCK, salt)


def test_what_was_stored_is_there_for_the_same_salt_and_tokens() -> None:
    blocks = ResidentBlocks()
    _store(blocks, "s", range(18))
    assert blocks.tokens(prefix_of("s", range(18), BLOCK)) == 16
    assert blocks.tokens(prefix_of("s", range(9), BLOCK)) == 8
    assert blocks.tokens(prefix_of("s", [*range(8), 0, 0, 0, 0], BLOCK)) == 8
    assert blocks.tokens(prefix_of("other", range(18), BLOCK)) == 0
    assert blocks.tokens(Prefix(BLOCK, ())) == 0


def test_a_prompt_is_stored_step_by_step() -> None:
    blocks = ResidentBlocks()
    _store(blocks, "s", range(8))
    _store(blocks, "s", range(20), first=2)
    assert blocks.tokens(prefix_of("s", range(20), BLOCK)) == 20


def test_a_block_after_an_unknown_one_stands_for_nothing() -> None:
    blocks = ResidentBlocks()
    _store(blocks, "s", range(20), first=2)
    assert blocks.tokens(prefix_of("s", range(20), BLOCK)) == 0
    # Told once more from the start, as when a prompt finds its blocks cached, all of it counts.
    _store(blocks, "s", range(20))
    assert blocks.tokens(prefix_of("s", range(20), BLOCK)) == 20


def test_what_was_removed_ends_the_prefix() -> None:
    blocks = ResidentBlocks()
    _store(blocks, "s", range(20))
    blocks.removed([_names("s", range(20))[3], b"never heard of"])
    assert blocks.tokens(prefix_of("s", range(20), BLOCK)) == 12
    blocks.clear()
    assert blocks.tokens(prefix_of("s", range(20), BLOCK)) == 0


@pytest.mark.parametrize("salt", ["", "s"])
def test_a_block_is_known_by_all_that_comes_before_it(salt: str) -> None:
    blocks = ResidentBlocks()
    _store(blocks, salt, [1, 1, 1, 1, 2, 2, 2, 2])
    assert blocks.tokens(prefix_of(salt, [2, 2, 2, 2], BLOCK)) == 0
    assert blocks.tokens(prefix_of(salt, [3, 3, 3, 3, 2, 2, 2, 2], BLOCK)) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 6)), max_size=40))
def test_it_agrees_with_the_cache_after_any_history(history: list[tuple[bool, int, int]]) -> None:
    """Prompts of up to six blocks are read and lose their ends, as an engine evicts."""
    blocks, held = ResidentBlocks(), dict.fromkeys(range(4), 0)
    for read, prompt, length in history:
        salt, tokens = f"salt {prompt}", range(length * BLOCK)
        if read and length > held[prompt]:
            _store(blocks, salt, tokens, first=held[prompt])
            held[prompt] = length
        elif not read and length < held[prompt]:
            blocks.removed(_names(salt, range(held[prompt] * BLOCK))[length:])
            held[prompt] = length
    for prompt, length in held.items():
        assert blocks.tokens(prefix_of(f"salt {prompt}", range(100), BLOCK)) == length * BLOCK
