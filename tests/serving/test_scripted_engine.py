"""The scripted engine keeps the engine contract, so that tests of the application say something about real ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from serving.engine import Delta, Engine, Message, Plan, Progress, Request, Sampling
from serving.errors import EngineDied, EngineUnavailable, Overloaded, PromptTooLong
from serving.scripted_engine import Script, ScriptedEngine

LONG_S = 30.0


async def started(script: Script | None = None) -> ScriptedEngine:
    engine = ScriptedEngine(script or Script())
    await engine.start()
    return engine


def request(id: str = "r", length: int = 40, salt: str = "s", max_tokens: int = 20) -> Request:
    return Request(list(range(length)), id, salt, Sampling(max_tokens=max_tokens))


async def collect(stream: AsyncIterator[Delta]) -> list[Delta]:
    async with asyncio.timeout(LIMIT_S):
        return [delta async for delta in stream]


LIMIT_S = 10.0


async def until_pending(engine: ScriptedEngine, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while engine.stats.pending != count:
            await asyncio.sleep(0)


async def test_it_is_an_engine() -> None:
    engine: Engine = await started()
    assert engine.state.ready
    assert engine.limits.window == 8192
    assert engine.capabilities.model == "scripted"


async def test_streams_the_script() -> None:
    engine = await started(Script(answer=("One ", "two ", "three.")))
    deltas = await collect(engine.generate(request()))
    assert [delta.text for delta in deltas] == ["One ", "two ", "three."]
    assert [delta.tokens for delta in deltas] == [1, 2, 3]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]
    # How the prompt was read comes with the first piece, and only with it.
    first, *others = deltas
    assert first.prefill is not None
    assert (first.prefill.prompt_tokens, first.prefill.cached_tokens, first.prefill.path) == (40, 0, "exact")
    assert first.queue == 0.0
    assert all(delta.prefill is None and delta.queue is None for delta in others)
    assert engine.aborted == []
    assert engine.requests == [request()]


async def test_enqueued_answers_come_first() -> None:
    engine = await started(Script(answer=("script",)))
    engine.enqueue("first")
    engine.enqueue("sec", "ond")
    answers = ["".join(d.text for d in await collect(engine.generate(request()))) for _ in range(3)]
    assert answers == ["first", "second", "script"]


async def test_length_of_the_answer_is_kept() -> None:
    engine = await started()
    # The script has three pieces, each of which counts as a token.
    for max_tokens, reason in ((2, "length"), (3, "stop"), (4, "stop")):
        deltas = await collect(engine.generate(request(max_tokens=max_tokens)))
        assert len(deltas) == min(max_tokens, 3)
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [reason]


async def test_delays() -> None:
    engine = await started(Script(answer=("a", "b"), first_token_s=0.05, gap_s=0.05, seconds_per_token=0.001))
    begun = time.monotonic()
    stream = engine.generate(request(length=50))
    await anext(stream)
    assert time.monotonic() - begun >= 0.095
    await anext(stream)
    assert time.monotonic() - begun >= 0.145
    await stream.aclose()  # type: ignore[attr-defined]


# --- the cache ---


async def test_a_repeated_prompt_is_cached() -> None:
    engine = await started()
    paths = []
    for _ in range(2):
        first, *_ = await collect(engine.generate(request(length=40)))
        assert first.prefill is not None
        paths.append((first.prefill.cached_tokens, first.prefill.path))
    # Whole blocks of 16, never the last token.
    assert paths == [(0, "exact"), (32, "warm")]


async def test_salts_separate_caches() -> None:
    engine = await started()
    await engine.prefill(request(salt="one"))
    assert (await engine.prefill(request(salt="one"))).cached_tokens == 32
    assert (await engine.prefill(request(salt="two"))).cached_tokens == 0


async def test_plan_learns_what_is_cached_and_how_fast_it_reads() -> None:
    engine = await started(Script(seconds_per_token=0.001))
    assert engine.plan(request()) == Plan("exact", 40, None)
    await collect(engine.generate(request()))
    again = engine.plan(request())
    assert (again.path, again.tokens_to_compute) == ("warm", 8)
    assert again.eta_s is not None
    fresh = engine.plan(request(salt="other"))
    assert (fresh.path, fresh.tokens_to_compute) == ("exact", 40)
    assert fresh.eta_s == pytest.approx(0.04, rel=0.05)


async def test_sparse_prefill_reads_less_and_takes_less() -> None:
    engine = await started(Script(seconds_per_token=0.001, selector="alpha:0.02", density=0.25))
    assert (engine.capabilities.sparse, engine.capabilities.selector) == (True, "alpha:0.02")
    exact = await engine.prefill(request(length=64))
    assert (exact.path, exact.density, exact.kept_pages, exact.total_pages) == ("exact", 1.0, 4, 4)
    await collect(engine.generate(request(length=64, salt="timed")))
    asked = replace(request(length=64, salt="sparse"), prefill="sparse")
    plan = engine.plan(asked)
    assert plan.path == "sparse"
    assert plan.eta_s == pytest.approx(0.016, rel=0.2)
    sparse = await engine.prefill(asked)
    assert (sparse.path, sparse.density, sparse.kept_pages, sparse.total_pages) == ("sparse", 0.25, 1, 4)
    assert (await engine.prefill(asked)).path == "warm"


@pytest.mark.parametrize(
    ("selector", "reason"), [(None, None), ("alpha:0.02", "short prompt")], ids=["not offered", "a fallback"]
)
async def test_what_cannot_be_read_sparsely_is_read_exactly(selector: str | None, reason: str | None) -> None:
    engine = await started(Script(selector=selector, fallback_reason=reason))
    asked = replace(request(), prefill="sparse")
    assert engine.plan(asked).path == "exact"
    prefill = await engine.prefill(asked)
    assert (prefill.path, prefill.density, prefill.fallback_reason) == ("exact", 1.0, reason)
    assert (await engine.prefill(request(salt="other"))).fallback_reason is None


async def test_prefill_gives_no_text_but_fills_the_cache() -> None:
    engine = await started()
    prefill = await engine.prefill(request())
    assert (prefill.prompt_tokens, prefill.cached_tokens) == (40, 0)
    first, *_ = await collect(engine.generate(request()))
    assert first.prefill is not None
    assert first.prefill.cached_tokens == 32


# --- aborts ---


async def test_closing_the_stream_is_an_abort() -> None:
    engine = await started()
    stream = engine.generate(request("left"))
    await anext(stream)
    assert engine.stats.pending == 1
    await stream.aclose()  # type: ignore[attr-defined]
    assert engine.aborted == ["left"]
    assert engine.stats.pending == 0


async def test_cancelling_the_reader_is_an_abort_even_before_the_first_text() -> None:
    engine = await started(Script(first_token_s=LONG_S))
    task = asyncio.create_task(collect(engine.generate(request("left"))))
    await until_pending(engine, 1)
    assert await engine.progress("left") == Progress(True, 0, 40)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == ["left"]
    assert await engine.progress("left") is None
    # What was never read is not cached.
    assert engine.plan(request()).tokens_to_compute == 40


# --- refusals ---


async def test_overload() -> None:
    engine = await started(Script(first_token_s=LONG_S, max_pending=2))
    tasks = [asyncio.create_task(collect(engine.generate(request(f"r{n}")))) for n in range(2)]
    await until_pending(engine, 2)
    with pytest.raises(Overloaded, match="2 requests wait already; try again"):
        await collect(engine.generate(request("one too many")))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until_pending(engine, 0)
    assert len(engine.requests) == 2


@pytest.mark.parametrize(("length", "max_tokens", "fits"), [(90, 10, True), (91, 10, False), (1, 100, False)])
async def test_window(length: int, max_tokens: int, fits: bool) -> None:
    engine = await started(Script(window=100))
    one = request(length=length, max_tokens=max_tokens)
    if fits:
        assert await collect(engine.generate(one))
        return
    for act in (collect(engine.generate(one)), engine.prefill(one)):
        with pytest.raises(PromptTooLong) as caught:
            await act
        assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.window) == (length, max_tokens, 100)
    assert engine.requests == []


async def test_only_a_started_engine_takes_requests() -> None:
    engine = ScriptedEngine()
    for _ in range(2):
        assert not engine.state.ready
        with pytest.raises(EngineUnavailable, match="stopped"):
            await collect(engine.generate(request()))
        await engine.start()
        assert await collect(engine.generate(request()))
        await engine.stop()
        await engine.stop()


# --- death ---


async def test_death_ends_what_runs_and_refuses_what_comes() -> None:
    engine = await started(Script(first_token_s=LONG_S))
    task = asyncio.create_task(collect(engine.generate(request())))
    await until_pending(engine, 1)
    engine.die()
    with pytest.raises(EngineDied, match="ask again"):
        await task
    assert (engine.state.phase, engine.state.reason) == ("down", "killed by the script")
    with pytest.raises(EngineUnavailable):
        await collect(engine.generate(request()))
    # A death is no abort.
    assert engine.aborted == []


async def test_death_between_two_pieces() -> None:
    engine = await started(Script(answer=("a", "b"), gap_s=LONG_S))
    stream = engine.generate(request())
    assert (await anext(stream)).text == "a"
    engine.die()
    with pytest.raises(EngineDied):
        await anext(stream)


# --- tokens ---


async def test_render_and_decode() -> None:
    engine = await started()
    messages = [Message("system", "Be brief."), Message("user", "Why  not? 春天")]
    prompt = engine.render_chat(messages)
    assert engine.decode(prompt) == "[system]\nBe brief.\n[user]\nWhy  not? 春天\n[assistant]\n"
    assert engine.render_chat(messages) == prompt
    assert len(prompt) == engine.count_tokens(engine.decode(prompt))


async def test_prompts_of_one_beginning_share_their_first_tokens() -> None:
    engine = await started()
    one = engine.render_chat([Message("user", "The same document. Why?")])
    two = engine.render_chat([Message("user", "The same document. When?")])
    shared = engine.count_tokens("[user]\nThe same document. ")
    assert one[:shared] == two[:shared]


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 0), ("a", 1), ("a b", 3), ("abcdefg", 2), ("a, b.", 5), ("  \n ", 1)]
)
def test_count(text: str, tokens: int) -> None:
    assert ScriptedEngine().count_tokens(text) == tokens
