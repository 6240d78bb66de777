"""One contract for every engine that runs without weights: what holds for one holds for the supervised one, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine import Delta, Engine, Message, Progress, Request, Role, Sampling
from serving.errors import EngineDied, EngineUnavailable, Overloaded, PromptTooLong
from serving.scripted_engine import Script, ScriptedEngine
from serving.supervisor import RestartPolicy, SupervisedEngine

LIMIT_S = 10.0
LONG_S = 30.0
# A dead engine is not replaced within a test, so both engines show the same state after a death.
SLOW_TO_RESTART = RestartPolicy(first_wait_s=LONG_S, longest_wait_s=LONG_S, poll_s=0.01)


@dataclass
class Subject:
    """The engine under test, seen through the contract, and the scripted one that does its work."""

    engine: Engine
    inner: ScriptedEngine


Make = Callable[[Script], Subject]


def _plain(script: Script) -> Subject:
    engine = ScriptedEngine(script)
    return Subject(engine, engine)


def _supervised(script: Script) -> Subject:
    inner = ScriptedEngine(script)
    return Subject(SupervisedEngine(lambda: inner, SLOW_TO_RESTART), inner)


@pytest.fixture(params=[_plain, _supervised], ids=["scripted", "supervised"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes engines of one kind, not yet started, and stops them at the end."""
    made: list[Subject] = []

    def make_one(script: Script) -> Subject:
        made.append(request.param(script))
        return made[-1]

    yield make_one
    for subject in made:
        await subject.engine.stop()


def _request(id: str = "r", length: int = 50, salt: str = "s", max_tokens: int = 20) -> Request:
    return Request(range(length), id, salt, Sampling(max_tokens=max_tokens))


async def _collect(stream: AsyncIterator[Delta]) -> list[Delta]:
    async with asyncio.timeout(LIMIT_S):
        return [delta async for delta in stream]


async def _until_pending(engine: Engine, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while engine.stats.pending != count:
            await asyncio.sleep(0)


async def test_a_stream_is_whole_and_says_once_how_the_prompt_was_read(make: Make) -> None:
    engine = make(Script(answer=("a", "b", "c"))).engine
    await engine.start()
    deltas = await _collect(engine.generate(_request()))
    assert "".join(delta.text for delta in deltas) == "abc"
    assert [delta.prefill is not None for delta in deltas] == [True, False, False]
    assert [delta.queue is not None for delta in deltas] == [True, False, False]
    assert [delta.finish_reason is not None for delta in deltas] == [False, False, True]
    assert [delta.tokens for delta in deltas] == [1, 2, 3]
    assert engine.stats.pending == 0


async def test_the_plan_before_is_the_prefill_after(make: Make) -> None:
    engine = make(Script()).engine
    await engine.start()
    # Cold, repeated, longer, of another salt, and shorter than what was read.
    requests = [_request(length=n, salt=s) for n, s in ((50, "s"), (50, "s"), (90, "s"), (90, "t"), (20, "s"))]
    cached = []
    for request in requests:
        plan = engine.plan(request)
        prefill = await engine.prefill(request)
        assert prefill.cached_tokens is not None
        assert plan.path == prefill.path
        assert plan.tokens_to_compute == prefill.prompt_tokens - prefill.cached_tokens
        cached.append(prefill.cached_tokens)
    # Whole blocks of sixteen tokens.
    assert cached == [0, 48, 48, 0, 16]


async def test_closing_the_stream_ends_the_request_at_once(make: Make) -> None:
    subject = make(Script(answer=("a", "b"), gap_s=LONG_S))
    await subject.engine.start()
    stream = subject.engine.generate(_request("left"))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (subject.inner.aborted, subject.engine.stats.pending) == (["left"], 0)


async def test_a_cancelled_reader_ends_the_request_in_its_prefill(make: Make) -> None:
    subject = make(Script(first_token_s=LONG_S))
    await subject.engine.start()
    task = asyncio.create_task(_collect(subject.engine.generate(_request("left"))))
    await _until_pending(subject.engine, 1)
    assert await subject.engine.progress("left") == Progress(started=True, done=0, total=50)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (subject.inner.aborted, subject.engine.stats.pending) == (["left"], 0)
    assert await subject.engine.progress("left") is None


async def test_too_many_are_refused_and_the_others_go_on(make: Make) -> None:
    engine = make(Script(first_token_s=0.05, max_pending=2)).engine
    await engine.start()
    tasks = [asyncio.create_task(_collect(engine.generate(_request(f"r{n}")))) for n in range(2)]
    await _until_pending(engine, engine.limits.max_pending)
    with pytest.raises(Overloaded):
        await _collect(engine.generate(_request("one too many")))
    assert all(await asyncio.gather(*tasks))


async def test_prompt_and_answer_must_fit_the_window(make: Make) -> None:
    engine = make(Script(window=64)).engine
    await engine.start()
    assert await _collect(engine.generate(_request(length=44, max_tokens=20)))
    for act in (_collect(engine.generate(_request(length=45, max_tokens=20))), engine.prefill(_request(length=45))):
        with pytest.raises(PromptTooLong) as caught:
            await act
        assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.window) == (45, 20, 64)


