"""Sparse prefill in the real engine, in float32, where the same numbers give the same words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY

from serving.engine import Message
from serving.vllm_engine import VllmEngine
from tests.serving.small_engine import Answered, ask, close, prompt

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

EVERYTHING = "alpha:0,late=0,start=0"
SPARSE = "alpha:0.05,start=128,window=32"


async def test_the_engine_offers_what_a_worker_has_reported(engine: VllmEngine) -> None:
    capabilities = engine.capabilities
    assert capabilities.sparse
    assert capabilities.selector is not None
    assert capabilities.selector.startswith("alpha:0.02,")


async def test_keeping_everything_answers_as_exact(engine: VllmEngine) -> None:
    tokens = prompt(engine, 45)
    exact = await ask(engine, tokens)
    everything = await ask(engine, tokens, prefill="sparse", selector=EVERYTHING)
    assert (exact.prefill.path, exact.prefill.density) == ("exact", 1.0)
    assert (everything.prefill.path, everything.prefill.density) == ("sparse", 1.0)
    assert everything.text == exact.text
    assert close(everything, exact)


async def test_a_sparse_prompt_is_told_in_full(engine: VllmEngine) -> None:
    tokens = prompt(engine, 60)
    told = (await ask(engine, tokens, prefill="sparse", selector=SPARSE, dense_from=len(tokens) - 60)).prefill
    assert told.path == "sparse"
    assert told.kept_pages is not None
    assert told.total_pages is not None
    assert told.density == told.kept_pages / told.total_pages
    assert 0.1 < told.density < 0.9
    assert told.selector_s is not None
    assert 0 < told.selector_s < 5
    assert told.fallback_reason is None


@pytest.mark.parametrize(
    ("buoys", "selector", "reason"),
    [
        pytest.param(5, None, "short prompt", id="too short"),
        pytest.param(30, "psychic:1", "unreadable settings", id="no such rule"),
        pytest.param(30, "alpha:0.02,start=0,span=24,tile=48,group=24", "span does not divide page", id="span"),
    ],
)
async def test_what_cannot_be_sparse_is_exact_and_says_why(
    engine: VllmEngine, buoys: int, selector: str | None, reason: str
) -> None:
    tokens = prompt(engine, buoys)
    exact = await ask(engine, tokens)
    answered = await ask(engine, tokens, prefill="sparse", selector=selector)
    assert answered.prefill.path == "exact"
    assert answered.prefill.fallback_reason == reason
    assert (answered.text, answered.first) == (exact.text, exact.first)


async def test_exact_sparse_and_answers_share_steps_and_do_not_mix(engine: VllmEngine) -> None:
    first, second, third = (prompt(engine, n, seed) for n, seed in ((55, 1), (60, 2), (20, 3)))
    alone = [
        await ask(engine, first, salt="a"),
        await ask(engine, second, prefill="sparse", selector=SPARSE),
        await ask(engine, third),
    ]

    async def later(seconds: float, *args: Any, **fields: Any) -> Answered:
        await asyncio.sleep(seconds)
        return await ask(engine, *args, **fields)

    together = await asyncio.gather(
        later(0.2, first, salt="b"),
        later(0.3, second, prefill="sparse", selector=SPARSE),
        later(0.0, third),
    )
    assert [one.text for one in together] == [one.text for one in alone]
    # Steps that are shared end inside a tile, which then sees the estimate of fewer queries.
    for mine, other, tolerance in zip(together, alone, (1e-3, 0.5, 1e-3), strict=True):
        assert close(mine, other, tolerance)
    assert [one.prefill.path for one in together] == ["exact", "sparse", "exact"]
    # The blocks written beside sparse rows are those of an exact prompt.
    again = await ask(engine, first, salt="b")
    assert again.prefill.path == "warm"
    assert again.text == alone[0].text
    assert close(again, alone[0])


async def test_sparse_blocks_serve_the_next_question(engine: VllmEngine) -> None:
    tokens = prompt(engine, 60)
    cold = await ask(engine, tokens, salt="c", prefill="sparse", selector=SPARSE)
    warm = await ask(engine, tokens, salt="c", prefill="sparse", selector=SPARSE)
    assert warm.prefill.path == "warm"
    assert warm.prefill.fallback_reason is None
    assert warm.text == cold.text
    assert close(warm, cold)
    other = await ask(engine, tokens, salt="d")
    assert other.prefill.cached_tokens == 0


def preemptions() -> float:
    """Requests that vLLM has put back for want of blocks, so far."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


async def test_a_preempted_prompt_is_read_again_as_it_asked(engine: VllmEngine) -> None:
    prompts = [
        engine.render_chat([Message("user", f"Continue this list for as long as you can: {text}")])
        for text in (" ".join(f"{n}," for n in range(start, start + 300)) for start in (0, 5000))
    ]
    # They fit in together, but not with both of their answers.
    assert 101 <= sum(len(tokens) // 32 + 1 for tokens in prompts) <= 103
    fields: dict[str, Any] = {"prefill": "sparse", "selector": SPARSE, "max_tokens": 60}
    alone = [await ask(engine, tokens, **fields) for tokens in prompts]
    before = preemptions()
    together = await asyncio.gather(*(ask(engine, tokens, **fields) for tokens in prompts))
    assert preemptions() > before
    assert [one.text for one in together] == [one.text for one in alone]
    assert [one.prefill.path for one in together] == ["sparse", "sparse"]
