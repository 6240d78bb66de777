"""In the engine's own precision nothing is bitwise: what sparse prefill adds is held against what stock differs by."""

from __future__ import annotations

import asyncio
import random
import statistics
import uuid
from collections.abc import AsyncIterator

import pytest

from serving.config import EngineConfig
from serving.engine import Message, PrefillMode, Request, Sampling
from serving.vllm_engine import VllmEngine

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

EVERYTHING = "alpha:0,late=0,start=0"
# Every prompt's first token, as log-probabilities of the likeliest tokens.
Round = list[dict[int, float]]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(EngineConfig(max_model_len=2048, token_budget=512, kv_gib=1))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def prompts(engine: VllmEngine) -> list[list[int]]:
    draw = random.Random(0)
    texts = [
        " ".join(f"Buoy number {n} lies at a depth of {draw.randrange(20, 90)} metres." for n in range(buoys))
        for buoys in (20, 24, 28, 34, 40, 48, 54, 60)
    ]
    return [engine.render_chat([Message("user", f"{text} How deep is buoy number 5?")]) for text in texts]


async def arrivals(engine: VllmEngine, prompts: list[list[int]], seed: int, selector: str | None) -> Round:
    """All prompts, started in an order and with pauses that the seed decides."""
    draw = random.Random(seed)
    pauses = [draw.uniform(0, 2) for _ in prompts]

    async def first(tokens: list[int], pause: float) -> dict[int, float]:
        await asyncio.sleep(pause)
        id = uuid.uuid4().hex
        sampling = Sampling(max_tokens=4, logprobs=20)
        mode: PrefillMode = "sparse" if selector else "exact"
        request = Request(tokens, id, id, sampling, prefill=mode, selector=selector, dense_from=len(tokens) - 20)
        deltas = [delta async for delta in engine.generate(request)]
        prefill, logprobs = deltas[0].prefill, deltas[0].logprobs
        assert prefill is not None
        assert prefill.path == mode
        assert logprobs
        return dict(logprobs[0])

    return list(await asyncio.gather(*map(first, prompts, pauses)))


def differences(left: Round, right: Round) -> list[float]:
    """Of each prompt, the mean difference of the log-probabilities that both sides name."""
    common = [one.keys() & other.keys() for one, other in zip(left, right, strict=True)]
    assert all(len(tokens) >= 10 for tokens in common)
    return [
        statistics.mean(abs(one[token] - other[token]) for token in tokens)
        for one, other, tokens in zip(left, right, common, strict=True)
    ]


async def test_keeping_everything_differs_from_stock_as_stock_does_from_itself(engine: VllmEngine) -> None:
    texts, seeds = prompts(engine), range(4)
    rounds = [
        [await arrivals(engine, texts, seed, selector) for selector in (None, EVERYTHING, None)] for seed in seeds
    ]
    # Between rounds the steps are cut and shared in other ways, which is what moves stock's own numbers.
    stock = [one for first, _, second in rounds for one in (first, second)]
    own = [
        difference
        for number, left in enumerate(stock)
        for right in stock[number + 1 :]
        for difference in differences(left, right)
    ]
    ours = [
        difference
        for first, kept, second in rounds
        for exact in (first, second)
        for difference in differences(kept, exact)
    ]
    assert max(ours) <= max(own)
    assert statistics.mean(ours) <= statistics.mean(own)
