"""The real engine with the CUDA backend: prompts that are put back or given up in the middle, beside others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from serving.config import EngineConfig
from serving.engine import Message
from serving.vllm_engine import VllmEngine
from tests.serving.small_engine import Answered, ask, close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore"),
]

SPARSE: dict[str, Any] = {"prefill": "sparse", "selector": "alpha:0.05,start=128,window=32"}
PAGES = 3600 // 16
# bfloat16 in steps that others share.
TOLERANCE = 0.25


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    """The default model in bfloat16, with room for two long prompts and not for both of their answers."""
    arguments = {
        "dtype": "bfloat16",
        "block_size": 16,
        "num_gpu_blocks_override": PAGES,
        "gpu_memory_utilization": 0.05,
        "enforce_eager": True,
    }
    engine = VllmEngine(EngineConfig(max_model_len=2048, token_budget=512, engine_args=arguments))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def numbers(engine: VllmEngine, start: int, tokens: int) -> list[int]:
    """A prompt of about so many tokens that is best continued for a long time."""
    listed = ""
    while len(prompt := engine.render_chat([Message("user", f"Continue this list: {listed}")])) < tokens:
        listed += "".join(f"{n}, " for n in range(start, start + 8))
        start += 8
    return prompt


def preemptions() -> float:
    """Requests that vLLM has put back for want of blocks, so far."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


async def test_preempted_prompts_are_read_again_as_they_asked(engine: VllmEngine) -> None:
    prompts = [numbers(engine, start, 1740) for start in (100, 5000)]
    alone = [await ask(engine, prompt, max_tokens=120, **SPARSE) for prompt in prompts]
    before = preemptions()
    together = await asyncio.gather(*(ask(engine, prompt, max_tokens=120, **SPARSE) for prompt in prompts))
    assert preemptions() > before
    for mine, other in zip(together, alone, strict=True):
        assert (mine.prefill.path, mine.prefill.fallback_reason) == ("sparse", None)
        assert mine.prefill.density == pytest.approx(other.prefill.density, abs=0.1)
        assert close(mine, other, TOLERANCE)
        # Whether the words go on alike is decided by the last bits; that they go on as a list does not.
        assert len(mine.text) > 50


async def test_a_prompt_that_is_given_up_leaves_nothing_behind(engine: VllmEngine) -> None:
    kept, dropped = numbers(engine, 100, 1500), numbers(engine, 7000, 1900)
    alone = await ask(engine, kept, **SPARSE)
    for wait in (0.0, 0.005, 0.02, 0.05):

        async def give_up(wait: float = wait) -> Answered | None:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(ask(engine, dropped, **SPARSE), wait)
            return None

        together, _ = await asyncio.gather(ask(engine, kept, **SPARSE), give_up())
        assert together.prefill.path == "sparse"
        assert close(together, alone, TOLERANCE)
    again = await ask(engine, kept, **SPARSE)
    # Nobody shares its steps now: the same numbers to the last bit, whatever was broken off in the meantime.
    assert (again.text, again.first) == (alone.text, alone.first)
    assert engine.stats.pending == 0


async def test_warm_exact_and_sparse_prompts_share_steps(engine: VllmEngine) -> None:
    document, other = numbers(engine, 100, 1500), numbers(engine, 9000, 1200)
    exact = await ask(engine, document, salt="document")
    warm, sparse = await asyncio.gather(ask(engine, document, salt="document"), ask(engine, other, **SPARSE))
    assert (warm.prefill.path, sparse.prefill.path) == ("warm", "sparse")
    assert close(warm, exact, TOLERANCE)