async def test_requests_are_taken_between_start_and_stop_only(make: Make) -> None:
    engine = make(Script()).engine
    for _ in range(2):
        assert engine.state.phase == "stopped"
        for act in (_collect(engine.generate(_request())), engine.prefill(_request())):
            with pytest.raises(EngineUnavailable, match="stopped"):
                await act
        await engine.start()
        assert engine.state.ready
        assert await _collect(engine.generate(_request()))
        await engine.stop()
        await engine.stop()


@pytest.mark.parametrize("gap_s", [0.0, LONG_S], ids=["no gap", "long gap"])
async def test_a_death_ends_the_stream_with_an_error(make: Make, gap_s: float) -> None:
    subject = make(Script(answer=("a", "b"), gap_s=gap_s))
    await subject.engine.start()
    stream = subject.engine.generate(_request())
    assert (await anext(stream)).text == "a"
    subject.inner.die()
    assert not subject.engine.state.ready
    with pytest.raises(EngineDied):
        await anext(stream)
    with pytest.raises(EngineUnavailable):
        await _collect(subject.engine.generate(_request()))
    assert subject.inner.aborted == []


async def test_a_death_ends_a_prefill_with_an_error(make: Make) -> None:
    subject = make(Script(seconds_per_token=LONG_S))
    await subject.engine.start()
    task = asyncio.create_task(subject.engine.prefill(_request()))
    await asyncio.sleep(0)
    subject.inner.die()
    with pytest.raises(EngineDied):
        await task


async def test_estimates_and_tokens_need_no_running_engine(make: Make) -> None:
    engine = make(Script()).engine
    plan = engine.plan(_request())
    assert (plan.path, plan.tokens_to_compute, plan.eta_s) == ("exact", 50, None)
    assert engine.count_tokens("a b") == 3
    assert engine.render_chat([Message("user", "Why?")])
    assert engine.limits.window == 8192
    assert await engine.progress("unknown") is None


_roles: st.SearchStrategy[Role] = st.sampled_from(("system", "user", "assistant"))


@given(st.lists(st.builds(Message, _roles, st.text(max_size=40)), max_size=4))
def test_a_rendered_chat_can_be_read_again(messages: list[Message]) -> None:
    engine = ScriptedEngine()
    prompt = engine.render_chat(messages)
    text = "".join(f"[{message.role}]\n{message.content}\n" for message in messages)
    # A last message of the assistant is the beginning of its answer, so it is left open.
    text = text[:-1] if messages and messages[-1].role == "assistant" else text + "[assistant]\n"
    assert engine.decode(prompt) == text
    assert len(prompt) == engine.count_tokens(text)
