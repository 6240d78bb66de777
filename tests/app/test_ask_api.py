"""Asking over HTTP, with the scripted engine: events, scopes, modes, errors, clients that leave."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from serving.engine import State
from serving.errors import EngineDied
from tests.conftest import Service
from tests.documents import Report


async def _events(service: Service, question: str, **fields: Any) -> list[tuple[str, Any]]:
    events = []
    async with service.http.stream("POST", "/v1/ask", json={"question": question, **fields}) as response:
        assert response.status_code == 200
        name = ""
        async for line in response.aiter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                events.append((name, json.loads(value)))
    return events


async def test_an_answer_streams_with_context_first_and_the_facts_last(
    service: Service, report_id: str, long_report: Report
) -> None:
    fact = long_report.facts[0]
    service.engine.enqueue("The spare key ", "", f"is kept in {fact.answer}.")
    events = await _events(service, fact.question, documents=[report_id])
    names = [name for name, _ in events]
    assert names == ["context", "token", "token", "citations", "done"]
    context, done = events[0][1], events[-1][1]
    assert context["mode"] == "retrieve"  # forty pages do not fit the scripted window
    assert context["documents"] == [{"id": report_id, "name": "report.pdf", "pages": 40}]
    assert fact.page in {passage["page"] for passage in context["passages"]}
    assert done["answer"] == f"The spare key is kept in {fact.answer}."
    assert done["finish_reason"] == "stop"
    usage = done["usage"]
    assert usage["prompt_tokens"] == context["prompt_tokens"] == len(service.engine.requests[-1].prompt)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    timings = done["timings"]
    assert set(timings) == {"queue", "redact", "retrieve", "assemble", "engine_ttft", "ttft", "total"}
    parts = timings["redact"] + timings["retrieve"] + timings["assemble"] + timings["engine_ttft"]
    assert parts <= timings["ttft"] <= timings["total"]
    [citation] = events[-2][1]["citations"]
    assert (citation["document"], citation["page"]) == (report_id, fact.page)
    assert fact.answer in citation["quote"]
    assert done["answer"][citation["start"] : citation["end"]] == done["answer"]


async def test_without_streaming_the_same_facts_come_in_one_piece(
    service: Service, report_id: str, long_report: Report
) -> None:
    fact = long_report.facts[6]
    service.engine.enqueue(f"It takes place in {fact.answer}.")
    body = (await service.ask(fact.question, documents=[report_id])).json()
    assert set(body) == {"answer", "finish_reason", "citations", "context", "usage", "timings", "prefill"}
    assert body["citations"][0]["page"] == fact.page
    assert body["prefill"]["path"] == "exact"
    assert body["prefill"]["density"] == 1.0


async def test_personal_data_in_a_question_meets_the_placeholders_of_the_documents(service: Service) -> None:
    text = b"Please contact Margaret Ellison about the keys of the tower. The tower is closed on Mondays."
    id = await service.upload("contact.txt", text, collection="contacts")
    page = (await service.http.get(f"/v1/documents/{id}/pages/1")).json()["text"]
    placeholder = page.split("contact ")[1].split(" about")[0]
    assert placeholder.startswith("<PERSON_")
    await service.ask("What is Margaret Ellison responsible for?", documents=[id])
    prompt = service.engine.decode(service.engine.requests[-1].prompt)
    assert "Ellison" not in prompt
    assert prompt.count(placeholder) == 2


async def test_whole_documents_come_before_the_question_and_share_their_prefix(service: Service) -> None:
    texts = {
        "one.txt": b"The first boat is called Linnet. " * 40,
        "two.txt": b"The second boat is called Plover. " * 40,
    }
    ids = [await service.upload(name, text, collection="boats") for name, text in texts.items()]
    first = (await service.ask("What is the first boat called?", collection="boats")).json()
    second = (await service.ask("And the second one?", documents=ids[::-1])).json()
    assert first["context"]["mode"] == second["context"]["mode"] == "whole"
    assert [d["id"] for d in first["context"]["documents"]] == ids
    prompts = [service.engine.decode(request.prompt) for request in service.engine.requests[-2:]]
    shared = prompts[0].index("Question:")
    assert prompts[0][:shared] == prompts[1][:shared]
    assert prompts[0].index("Linnet") < prompts[0].index("Plover") < shared
    # The second question finds the documents in the cache, whatever order its scope was given in.
    assert second["context"]["plan"]["path"] == second["prefill"]["path"] == "warm"
    assert second["prefill"]["cached_tokens"] > 0.9 * second["usage"]["prompt_tokens"]
    assert second["context"]["plan"]["tokens_to_compute"] == (
        second["usage"]["prompt_tokens"] - second["prefill"]["cached_tokens"]
    )


async def test_acceleration_off_reads_nothing_from_the_cache(service: Service) -> None:
    id = await service.upload("cold.txt", b"The third boat is called Teal. " * 40, collection="cold")
    for _ in range(2):
        body = (await service.ask("What is it called?", documents=[id], acceleration="off")).json()
        assert body["prefill"]["cached_tokens"] == 0
    salts = [request.salt for request in service.engine.requests[-2:]]
    assert salts[0] != salts[1]
    assert service.engine.requests[-1].prefill == "exact"


@pytest.mark.parametrize(
    ("fields", "status", "type"),
    [
        pytest.param({"documents": ["d_none"]}, 404, "unknown_document", id="unknown document"),
        pytest.param({"collection": "nobody"}, 404, "no_documents", id="empty collection"),
        pytest.param({"question": "  "}, 422, "invalid_request", id="blank question"),
        pytest.param({"question": "x" * 8001}, 422, "invalid_request", id="question too long"),
        pytest.param({"mode": "guess"}, 422, "invalid_request", id="unknown mode"),
        pytest.param({"colour": "red"}, 422, "invalid_request", id="unknown field"),
        pytest.param({"max_tokens": 0}, 422, "invalid_request", id="no tokens"),
    ],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one piece"])
async def test_a_question_that_cannot_be_asked_is_refused(
    service: Service, fields: dict[str, Any], status: int, type: str, stream: bool
) -> None:
    body = {"question": "Where is it?", "stream": stream, **fields}
    response = await service.http.post("/v1/ask", json=body)
    assert (response.status_code, response.json()["error"]["type"]) == (status, type)
    assert "x" * 100 not in response.text


async def test_a_document_too_long_to_be_read_whole_is_refused_with_numbers(service: Service, report_id: str) -> None:
    response = await service.ask("What is this about?", documents=[report_id], mode="whole")
    assert (response.status_code, response.json()["error"]["type"]) == (400, "prompt_too_long")
    assert "8,192" in response.json()["error"]["message"]


async def test_an_answer_longer_than_the_window_leaves_no_room(service: Service, report_id: str) -> None:
    response = await service.ask("What is this about?", documents=[report_id], max_tokens=8190)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "prompt_too_long")


async def test_progress_comes_while_the_prompt_is_read(service: Service, report_id: str) -> None:
    engine = service.engine
    script, engine.script = engine.script, replace(engine.script, first_token_s=2.5)
    try:
        events = await _events(service, "What is slow?", documents=[report_id])
    finally:
        engine.script = script
    progress = [data for name, data in events if name == "progress"]
    assert len(progress) == 2
    assert progress[0]["phase"] == "prefill"
    assert progress[0]["tokens_total"] == events[0][1]["prompt_tokens"]
    assert 0.9 < progress[0]["elapsed_s"] < progress[1]["elapsed_s"] < 2.5


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one piece"])
@pytest.mark.parametrize(("first", "gap"), [(30.0, 0.0), (0.0, 30.0)], ids=["in prefill", "in decode"])
async def test_a_client_that_leaves_aborts_its_request(
    service: Service, report_id: str, stream: bool, first: float, gap: float
) -> None:
    engine = service.engine
    script, engine.script = engine.script, replace(engine.script, first_token_s=first, gap_s=gap)
    asked = len(engine.requests)
    try:
        async with httpx.AsyncClient(base_url=service.url, trust_env=False) as leaver:
            body = {"question": "Will you stay?", "documents": [report_id], "stream": stream}
            call = asyncio.create_task(leaver.post("/v1/ask", json=body))
            while len(engine.requests) == asked:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            call.cancel()
            await asyncio.wait([call])
        for _ in range(100):
            if engine.requests[-1].id in engine.aborted:
                break
            await asyncio.sleep(0.02)
    finally:
        engine.script = script
    assert engine.requests[-1].id in engine.aborted
    assert engine.stats.pending == 0


async def test_a_dead_engine_ends_the_stream_with_an_error_event(service: Service, report_id: str) -> None:
    engine = service.engine
    script, engine.script = engine.script, replace(engine.script, gap_s=1.0)
    try:
        asking = asyncio.create_task(_events(service, "Are you alive?", documents=[report_id]))
        while not engine.stats.pending:
            await asyncio.sleep(0.02)
        engine.die()
        events = await asking
        assert events[-1][0] == "error"
        assert events[-1][1]["type"] == "engine_died"
        ready = await service.http.get("/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        refused = await service.ask("And now?", documents=[report_id])
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "engine_unavailable")
        assert "retry-after" in refused.headers
    finally:
        engine.script = script
        await engine.start()
    assert (await service.http.get("/ready")).status_code == 200


async def test_too_many_questions_are_refused(service: Service, report_id: str) -> None:
    engine = service.engine
    script, engine.script = engine.script, replace(engine.script, max_pending=1, first_token_s=1.0)
    try:
        asking = asyncio.create_task(service.ask("Who is first?", documents=[report_id]))
        while not engine.stats.pending:
            await asyncio.sleep(0.02)
        second = await service.ask("Who is second?", documents=[report_id])
        assert (second.status_code, second.json()["error"]["type"]) == (429, "overloaded")
        assert (await asking).status_code == 200
    finally:
        engine.script = script


async def test_an_empty_answer_has_no_first_token_time(service: Service, report_id: str) -> None:
    service.engine.enqueue("")
    body = (await service.ask("Nothing to say?", documents=[report_id])).json()
    assert body["answer"] == ""
    assert body["timings"]["ttft"] is None
    assert body["citations"] == []


async def test_metrics_count_answers_and_failures(service: Service, report_id: str) -> None:
    await service.ask("Is it counted?", documents=[report_id])
    await service.ask("Is it counted?", documents=["d_none"])
    text = (await service.http.get("/metrics")).text
    assert 'foreword_answers_total{path="exact"}' in text
    assert 'foreword_failures_total{type="unknown_document"}' in text
    assert "foreword_ttft_seconds_bucket" in text


async def test_health_is_bare(service: Service) -> None:
    assert (await service.http.get("/health")).json() == {"service": "foreword"}


def test_states_and_errors_read_well() -> None:
    assert State("ready").ready
    assert not State("down", "why").ready
    assert "ask again" in str(EngineDied("it died; ask again"))


async def test_a_mistake_of_our_own_ends_the_stream_with_an_error_event(
    service: Service, report_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret text")

    monkeypatch.setattr("app.answer.cite", broken)
    events = await _events(service, "Does it break?", documents=[report_id])
    assert events[-1][0] == "error"
    assert events[-1][1]["type"] == "internal"
    assert "secret" not in events[-1][1]["message"]
