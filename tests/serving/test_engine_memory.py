"""The real engine's memory: what it says is in it, what drives it out, what is held, and who waits for whom."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from serving.engine import Request, Sampling
from serving.prefix import Prefix
from serving.vllm_engine import VllmEngine
from tests.serving.small_engine import ask, close, prompt

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

# The engine says what is in its memory a moment after it has answered.
SOON_S = 1.0
LIMIT_S = 5.0


def request(tokens: list[int], salt: str, **fields: bool) -> Request:
    return Request(tokens, uuid.uuid4().hex, salt, Sampling(max_tokens=1), **fields)  # type: ignore[arg-type]


async def soon(engine: VllmEngine, prefix: Prefix, tokens: int) -> bool:
    """Whether so many tokens of a prefix are soon said to be in memory."""
    deadline = time.monotonic() + SOON_S
    while engine.resident(prefix) != tokens and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return engine.resident(prefix) == tokens


async def flood(engine: VllmEngine, seed: int = 0) -> None:
    """Read three times as much as there is room for."""
    read = 0
    while read < 3 * (engine.stats.kv_tokens or 0):
        tokens = prompt(engine, 110, seed=seed + read)[:1900]
        await engine.prefill(request(tokens, uuid.uuid4().hex))
        read += len(tokens)


@asynccontextmanager
async def held(engine: VllmEngine, tokens: list[int], salt: str) -> AsyncIterator[None]:
    hold = asyncio.create_task(engine.hold(request(tokens, salt, background=True)))
    try:
        await asyncio.sleep(0.3)
        assert not hold.done()
        yield
    finally:
        hold.cancel()
        await asyncio.wait({hold})


async def test_a_prompt_that_was_read_is_in_memory_under_its_salt(engine: VllmEngine) -> None:
    tokens = prompt(engine, 40)
    mine, other = (engine.prefix(salt, tokens) for salt in ("memory", "other"))
    assert engine.resident(mine) == 0
    await engine.prefill(request(tokens, "memory"))
    assert mine.tokens == len(tokens) // engine.limits.block * engine.limits.block
    assert await soon(engine, mine, mine.tokens)
    assert engine.resident(other) == 0


@pytest.mark.parametrize("blocks", [5, 7])
@pytest.mark.parametrize(
    ("tail", "question"),
    [
        pytest.param(0, 20, id="a document of whole pages"),
        pytest.param(1, 20, id="one token into a page"),
        pytest.param(31, 20, id="one token short of a page"),
        pytest.param(13, 90, id="a question longer than a page"),
    ],
)
async def test_what_was_read_in_steps_answers_as_what_was_read_at_once(
    engine: VllmEngine, blocks: int, tail: int, question: int
) -> None:
    block = engine.limits.block
    tokens = prompt(engine, 60, seed=blocks)
    document = tokens[: 3 * blocks * block + tail]
    asked = document + tokens[-question:]
    salt = f"steps {blocks} {tail} {question}"
    prefix = engine.prefix(salt, document)
    for end in range(blocks * block, prefix.tokens + 1, blocks * block):
        await engine.prefill(request(document[:end], salt, background=True))
    assert await soon(engine, prefix, 3 * blocks * block)
    warm = await ask(engine, asked, salt)
    cold = await ask(engine, asked)
    assert (warm.prefill.path, warm.prefill.cached_tokens) == ("warm", prefix.tokens)
    assert cold.prefill.cached_tokens == 0
    assert warm.text == cold.text
    assert close(warm, cold)


async def test_what_is_driven_out_is_said_to_be_within_a_second(engine: VllmEngine) -> None:
    tokens = prompt(engine, 40, seed=1)
    prefix = engine.prefix("driven out", tokens)
    await engine.prefill(request(tokens, "driven out"))
    assert await soon(engine, prefix, prefix.tokens)
    await flood(engine)
    assert await soon(engine, prefix, 0)


async def test_what_is_held_survives_three_times_the_memory_and_nothing_else_does(engine: VllmEngine) -> None:
    mine, other = prompt(engine, 40, seed=2), prompt(engine, 40, seed=3)
    block = engine.limits.block
    mine = mine[: len(mine) // block * block]
    prefixes = [engine.prefix("held", mine), engine.prefix("not held", other)]
    await engine.prefill(request(mine, "held"))
    await engine.prefill(request(other, "not held"))
    async with held(engine, mine, "held"):
        assert engine.stats.pending == 0
        await flood(engine, seed=100_000)
        assert await soon(engine, prefixes[0], prefixes[0].tokens)
        assert await soon(engine, prefixes[1], 0)
        answered = await ask(engine, [*mine, *other[-20:]], "held")
        assert answered.prefill.cached_tokens == prefixes[0].tokens
    await flood(engine, seed=200_000)
    assert await soon(engine, prefixes[0], 0)


async def test_background_requests_do_not_count_and_wait_for_questions(engine: VllmEngine) -> None:
    tokens = prompt(engine, 60, seed=4)
    reading = asyncio.create_task(engine.prefill(request(tokens, "background", background=True)))
    await asyncio.sleep(0.05)
    assert engine.stats.pending == 0
    await asyncio.wait_for(engine.idle(), LIMIT_S)
    question = asyncio.create_task(ask(engine, tokens, max_tokens=5))
    async with asyncio.timeout(LIMIT_S):
        while not engine.stats.pending:
            await asyncio.sleep(0.001)
    await engine.idle()
    assert question.done() or not engine.stats.pending
    await question
    await reading


async def test_a_short_question_does_not_wait_for_a_long_one(engine: VllmEngine) -> None:
    ends: list[str] = []

    async def read(name: str, tokens: list[int]) -> None:
        await engine.prefill(request(tokens, uuid.uuid4().hex))
        ends.append(name)

    long = asyncio.create_task(read("long", prompt(engine, 115, seed=5)[:2000]))
    await asyncio.sleep(0.3)
    await read("short", prompt(engine, 2, seed=6))
    await long
    assert ends == ["short", "long"]
