"""Writes blocks behind the engine's back, in one thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from serving.kv.files import Buffer, KvFiles


@dataclass(frozen=True, slots=True)
class _Block:
    namespace: str
    block_hash: bytes
    bytes: Buffer
    first: bool


class Writer:
    """A queue of blocks to be written, bounded in bytes: what does not fit is not stored."""

    def __init__(self, files: KvFiles, limit_bytes: int) -> None:
        self._files = files
        self._limit = limit_bytes
        self._queue: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, bytes], int] = {}
        self._bytes = 0
        self._thread = threading.Thread(target=self._run, name="foreword-kv-writer", daemon=True)
        self._thread.start()

    def offer(self, namespace: str, block_hash: bytes, copy: Callable[[], Buffer], size: int, *, first: bool) -> bool:
        """Have a block written, unless it is there already.

        Args:
            copy: gives the block's bytes, of this size; called only if they are wanted, before this returns.
            first: whether it is the first of its prompt.

        Returns:
            whether it is stored or will be, if the disk takes it.
        """
        key = namespace, block_hash
        if key in self._waiting or self._files.has(namespace, block_hash):
            return True
        if self._bytes + size > self._limit or not self._files.accepts:
            return False
        block = _Block(namespace, block_hash, copy(), first)
        with self._lock:
            self._waiting[key] = size
            self._bytes += size
        self._queue.put(block)
        return True

    def close(self, timeout_s: float) -> None:
        """Write what is waiting, for as long as that, and end."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (block := self._queue.get()) is not None:
            if block.first:
                self._files.begin(block.namespace)
            self._files.write(block.namespace, block.block_hash, [block.bytes])
            with self._lock:
                self._bytes -= self._waiting.pop((block.namespace, block.block_hash))
