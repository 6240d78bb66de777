"""What is in the engine's cache, from what the engine tells: blocks stored, blocks removed, everything cleared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from serving.prefix import Prefix, blocks_of, following, leading, namespace


class ResidentBlocks:
    """The blocks whose keys and values are in memory, by the engine's names for them and by our digests.

    A block whose predecessor was never told of is not counted: nobody could say what it stands for.
    """

    def __init__(self) -> None:
        self._digests: dict[bytes, bytes] = {}
        self._resident: set[bytes] = set()

    def stored(
        self, names: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], block: int, salt: str
    ) -> None:
        """Blocks were filled, one after another.

        Args:
            names: the engine's, of each block.
            parent: name of the block before the first, None at the start of a prompt.
            tokens: [blocks * block].
            salt: of the request; matters at the start of a prompt only.
        """
        before = namespace(salt) if parent is None else self._digests.get(parent)
        if before is None:
            return
        for number, name in enumerate(names):
            before = following(before, tokens[number * block : (number + 1) * block])
            self._digests[name] = before
            self._resident.add(before)

    def digest(self, name: bytes) -> bytes | None:
        """Our digest of a block in memory."""
        return self._digests.get(name)

    def removed(self, names: Iterable[bytes]) -> None:
        """Blocks were evicted."""
        for name in names:
            if (digest := self._digests.pop(name, None)) is not None:
                self._resident.discard(digest)

    def clear(self) -> None:
        """The cache was emptied, or what it holds is not known any more."""
        self._digests.clear()
        self._resident.clear()

    def tokens(self, prefix: Prefix) -> int:
        """Tokens at the start of the prefix whose blocks are in memory without a gap."""
        return leading(prefix.digests, self._resident) * prefix.block

    def cached_tokens(self, salt: str, prompt: Sequence[int], block: int) -> int:
        """Tokens at the start of a prompt that need not be computed: whole blocks, never the last token."""
        return leading(blocks_of(salt, prompt[:-1], block), self._resident) * block


class LowerBlocks:
    """What a slower memory holds: chunks of several blocks, each known by its last one, which stands for all before it.

    What a block stands for is asked of `memory`; one that is not there any more when it is told of is not counted.
    """

    def __init__(self, memory: ResidentBlocks) -> None:
        self._memory = memory
        self._digests: dict[bytes, bytes] = {}

    def stored(self, names: Iterable[bytes]) -> None:
        """Chunks were filled; `names` are the engine's, of their last blocks."""
        for name in names:
            if (digest := self._memory.digest(name)) is not None:
                self._digests[name] = digest

    def removed(self, names: Iterable[bytes]) -> None:
        """Chunks were evicted."""
        for name in names:
            self._digests.pop(name, None)

    def clear(self) -> None:
        """What the memory holds is not known any more."""
        self._digests.clear()

    def cached_tokens(self, salt: str, prompt: Sequence[int], block: int, chunk: int) -> int:
        """Tokens at the start of a prompt that need not be computed: whole chunks of `chunk` tokens, never the last."""
        if not self._digests:
            return 0
        last = islice(blocks_of(salt, prompt[:-1], block), chunk // block - 1, None, chunk // block)
        return leading(last, frozenset(self._digests.values())) * chunk
