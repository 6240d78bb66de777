"""Settings of the property tests, and a small real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import settings

from serving.config import EngineConfig
from serving.vllm_engine import VllmEngine

# The same examples in every run, and no failures on a machine that is merely slow.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")


# An engine that stops ends all engine processes below this one, so two of them must not overlap.
@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    """The default model in float32, where the same numbers give the same words, started once for a file."""
    # Little room for blocks, so that two long prompts cannot both go on for long.
    arguments = {"dtype": "float32", "num_gpu_blocks_override": 104}
    config = EngineConfig(max_model_len=2048, token_budget=256, kv_gib=1, engine_args=arguments)
    engine = VllmEngine(config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
