"""Everyday cases with an engine that reads perfectly, and with ones that fail in a known way."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from eval.arms import Arm, Variant, parse_arms
from eval.cases import requests_of, run_cases
from eval.errors import BadUsage
from eval.findings import Case
from eval.results import Results
from eval.serve import EngineServer, OpenServer
from eval.served import Served, Server
from serving.engine import Message
from serving.errors import StartError
from serving.scripted_engine import Script, ScriptedEngine
from tests.eval.reading_engine import ReadingEngine, opener

NAMES = ["short question", "summary", "near the limit", "conversation", "at once"]
TURNS = 8


async def run(
    arms: str, results: Results, open_server: OpenServer | None = None, script: Script | None = None, **changes: Any
) -> dict[tuple[str, str], Case]:
    settings = {"repeats": 1, "longest": 1500, "turns": TURNS, "step": lambda: None, **changes}
    open_server = open_server or opener(script or Script())
    cases = await run_cases(parse_arms(arms), open_server, seed=0, results=results, **settings)
    return {(case.name, case.arm): case for case in cases}


class Altered(EngineServer):
    """Changes what came of a request."""

    def __init__(self, engine: ScriptedEngine, change: Callable[[Sequence[Message], Served], Served]) -> None:
        super().__init__(engine)
        self._change = change

    async def serve(self, messages: Sequence[Message], arm: Arm, **how: Any) -> Served:
        return self._change(messages, await super().serve(messages, arm, **how))


def altering(change: Callable[[Sequence[Message], Served], Served]) -> OpenServer:
    @contextlib.asynccontextmanager
    async def open_server(_: Variant) -> AsyncIterator[Server]:
        engine = ReadingEngine(Script())
        await engine.start()
        yield Altered(engine, change)

    return open_server


async def test_every_case_passes_with_a_perfect_reader(results: Results, lines: io.StringIO) -> None:
    steps: list[None] = []
    cases = await run("exact,warm", results, repeats=2, step=lambda: steps.append(None))
    assert list(cases) == [(name, arm) for name in NAMES for arm in ("exact", "warm")]
    sizes = {"short question": 2, "summary": 2, "near the limit": 4, "conversation": 2 * TURNS, "at once": 8}
    for (name, _), case in cases.items():
        assert (case.n, case.passed, case.faults) == (sizes[name], sizes[name], ())
        assert case.ttft is not None
    assert len(steps) == requests_of(2, repeats=2, at_once=4, turns=TURNS) == sum(case.n for case in cases.values())
    assert cases["near the limit", "exact"].recalled == cases["at once", "exact"].recalled == 1
    assert cases["summary", "exact"].recalled is None
    # What continues no answer finds nothing to read on from.
    assert cases["conversation", "exact"].recalled == 0
    engine, *sent = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert engine["kind"] == "engine"
    assert {line["kind"] for line in sent} == {"case"}
    assert [line["arm"] for line in sent[:4]] == ["exact", "warm", "warm", "exact"]


async def test_prompts_have_the_lengths_that_they_should(results: Results) -> None:
    engines: list[ReadingEngine] = []
    cases = await run("exact", results, opener(Script(), engines), longest=None)
    lengths = {name: cases[name, "exact"].prompt_tokens for name in NAMES}
    assert 150 < (lengths["short question"] or 0) <= 300
    assert 3800 < (lengths["summary"] or 0) <= 4000
    assert 8000 < (lengths["near the limit"] or 0) <= 8192 - 16
    assert 3900 < (lengths["at once"] or 0) <= (8192 - 16) // 2
    [engine] = engines
    near = next(text for text in map(engine.decode, [one.prompt for one in engine.requests]) if "north gate" in text)
    assert near.index("The access code of the north gate is") < near.index("[page 1]") + 20
    salts = [one.salt for one in engine.requests]
    assert sorted(map(salts.count, set(salts))) == [1, 1, 1, 1, 1, 1, 1, TURNS]


async def test_a_conversation_recalls_what_it_was_told(results: Results) -> None:
    def recall(messages: Sequence[Message], served: Served) -> Served:
        told = [message.content for message in messages if "locker number is" in message.content]
        return replace(served, text=told[0]) if "my locker number?" in messages[-1].content else served

    cases = await run("exact", results, altering(recall))
    assert cases["conversation", "exact"].recalled == pytest.approx(1 / 3)


async def test_a_turn_begins_with_all_of_the_turn_before(results: Results) -> None:
    engines: list[ReadingEngine] = []
    await run("exact", results, opener(Script(), engines))
    [engine] = engines
    texts = [engine.decode(one.prompt) for one in engine.requests]
    talk = [text for text in texts if "Please remember: my locker" in text]
    assert len(talk) == TURNS
    for before, after in itertools.pairwise(talk):
        assert after.startswith(before)
    assert all(text.count("<document id") == 1 for text in talk)


@pytest.mark.parametrize(
    ("change", "name", "told"),
    [
        pytest.param(
            lambda _, served: replace(served, prompt_tokens=(served.prompt_tokens or 0) // 2),
            "summary",
            "the prompt was cut: ",
            id="cut",
        ),
        pytest.param(lambda _, served: replace(served, text=" "), "summary", "the answer is empty", id="empty"),
        pytest.param(
            lambda _, served: replace(served, finish_reason=None), "summary", "did not come to an end", id="no end"
        ),
        pytest.param(
            lambda _, served: replace(served, error=None), "near the limit", "answered instead of refused", id="over"
        ),
        pytest.param(
            lambda _, served: replace(served, error=served.error and "EngineDied: gone"),
            "near the limit",
            "EngineDied: gone",
            id="refused for another reason",
        ),
        pytest.param(
            lambda _, served: replace(served, cached_tokens=0), "conversation", "were computed again", id="read again"
        ),
    ],
)
async def test_faults_are_told(
    change: Callable[[Sequence[Message], Served], Served], name: str, told: str, results: Results
) -> None:
    case = (await run("exact", results, altering(change)))[name, "exact"]
    assert case.passed < case.n
    assert told in case.faults[0]


async def test_answers_that_are_mixed_up_are_told(results: Results) -> None:
    codes: list[str] = []

    def mix(messages: Sequence[Message], served: Served) -> Served:
        if messages[-1].content != "The access code of the amber gate is":
            return served
        codes.append(served.text)
        return replace(served, text=codes[0])

    case = (await run("exact", results, altering(mix)))["at once", "exact"]
    assert (case.n, case.passed, case.recalled) == (4, 1, 0.25)
    assert "which only another prompt has" in case.faults[0]


async def test_long_prompts_are_in_work_together(results: Results) -> None:
    most = 0
    in_work: set[str] = set()

    class Counting(ReadingEngine):
        async def generate(self, request: Any) -> AsyncIterator[Any]:
            nonlocal most
            in_work.add(request.id)
            most = max(most, len(in_work))
            try:
                async for delta in super().generate(request):
                    yield delta
            finally:
                in_work.discard(request.id)

    @contextlib.asynccontextmanager
    async def open_server(_: Variant) -> AsyncIterator[Server]:
        engine = Counting(Script(first_token_s=0.01))
        await engine.start()
        yield EngineServer(engine)

    await run("exact", results, open_server, at_once=6)
    assert most == 6


async def test_what_takes_too_long_has_failed(results: Results) -> None:
    cases = await run("exact", results, script=Script(first_token_s=0.2), limit_s=0.02)
    assert cases["at once", "exact"].faults == ("no answer within 0.02 s",)
    # A conversation ends with the turn that was not answered.
    assert (cases["conversation", "exact"].n, cases["conversation", "exact"].passed) == (1, 0)


class Foreign:
    """A server with a larger window, or one that cuts, and that tells as little as servers do."""

    def __init__(self, keeps: float, error: str | None) -> None:
        self._keeps = keeps
        self._error = error
        self._counts = EngineServer(ScriptedEngine())

    @property
    def about(self) -> dict[str, Any]:
        return {"model": "foreign"}

    def require(self, arm: Arm) -> None: ...

    async def serve(self, messages: Sequence[Message], arm: Arm, **_: Any) -> Served:
        await asyncio.sleep(0)
        tokens = self._counts.count(messages)
        if self._error and tokens > 8192:
            return Served(error=self._error)
        return Served(prompt_tokens=round(self._keeps * tokens), ttft=0.1, text="47", finish_reason="stop")


@pytest.mark.parametrize(
    ("keeps", "error", "fault"),
    [
        pytest.param(1.0, "400: too long", None, id="refuses"),
        pytest.param(1.0, None, None, id="takes it whole"),
        pytest.param(0.5, None, "the prompt was cut", id="cuts"),
        pytest.param(1.0, "no answer within 9 s", "no answer within 9 s", id="hangs"),
    ],
)
async def test_a_foreign_server_must_not_cut(
    keeps: float, error: str | None, fault: str | None, results: Results
) -> None:
    works = opener(Script())

    @contextlib.asynccontextmanager
    async def open_server(variant: Variant) -> AsyncIterator[Server]:
        if variant.url is not None:
            yield Foreign(keeps, error)
        else:
            async with works(variant) as server:
                yield server

    cases = await run("exact,exact+url=http://127.0.0.1:9", results, open_server)
    near = cases["near the limit", "exact+url=http://127.0.0.1:9"]
    assert near.n == 2
    assert (near.faults == ()) if fault is None else near.faults[0].startswith(fault)
    assert cases["conversation", "exact+url=http://127.0.0.1:9"].faults == ()


async def test_an_engine_that_does_not_start_costs_only_its_own_arms(results: Results) -> None:
    works = opener(Script())

    def open_server(variant: Variant) -> contextlib.AbstractAsyncContextManager[Server]:
        if variant.kv is not None:
            raise StartError("there is no fp8 here")
        return works(variant)

    cases = await run("exact,exact+kv=fp8", results, open_server)
    assert all(cases[name, "exact"].passed for name in NAMES)
    missing = cases["summary", "exact+kv=fp8"]
    assert (missing.n, missing.ttft, missing.faults) == (0, None, ("not measured, there is no fp8 here",))


async def test_what_cannot_be_run_is_refused(results: Results) -> None:
    with pytest.raises(BadUsage, match=r"the case 'short' cannot be made: .* does not fit 44 tokens"):
        await run("exact", results, longest=60)
    with pytest.raises(BadUsage, match="a conversation of 5 turns cannot tell and ask 3 facts; use 6 or more"):
        await run("exact", results, turns=5)
