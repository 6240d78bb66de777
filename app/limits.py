"""ASGI middleware around everything: notes when a request arrived and refuses bodies over the limit.

Bytes are counted as they come in, so a body without a length is refused too, before it has been kept anywhere. What the
app makes of a body that breaks off does not matter: the refusal is the answer, unless another one has begun.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BodyTooLarge, respond


class Limits:
    """Wraps an ASGI app."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["received"] = time.perf_counter()
        if self._announced(scope) > self._max_bytes:
            await respond(self._refusal())(scope, receive, send)
            return
        seen = 0
        answered = False

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._refusal()
            return message

        def refused() -> bool:
            return seen > self._max_bytes and not answered

        async def noting(message: Message) -> None:
            nonlocal answered
            if not refused():
                answered = True
                await send(message)

        try:
            await self._app(scope, counted, noting)
        except Exception:
            if not refused():
                raise
        if refused():
            await respond(self._refusal())(scope, receive, send)

    def _refusal(self) -> BodyTooLarge:
        megabytes = self._max_bytes / 1_000_000
        return BodyTooLarge(f"the request is larger than {megabytes:g} MB; upload less at once or raise the limit")

    @staticmethod
    def _announced(scope: Scope) -> int:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                return int(value)
        return 0
