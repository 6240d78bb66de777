"""What a GPU's engine says of the host's memory is what it finds there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.config import EngineConfig
from serving.engine import Request
from serving.errors import ServingError
from serving.vllm_engine import VllmEngine
from tests.serving.small_engine import ask, close, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore"),
]

_PATIENCE_S = 20


async def _clear(engine: VllmEngine) -> None:
    """Give up the card's memory once nothing is on its way to the host's."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await engine.clear_memory()
        except ServingError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)


async def test_what_the_hosts_memory_holds_is_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So small a model computes sooner than it loads.
    monkeypatch.setattr("serving.vllm_engine._HOST_LOAD_S", 0.0)
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "num_gpu_blocks_override": 400,
        "gpu_memory_utilization": 0.05,
        "enforce_eager": True,
    }
    config = EngineConfig(max_model_len=2048, kv_disk=tmp_path, kv_memory_gib=1, engine_args=arguments)
    engine = VllmEngine(config)
    await engine.start()
    try:
        document = prompt(engine, 120)
        plan = Request(document, "plan", "document")
        cold = await ask(engine, document, salt="document", keep=True)
        await _clear(engine)
        until = time.monotonic() + _PATIENCE_S
        while engine.resident(engine.prefix("document", document)) or engine.plan(plan).path != "warm":
            assert time.monotonic() < until, engine.plan(plan)
            await asyncio.sleep(0.1)
        expected = len(document) - engine.plan(plan).tokens_to_compute
        loaded = await ask(engine, document, salt="document")
        assert loaded.prefill.cached_tokens == expected > 1000
        assert close(loaded, cold, 0.25)
    finally:
        await engine.stop()
