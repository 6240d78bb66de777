"""Server-sent events: encoding, heartbeats, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.stream import EventResponse, encode, until_client_leaves


async def _respond(source: AsyncIterator[bytes], heartbeat_s: float = 10.0) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    await EventResponse(source, heartbeat_s)({"type": "http"}, receive, send)
    return sent


def test_an_event_is_one_data_line() -> None:
    assert encode("token", {"text": "a\nb 猫"}) == 'event: token\ndata: {"text": "a\\nb 猫"}\n\n'.encode()


async def test_events_are_sent_as_they_come_and_the_body_ends() -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"1"
        yield b"2"

    sent = await _respond(source())
    assert [message.get("body") for message in sent[1:]] == [b"1", b"2", b""]
    assert sent[-1]["more_body"] is False
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers


async def test_a_silent_source_is_covered_by_heartbeats() -> None:
    async def source() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.2)
        yield b"late"

    bodies = [message.get("body") for message in (await _respond(source(), heartbeat_s=0.05))[1:]]
    assert bodies.count(b": ping\n\n") >= 2
    assert bodies[-2:] == [b"late", b""]


async def test_a_failing_source_is_not_swallowed() -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"1"
        raise LookupError("lost")

    with pytest.raises(LookupError, match="lost"):
        await _respond(source())


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    cancelled = asyncio.Event()

    async def work() -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "done"

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    assert await until_client_leaves(receive, asyncio.create_task(work())) is None
    assert cancelled.is_set()


async def test_finished_work_is_returned() -> None:
    async def work() -> str:
        return "done"

    async def receive() -> Any:
        await asyncio.sleep(30)

    assert await until_client_leaves(receive, asyncio.create_task(work())) == "done"
