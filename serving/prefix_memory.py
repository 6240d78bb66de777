"""Which prompt prefixes the engine has read lately, for estimates only.

Mirrors the engine's cache of whole blocks in least-recently-used order. It can be wrong (the engine may have
evicted a block); what was really cached comes from the engine with the first token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b


class PrefixMemory:
    """Remembers chained block digests of prompts, up to the capacity of the KV cache."""

    def __init__(self, block_size: int, capacity_tokens: int) -> None:
        self._block_size = block_size
        self._capacity = max(1, capacity_tokens // block_size)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def add(self, salt: str, prompt: Sequence[int]) -> None:
        """Remember a prompt that the engine has read."""
        # The last block is the oldest: like vLLM, which frees from the end, so that a prefix remains.
        for digest in reversed(list(self._digests(salt, prompt))):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def cached_tokens(self, salt: str, prompt: Sequence[int]) -> int:
        """Tokens at the start of the prompt that are probably cached: whole blocks, never the last token."""
        blocks = 0
        for digest in self._digests(salt, prompt[:-1]):
            if digest not in self._blocks:
                break
            blocks += 1
        return blocks * self._block_size

    def _digests(self, salt: str, prompt: Sequence[int]) -> Iterator[bytes]:
        # Digested first: the salt 'a1' before the token 2 must not read like the salt 'a' before the token 12.
        digest = blake2b(salt.encode(), digest_size=16).digest()
        for start in range(0, len(prompt) - self._block_size + 1, self._block_size):
            block = ",".join(map(str, prompt[start : start + self._block_size])).encode()
            digest = blake2b(digest + block, digest_size=16).digest()
            yield digest
