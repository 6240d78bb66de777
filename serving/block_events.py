"""Listens to what vLLM's scheduler tells of its cache: a private socket in the file system, one message a step."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog

from serving.resident import LowerBlocks, ResidentBlocks

log = structlog.get_logger(__name__)

# Blocks of other kinds (a sliding window's) say nothing about whether a prefix can be used.
_KINDS = (None, "full_attention", "mla_attention")
# Where the engine computes, be it a GPU or not; what lies in a lower tier has to be loaded first.
_MEMORY = (None, "GPU")
_HOST = "CPU"


class BlockEvents:
    """The scheduler's account of its blocks, kept in `resident`, and of those in the host's memory, kept in `host`."""

    def __init__(self, resident: ResidentBlocks, host: LowerBlocks) -> None:
        self._resident = resident
        self._host = host
        self._folder = Path(tempfile.mkdtemp(prefix="foreword-"))
        self._task: asyncio.Task[None] | None = None
        self._next = 0

    @property
    def environment(self) -> dict[str, str]:
        """What vLLM's processes must find in their environment: names of blocks are then whole digests."""
        return {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of vLLM's `KVEventsConfig`."""
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{self._folder / 'blocks'}"}

    def follow(self) -> None:
        """Begin to listen; needs a running loop, and should come before anything worth knowing is read."""
        self._task = asyncio.create_task(self._listen(), name="block events")

    async def close(self) -> None:
        """Stop listening; safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _listen(self) -> None:
        import zmq
        import zmq.asyncio
        from msgspec.msgpack import Decoder
        from vllm.distributed.kv_events import KVEventBatch

        decoder = Decoder(KVEventBatch)
        with contextlib.closing(zmq.asyncio.Context.instance().socket(zmq.SUB)) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            # Nothing is dropped on our side, however busy the loop is.
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self.settings["endpoint"])
            while True:
                _, number, payload = await socket.recv_multipart()
                self._apply(int.from_bytes(number, "big"), decoder.decode(payload).events)

    def _apply(self, number: int, events: Iterable[Any]) -> None:
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

        # Messages before the first one we see told of a cache that nobody had asked about yet.
        if self._next and number != self._next:
            # What we believe may be wrong now, and nothing is better than that: what is read again is told again.
            log.warning("block_events_lost", messages=number - self._next)
            self._resident.clear()
            self._host.clear()
        self._next = number + 1
        for event in events:
            if isinstance(event, BlockStored | BlockRemoved) and event.medium not in _MEMORY:
                if event.medium == _HOST:
                    told = self._host.stored if isinstance(event, BlockStored) else self._host.removed
                    told(event.block_hashes)
                continue
            if isinstance(event, BlockStored) and event.kv_cache_spec_kind in _KINDS:
                salt = next((key for key in (event.extra_keys or [None])[0] or () if isinstance(key, str)), "")
                self._resident.stored(
                    event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, salt
                )
            elif isinstance(event, BlockRemoved):
                self._resident.removed(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._resident.clear()
