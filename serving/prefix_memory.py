"""A cache of prompt prefixes without any keys and values: the scripted engine's, of whole blocks, oldest out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from serving.prefix import Prefix, blocks_of, leading


class PrefixMemory:
    """Remembers the blocks of prompts, up to a capacity."""

    def __init__(self, block: int, capacity_tokens: int) -> None:
        self.block = block
        self._capacity = max(1, capacity_tokens // block)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def add(self, salt: str, prompt: Sequence[int]) -> None:
        """Remember a prompt that was read."""
        # The last block is the oldest: like vLLM, which frees from the end, so that a prefix remains.
        for digest in reversed(list(blocks_of(salt, prompt, self.block))):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def tokens(self, prefix: Prefix) -> int:
        """Tokens at the start of the prefix that are remembered without a gap."""
        return leading(prefix.digests, self._blocks) * prefix.block

    def cached_tokens(self, salt: str, prompt: Sequence[int]) -> int:
        """Tokens at the start of a prompt that need not be computed: whole blocks, never the last token."""
        return leading(blocks_of(salt, prompt[:-1], self.block), self._blocks) * self.block
