"""Reading early over HTTP: what documents tell of it, warming, pinning, releasing, intent, deletion."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.kv.files import KvFiles
from tests.conftest import Service, fill, small_disk

LIMIT_S = 10.0
TEXT = b"The sixth boat is called Avocet, and its berth is number 12. " * 100


@pytest.fixture
def eager(service: Service) -> Iterator[Service]:
    """The service as it is by default: documents are read when they arrive, and after they were asked about."""
    service.services.warmer._enabled = True
    yield service
    service.services.warmer._enabled = False


async def _document(service: Service, id: str) -> dict[str, Any]:
    body: dict[str, Any] = (await service.http.get(f"/v1/documents/{id}")).json()
    return body


async def _until(service: Service, id: str, state: str, **facts: Any) -> dict[str, Any]:
    """What a document tells of its warmth, once it is in this state."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            warm: dict[str, Any] = (await _document(service, id))["warm"]
            if warm["state"] == state and all(warm[name] == value for name, value in facts.items()):
                return warm
            await asyncio.sleep(0.01)


async def _events(service: Service, query: str) -> AsyncIterator[dict[str, Any]]:
    async with service.http.stream("GET", f"/v1/intent?{query}") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def test_a_document_is_warm_soon_after_it_arrived_and_its_question_reads_itself_only(eager: Service) -> None:
    id = await eager.upload("avocet.txt", TEXT, collection="warm on arrival")
    assert (await _document(eager, id))["status"] == "ready"
    warm = await _until(eager, id, "warm")
    body = (await eager.ask("Where does it lie?", documents=[id])).json()
    assert body["prefill"]["path"] == body["context"]["plan"]["path"] == "warm"
    assert body["prefill"]["cached_tokens"] == warm["total"] == warm["tokens"]
    assert body["context"]["plan"]["tokens_to_compute"] == body["usage"]["prompt_tokens"] - warm["total"] < 40
    # Another collection has another namespace, even for the same bytes.
    other = await eager.upload("avocet.txt", TEXT, collection="another")
    assert (await _document(eager, other))["id"] != id


async def test_a_document_is_warmed_pinned_and_released_by_name(service: Service) -> None:
    id = await service.upload("pin.txt", TEXT, collection="pins")
    assert (await _document(service, id))["warm"] == {
        "state": "cold",
        "tokens": 0,
        "total": None,
        "eta_s": None,
        "pinned": False,
        "reason": None,
    }
    response = await service.http.post(f"/v1/documents/{id}/warm", params={"pin": True})
    assert response.status_code == 202
    assert response.json()["warm"]["state"] == "warming"
    await _until(service, id, "warm", pinned=True)
    released = await service.http.delete(f"/v1/documents/{id}/warm")
    assert (released.json()["warm"]["state"], released.json()["warm"]["pinned"]) == ("warm", False)


async def test_pins_are_few(service: Service) -> None:
    ids = [await service.upload(f"pin {n}.txt", TEXT + b"%d" % n, collection="pins") for n in range(3)]
    answers = [await service.http.post(f"/v1/documents/{id}/warm", params={"pin": True}) for id in ids]
    assert [answer.status_code for answer in answers] == [202, 202, 409]
    error = answers[2].json()["error"]
    assert error["type"] == "not_warmed"
    assert "2 documents are pinned already" in error["message"]
    for id in ids:
        assert (await service.http.delete(f"/v1/documents/{id}/warm")).status_code == 200


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_an_unknown_document_cannot_be_warmed(service: Service, method: str) -> None:
    response = await service.http.request(method, "/v1/documents/d_none/warm")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "unknown_document")


async def test_documents_too_long_to_be_read_together_say_so(service: Service, report_id: str) -> None:
    other = await service.upload("beside the report.txt", TEXT, collection="reports")
    (event,) = [event async for event in _events(service, f"documents={report_id}&documents={other}")]
    assert event["state"] == "cold"
    assert "longer than the model's window" in event["reason"]


async def test_a_window_too_small_for_volumes_says_so(service: Service, report_id: str) -> None:
    script = service.engine.script
    service.engine.script = replace(script, window=256)
    try:
        response = await service.http.post(f"/v1/documents/{report_id}/warm")
    finally:
        service.engine.script = script
    assert (response.status_code, response.json()["error"]["type"]) == (409, "not_warmed")
    assert "window of 256 tokens is too small" in response.json()["error"]["message"]


