"""Events as server-sent events (WHATWG HTML, section 9.2), with heartbeats and prompt notice of a client that left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

_HEARTBEAT_S = 10.0


def encode(event: str, data: Any) -> bytes:
    """One event; JSON never holds a raw line break, so one data line is enough."""
    return f"event: {event}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


class EventResponse(Response):
    """Streams encoded events. When the client leaves, the source is closed at once, whatever it is waiting for.

    A client that has left before the first event leaves a source that never began, and so never ends: whatever has to
    happen all the same is `on_end`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncIterator[bytes],
        heartbeat_s: float = _HEARTBEAT_S,
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._source = source
        self._heartbeat_s = heartbeat_s
        self._on_end = on_end
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._until_end(receive, send)
        finally:
            self._on_end()

    async def _until_end(self, receive: Receive, send: Send) -> None:
        streaming = asyncio.create_task(self._stream(send))
        leaving = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (streaming, leaving):
                task.cancel()
            await asyncio.wait({streaming, leaving})
        if not streaming.cancelled() and (error := streaming.exception()) is not None:
            raise error

    async def _stream(self, send: Send) -> None:
        upcoming: asyncio.Future[bytes | None] = asyncio.ensure_future(anext(self._source, None))
        try:
            while True:
                if not (await asyncio.wait({upcoming}, timeout=self._heartbeat_s))[0]:
                    await _send(send, b": ping\n\n")
                    continue
                chunk = upcoming.result()
                if chunk is None:
                    break
                await _send(send, chunk)
                upcoming = asyncio.ensure_future(anext(self._source, None))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            upcoming.cancel()
            await asyncio.wait({upcoming})
            await self._source.aclose()  # type: ignore[attr-defined]


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_client_leaves(receive: Receive, work: asyncio.Task[T]) -> T | None:
    """The result of the work, or None when the client left first; the work is then cancelled."""
    leaving = asyncio.create_task(_client_left(receive))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.wait({work, leaving})
