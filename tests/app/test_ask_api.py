"""Asking over HTTP, with the scripted engine: events, scopes, modes, errors, clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import httpx
import pytest
from prometheus_client import CollectorRegistry

from app.answer import Ask, Context, Event, Prepared, Token, answer, prepare_answer
from app.metrics import Metrics
from app.prompt import build_messages
from retrieval.catalogue import Document
from serving.engine import Message, Prefill, State
from serving.errors import EngineDied
from serving.prefill_speed import PrefillSpeed
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


async def _prepared(service: Service, ask: Ask) -> Prepared:
    return await prepare_answer(ask, service.services, time.perf_counter())


async def _read_exactly(service: Service, document: str) -> None:
    """Give the engine an idea of how long it takes to read this document."""
    with service.scripted(seconds_per_token=1e-4):
        await service.ask("How fast is it read?", documents=[document], acceleration="off")


async def _next(events: AsyncIterator[Event]) -> Event:
    return await anext(events)


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
    assert set(body) == {
        "answer",
        "finish_reason",
        "citations",
        "context",
        "usage",
        "timings",
        "prefill",
        "evicted",
    }
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


SPARSE = {"selector": "alpha:0.02", "seconds_per_token": 1e-4}


async def test_a_prompt_is_read_sparsely_where_that_is_sooner(service: Service) -> None:
    id = await service.upload("wide.txt", b"The fourth boat is called Heron. " * 300, collection="wide")
    await _read_exactly(service, id)
    with service.scripted(**SPARSE):
        body = (await service.ask("What is it called?", documents=[id])).json()
    request = service.engine.requests[-1]
    assert request.prefill == "sparse"
    assert body["context"]["plan"]["path"] == body["prefill"]["path"] == "sparse"
    assert body["prefill"]["density"] == 0.25
    assert 0 < body["prefill"]["kept_pages"] < body["prefill"]["total_pages"]
    assert body["prefill"]["fallback_reason"] is None
    assert request.dense_from is not None
    assert "Question: What is it called?" in service.engine.decode(request.prompt[request.dense_from :])
    assert "Heron" in service.engine.decode(request.prompt[: request.dense_from])


@pytest.mark.parametrize(
    ("changes", "acceleration"),
    [
        pytest.param({"selector": None}, "auto", id="no sparse prefill"),
        pytest.param({**SPARSE, "density": 1.0}, "auto", id="no sooner"),
        pytest.param({**SPARSE, "density": 2.0}, "auto", id="later"),
        pytest.param(SPARSE, "off", id="no acceleration"),
    ],
)
async def test_a_prompt_is_read_exactly_otherwise(
    service: Service, changes: dict[str, Any], acceleration: Literal["auto", "off"]
) -> None:
    id = await service.upload("narrow.txt", b"The fifth boat is called Egret. " * 300, collection="narrow")
    await _read_exactly(service, id)
    ask = Ask("What is it called?", documents=(id,), acceleration=acceleration)
    with service.scripted(**changes):
        prepared = await _prepared(service, ask)
    assert (prepared.request.prefill, prepared.context.plan.path) == ("exact", "exact")
    assert prepared.alone == (acceleration == "off")


async def test_a_short_prompt_is_read_exactly_whatever_the_estimate_says(service: Service) -> None:
    id = await service.upload("brief.txt", b"The ninth boat is called Plover. " * 100, collection="brief")
    await _read_exactly(service, id)
    with service.scripted(**SPARSE):
        prepared = await _prepared(service, Ask("What is it called?", documents=(id,)))
    assert 500 < prepared.context.plan.tokens_to_compute < 2048
    assert (prepared.request.prefill, prepared.context.plan.path) == ("exact", "exact")


async def test_a_prompt_is_read_exactly_without_an_estimate(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    id = await service.upload("first.txt", b"The sixth boat is called Stilt. " * 300, collection="first")
    monkeypatch.setattr(service.engine, "_speed", PrefillSpeed())
    with service.scripted(**SPARSE):
        prepared = await _prepared(service, Ask("What is it called?", documents=(id,)))
    assert (prepared.request.prefill, prepared.context.plan.eta_s) == ("exact", None)


async def test_modes_and_selectors_share_no_cache(service: Service) -> None:
    id = await service.upload("apart.txt", b"The seventh boat is called Crane. " * 300, collection="apart")
    ask = Ask("What is it called?", documents=(id,))
    await _read_exactly(service, id)
    salts = []
    for selector in (None, "alpha:0.02", "alpha:0.05", "alpha:0.02", None):
        with service.scripted(**{**SPARSE, "selector": selector}):
            salts.append((await _prepared(service, ask)).request.salt)
    assert len(set(salts)) == 3
    assert salts[:2] == salts[:2:-1]


async def test_documents_that_were_read_sparsely_are_found_in_the_cache(service: Service) -> None:
    id = await service.upload("again.txt", b"The eighth boat is called Avocet. " * 300, collection="again")
    await _read_exactly(service, id)
    with service.scripted(**SPARSE):
        paths = [
            (await service.ask(question, documents=[id])).json()["prefill"]["path"]
            for question in ("What is it called?", "And what is that?")
        ]
    assert paths == ["sparse", "warm"]


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


async def test_what_cannot_fit_is_refused_without_reading_all_of_it(
    service: Service, report_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    count = service.engine.count_tokens

    def count_tokens(text: str) -> int:
        counted.append(count(text))
        return counted[-1]

    def render_chat(_: list[Message]) -> list[int]:
        raise AssertionError("the whole prompt was made")

    monkeypatch.setattr(service.engine, "count_tokens", count_tokens)
    monkeypatch.setattr(service.engine, "render_chat", render_chat)
    response = await service.ask("What is this about?", documents=[report_id], mode="whole")
    assert (response.status_code, response.json()["error"]["type"]) == (400, "prompt_too_long")
    assert f"the prompt has at least {sum(counted):,} tokens" in response.json()["error"]["message"]
    assert sum(counted[:-1]) <= 8192 - 512 < sum(counted)


async def test_counts_of_another_model_refuse_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    id = await service.upload("short.txt", b"The buoy is yellow.", collection="counts")
    get = service.services.catalogue.get

    def stale(id: str) -> Document:
        return replace(get(id), tokens=1_000_000)

    monkeypatch.setattr(service.services.catalogue, "get", stale)
    body = (await service.ask("What colour is the buoy?", documents=[id], mode="whole")).json()
    assert body["context"]["mode"] == "whole"


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


async def test_questions_without_acceleration_wait_for_their_turn_and_say_so(service: Service, report_id: str) -> None:
    exact = {"documents": [report_id], "acceleration": "off"}
    with service.scripted(first_token_s=1.6):
        first = asyncio.create_task(_events(service, "Who is first?", **exact))
        while not service.engine.stats.pending:
            await asyncio.sleep(0.02)
        events = await _events(service, "Who is second?", **exact)
        await first
    progress = [data for name, data in events if name == "progress"]
    phases = [data["phase"] for data in progress]
    assert sorted(set(phases), key=phases.index) == ["queued", "prefill"]
    assert progress[0]["tokens_done"] == 0
    assert progress[0]["tokens_total"] == events[0][1]["prompt_tokens"]
    assert progress[0]["eta_s"] is None
    elapsed = [data["elapsed_s"] for data in progress]
    assert elapsed == sorted(elapsed)
    timings = events[-1][1]["timings"]
    # The engine's own time begins with the turn.
    assert timings["queue"] + timings["engine_ttft"] <= timings["ttft"]
    assert timings["queue"] > elapsed[phases.count("queued") - 1]


async def test_those_who_wait_for_their_turn_count_as_pending(service: Service, report_id: str) -> None:
    exact = {"documents": [report_id], "acceleration": "off"}
    with service.scripted(first_token_s=0.6, max_pending=3):
        answers = await asyncio.gather(*(service.ask(f"Who is number {n}?", **exact) for n in range(8)))
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200, 200, 200, *[429] * 5]
    assert service.services.pending == 0


async def test_leaving_the_queue_leaves_nothing_behind(service: Service, report_id: str) -> None:
    ask = Ask("Will you wait?", documents=(report_id,), acceleration="off")
    with service.scripted(first_token_s=30.0):
        answers = [answer(await _prepared(service, ask), service.services) for _ in range(2)]
        steps = []
        for events in answers:
            assert isinstance(await anext(events), Context)
            steps.append(asyncio.create_task(_next(events)))
            while not service.engine.stats.pending:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)
        assert service.services.pending == 2
        for step in reversed(steps):
            step.cancel()
            await asyncio.wait([step])
    assert service.services.pending == 0


@pytest.mark.parametrize("acceleration", ["auto", "off"])
async def test_closing_an_answer_aborts_it_at_once(service: Service, report_id: str, acceleration: Any) -> None:
    prepared = await _prepared(service, Ask("Will it end?", documents=(report_id,), acceleration=acceleration))
    events = answer(prepared, service.services)
    while not isinstance(await anext(events), Token):
        pass
    await events.aclose()
    assert prepared.request.id in service.engine.aborted
    assert service.services.pending == 0


async def test_a_question_keeps_the_database_off_the_event_loop(
    service: Service, report_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    transaction = service.services.catalogue._transaction

    def watched() -> Any:
        threads.add(threading.current_thread())
        return transaction()

    monkeypatch.setattr(service.services.catalogue, "_transaction", watched)
    for mode in ("retrieve", "auto"):
        await service.ask("Where is the spare key kept?", documents=[report_id], mode=mode)
    assert threads
    assert threading.current_thread() not in threads


async def test_a_question_keeps_rendering_off_the_event_loop_and_counts_its_own_tokens_once(
    service: Service, report_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    rendered: list[Sequence[Message]] = []
    render = service.engine.render_chat

    def watched(messages: Sequence[Message]) -> list[int]:
        threads.add(threading.current_thread())
        rendered.append(messages)
        return render(messages)

    monkeypatch.setattr(service.engine, "render_chat", watched)
    question = "Where is the spare key kept?"
    alone = build_messages([], question)
    # Where volumes are possible, `auto` makes two prompts for a question.
    for mode in ("retrieve", "auto"):
        rendered.clear()
        response = await service.ask(question, documents=[report_id], mode=mode, conversation="new")
        assert response.status_code == 200
        assert rendered.count(alone) == 1
    assert len(rendered) >= 3
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(("window", "longest"), [(256, 64), (1024, 256), (8192, 512)])
async def test_the_default_length_of_an_answer_leaves_room_in_a_small_window(
    service: Service, report_id: str, window: int, longest: int
) -> None:
    with service.scripted(window=window):
        response = await service.ask("Where is the key?", documents=[report_id])
    assert response.status_code == 200, response.text
    assert service.engine.requests[-1].sampling.max_tokens == longest


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


async def test_metrics_count_what_was_read_sparsely_and_what_was_not(service: Service) -> None:
    def value(name: str, **labels: str) -> float:
        return service.services.registry.get_sample_value(name, labels) or 0.0

    id = await service.upload("counted.txt", b"The ninth boat is called Dunlin. " * 40, collection="counted")
    await _read_exactly(service, id)
    names = ("foreword_kept_pages_total", "foreword_total_pages_total")
    before = [value(name) for name in names]
    with service.scripted(**SPARSE):
        prefill = (await service.ask("What is it called?", documents=[id])).json()["prefill"]
    kept, total = (value(name) - old for name, old in zip(names, before, strict=True))
    assert (kept, total) == (prefill["kept_pages"], prefill["total_pages"])
    metrics = Metrics(registry := CollectorRegistry())
    metrics.answered(Prefill(10, 0, "exact", fallback_reason="short prompt", selector_s=0.5), None, 1.0)
    metrics.answered(Prefill(10), None, 1.0)
    assert registry.get_sample_value("foreword_fallbacks_total", {"reason": "short prompt"}) == 1
    assert registry.get_sample_value("foreword_selector_seconds_total") == 0.5
    assert registry.get_sample_value("foreword_answers_total", {"path": "unknown"}) == 1


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
