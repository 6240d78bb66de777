"""The start of a prompt as a cache of whole blocks sees it: chained digests; a block stands for all before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


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
    digest = namespace(salt)
    digests = []
    for start in range(0, len(prompt) - block + 1, block):
        digest = following(digest, prompt[start : start + block])
        digests.append(digest)
    return Prefix(block, tuple(digests))


def namespace(salt: str) -> bytes:
    """What the first block of a salt follows."""
    # Digested first: the salt 'a1' before the token 2 must not read like the salt 'a' before the token 12.
    return blake2b(salt.encode(), digest_size=16).digest()


def following(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a block of these tokens after the block `before`."""
    return blake2b(before + ",".join(map(str, tokens)).encode(), digest_size=16).digest()