async def test_who_is_about_to_ask_is_read_for_and_told(service: Service) -> None:
    id = await service.upload("intent.txt", TEXT, collection="intent")
    states = []
    async for event in _events(service, "collection=intent"):
        states.append(event["state"])
        if event["state"] == "warm":
            break
    assert states[0] == "warming"
    assert (await _document(service, id))["warm"]["state"] == "warm"
    entry = next(iter(e for s, e in service.services.warmer._entries.items() if s.documents == (id,)))
    async with asyncio.timeout(LIMIT_S):
        while entry.watched:
            await asyncio.sleep(0.01)


async def test_intent_about_nothing_is_refused(service: Service) -> None:
    assert (await service.http.get("/v1/intent", params={"collection": "empty"})).status_code == 404


async def test_a_deleted_document_leaves_no_trace_in_the_warm_set(eager: Service) -> None:
    id = await eager.upload("gone.txt", TEXT, collection="gone")
    await _until(eager, id, "warm")
    assert ((id,), None) in eager.services.catalogue.scopes()
    assert (await eager.http.delete(f"/v1/documents/{id}")).status_code == 204
    assert not [scope for scope in eager.services.warmer._entries if id in scope.documents]
    assert ((id,), None) not in eager.services.catalogue.scopes()


async def test_a_question_without_acceleration_says_what_it_evicted(eager: Service) -> None:
    id = await eager.upload("evicted.txt", TEXT, collection="evicted")
    await _until(eager, id, "warm")
    body = (await eager.ask("Where does it lie?", documents=[id], acceleration="off")).json()
    assert body["evicted"] == []
    clear = eager.engine._cache.clear
    eager.engine._cache.add = lambda *_: clear()  # type: ignore[method-assign]
    try:
        body = (await eager.ask("Where does it lie?", documents=[id], acceleration="off")).json()
    finally:
        del eager.engine._cache.add
    assert id in body["evicted"]


@pytest.fixture
def disk(service: Service, tmp_path: Path) -> Iterator[Path]:
    """A folder in which an engine may keep prompts."""
    (tmp_path / "disk").mkdir()
    yield tmp_path / "disk"
    service.engine.files = None


async def _disk(service: Service) -> tuple[Any, str]:
    """What is told of the disk: in `/ready`, and the state that `/metrics` counts."""
    told = (await service.http.get("/ready")).json()["kv_disk"]
    lines = (await service.http.get("/metrics")).text.splitlines()
    (counted,) = (line for line in lines if line.startswith("foreword_kv_disk_state{") and line.endswith(" 1.0"))
    return told, counted.split('"')[1]


async def test_without_a_disk_none_is_told(service: Service) -> None:
    assert await _disk(service) == (None, "off")


async def test_a_full_disk_is_told_until_there_is_room(service: Service, disk: Path) -> None:
    with small_disk(disk, 2):
        service.engine.files = KvFiles(disk / "kv", 2**30)
        fine = {"state": "ok", "bytes": 0, "quota_bytes": 2**30, "reason": None}
        assert await _disk(service) == (fine, "ok")
        filler = fill(disk)
        assert await _disk(service) == (fine | {"state": "full", "reason": os.strerror(errno.ENOSPC)}, "full")
        # Nothing else depends on it.
        id = await service.upload("full.txt", TEXT, collection="full")
        await service.http.post(f"/v1/documents/{id}/warm")
        await _until(service, id, "warm")
        assert (await service.ask("Where does it lie?", documents=[id])).json()["prefill"]["path"] == "warm"
        filler.unlink()
        assert await _disk(service) == (fine, "ok")


@pytest.mark.parametrize(
    ("quota", "blocked", "state"),
    [
        pytest.param(1000, False, "full", id="smaller than a file"),
        pytest.param(2**30, True, "unusable", id="a file in the folder's place"),
    ],
)
async def test_why_nothing_is_kept_is_told(service: Service, disk: Path, quota: int, blocked: bool, state: str) -> None:
    service.engine.files = KvFiles(disk / "kv", quota)
    if blocked:
        (disk / "kv").write_text("not a folder")
    told, counted = await _disk(service)
    assert told["state"] == counted == state
    assert told["reason"]
