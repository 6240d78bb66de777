"""The start of a prompt as a cache of whole blocks sees it: chained digests; a block stands for all before it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class Prefix:
    """The whole blocks of `block` tokens at the start of a prompt, one digest each."""

    block: int
    digests: tuple[bytes, ...]

    @property
    def tokens(self) -> int:
        return len(self.digests) * self.block


def prefix_of(salt: str, prompt: Sequence[int], block: int) -> Prefix:
    """The whole blocks of a prompt under a salt."""
    return Prefix(block, tuple(blocks_of(salt, prompt, block)))


def blocks_of(salt: str, prompt: Sequence[int], block: int) -> Iterator[bytes]:
    """The digests of `prefix_of`, one by one: of a long prompt that is not cached only the first is ever needed."""
    digest = namespace(salt)
    for start in range(0, len(prompt) - block + 1, block):
        digest = following(digest, prompt[start : start + block])
        yield digest


def leading(digests: Iterable[bytes], held: Container[bytes]) -> int:
    """How many of the first digests are held without a gap."""
    return sum(1 for _ in takewhile(held.__contains__, digests))


def namespace(salt: str) -> bytes:
    """What the first block of a salt follows."""
    # Digested first: the salt 'a1' before the token 2 must not read like the salt 'a' before the token 12.
    return blake2b(salt.encode(), digest_size=16).digest()


def following(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a block of these tokens after the block `before`."""
    return blake2b(before + ",".join(map(str, tokens)).encode(), digest_size=16).digest()
