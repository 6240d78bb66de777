"""The parts of the vLLM adapter that need no vLLM: sizes, bookkeeping, refusals, ending processes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import vllm_engine
from serving.config import EngineConfig
from serving.engine import Request
from serving.errors import EngineMissing, EngineUnavailable, StartError
from serving.model import ModelFolder
from serving.vllm_engine import VllmEngine

GIB = 2**30
SMOLLM2 = ModelFolder(
    "x",
    "x",
    {
        "hidden_size": 576,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
    },
)
ON_HUB = ModelFolder("a/b", "a/b", {})


@pytest.mark.parametrize(
    ("folder", "max_model_len", "free_gib", "size"),
    [
        # Sixteen windows of 8,192 tokens of 23,040 bytes are 2.8 GiB.
        pytest.param(SMOLLM2, None, 100, 3, id="what sixteen windows need"),
        pytest.param(SMOLLM2, 4096, 100, 2, id="a shorter window needs less"),
        pytest.param(SMOLLM2, 8, 100, 1, id="never less than one"),
        pytest.param(SMOLLM2, None, 8, 2, id="a quarter of what is free"),
        pytest.param(SMOLLM2, None, 2, 1, id="one even when there is little"),
        pytest.param(SMOLLM2, None, 0, 1, id="one even when there is nothing"),
        pytest.param(ON_HUB, None, 40, 10, id="unknown model"),
        pytest.param(ON_HUB, 4096, 40, 10, id="unknown size of a token"),
        pytest.param(ON_HUB, None, 1, 1, id="unknown model and little memory"),
    ],
)
def test_kv_gib(
    monkeypatch: pytest.MonkeyPatch, folder: ModelFolder, max_model_len: int | None, free_gib: int, size: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_gib * GIB))
    assert vllm_engine._kv_gib(folder, max_model_len) == size


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineMissing) as caught:
        vllm_engine._require_vllm()
    assert "foreword[cpu]" in str(caught.value)
    assert "foreword[gpu]" in str(caught.value)


async def test_start_without_vllm_leaves_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    engine = VllmEngine(EngineConfig())
    with pytest.raises(StartError):
        await engine.start()
    assert engine.state.phase == "down"
    assert engine.state.reason is not None
    assert "no vLLM is installed" in engine.state.reason
    with pytest.raises(EngineUnavailable, match="the engine is down: no vLLM is installed"):
        await anext(engine.generate(Request([1], "r", "s")))
    await engine.stop()
    await engine.stop()


def reading_engine(*prompts: tuple[str, int, int]) -> VllmEngine:
    """An engine that reads prompts of these (id, total, done)."""
    engine = VllmEngine(EngineConfig())
    for id, total, done in prompts:
        engine._reading[id] = vllm_engine._Reading("exact", total=total, done=done, alone=False)
    return engine


@pytest.mark.parametrize(
    ("step", "done"),
    [
        pytest.param(0, [10, 0, 0], id="a step without prompts"),
        pytest.param(50, [60, 0, 0], id="part of the first"),
        pytest.param(90, [100, 0, 0], id="all of the first"),
        pytest.param(95, [100, 5, 0], id="on to the second"),
        pytest.param(145, [100, 50, 5], id="on to the third"),
        pytest.param(999, [100, 50, 30], id="more than there is"),
    ],
)
async def test_steps_are_credited_in_order(step: int, done: list[int]) -> None:
    engine = reading_engine(("a", 100, 10), ("b", 50, 0), ("c", 30, 0))
    engine._advance(step, 0.5)
    seen = [await engine.progress(id) for id in "abc"]
    assert [progress.done for progress in seen if progress] == done
    assert [progress.total for progress in seen if progress] == [100, 50, 30]
    assert await engine.progress("none") is None


async def test_a_step_that_several_share_is_credited_in_shares() -> None:
    engine = reading_engine(("a", 1000, 10), ("b", 500, 0), ("c", 30, 0))
    engine._share = 256
    engine._advance(512, 0.5)
    assert [reading.done for reading in engine._reading.values()] == [266, 256, 0]
    engine._advance(512, 0.5)
    engine._reading.pop("c")
    engine._reading.pop("b")
    engine._advance(512, 0.5)
    assert engine._reading["a"].done == 266 + 256 + 478


def test_the_longest_step_is_that_of_the_prompts_it_read() -> None:
    engine = reading_engine(("a", 100, 10), ("b", 50, 0))
    for tokens, seconds in ((60, 0.4), (30, 0.7), (20, 0.2), (0, 9.0)):
        engine._advance(tokens, seconds)
    assert [reading.longest_step for reading in engine._reading.values()] == [0.7, 0.2]


@given(st.lists(st.integers(0, 60), max_size=20))
def test_no_token_is_credited_twice(steps: list[int]) -> None:
    engine = reading_engine(("a", 100, 10), ("b", 50, 0), ("c", 30, 0))
    for step in steps:
        engine._advance(step, 0.5)
    readings = engine._reading.values()
    assert all(reading.done <= reading.total for reading in readings)
    assert sum(reading.done for reading in readings) == min(180, 10 + sum(steps))


def test_processes_are_ended_and_dead_ones_do_not_matter() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = psutil.Process(child.pid)
    assert vllm_engine._alive(process)
    vllm_engine._end([process])
    assert not vllm_engine._alive(process)
    child.wait(timeout=10)
    vllm_engine._end([process])
    vllm_engine._end([])


def test_shared_memory_of_a_killed_process_is_removed() -> None:
    code = "from multiprocessing.shared_memory import SharedMemory; s = SharedMemory(create=True, size=99); "
    code += "print(s.name, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        name = child.stdout.readline().strip()
        processes = [psutil.Process(child.pid)]
        assert vllm_engine._shared_memory(processes) == {name}
        # Its helper, which would remove it, is killed as well; an engine's is the service's own.
        vllm_engine._end([*processes[0].children(), *processes])
        child.wait(timeout=10)
    assert Path("/dev", "shm", name).exists()
    assert vllm_engine._shared_memory(processes) == set()
    for _ in range(2):
        vllm_engine._free({name})
    assert not Path("/dev", "shm", name).exists()


def test_a_child_that_ends_while_it_is_looked_at_is_none_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    child.wait(timeout=10)
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [process, psutil.Process()])
    assert vllm_engine._engine_processes() == []
    monkeypatch.setattr(vllm_engine, "_title", lambda found: "" if found == process else "VLLM::EngineCore")
    assert vllm_engine._engine_processes() == [psutil.Process()]


@pytest.mark.parametrize("logprobs", [None, []])
def test_no_logprobs(logprobs: list[object] | None) -> None:
    assert vllm_engine._plain_logprobs(logprobs) is None


def test_logprobs_are_plain_numbers() -> None:
    position = {7: SimpleNamespace(logprob=-0.5), 9: SimpleNamespace(logprob=-2.0)}
    assert vllm_engine._plain_logprobs([position]) == [{7: -0.5, 9: -2.0}]


def test_the_window_of_a_hub_model_is_its_own_once_it_is_loaded() -> None:
    engine = VllmEngine(EngineConfig(model="some/model"))
    assert engine._window == 8192
    engine._llm = SimpleNamespace(model_config=SimpleNamespace(max_model_len=40_960))
    assert engine._window == 40_960


async def test_an_engine_leaves_no_settings_behind_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_on_cpu", lambda: True)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("DO_NOT_TRACK", "mine")
    folder = ModelFolder(source="/models/a", name="a", config={"hidden_size": 8})
    engine = VllmEngine(EngineConfig(kv_gib=3))
    engine._environment = vllm_engine._set_environment(EngineConfig(kv_gib=3), folder, {})
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
    await engine.stop()
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert os.environ["DO_NOT_TRACK"] == "mine"


@pytest.mark.parametrize("waiting", ["_pending", "_background", None])
async def test_whoever_waits_for_a_dead_engine_is_told(waiting: str | None) -> None:
    engine = VllmEngine(EngineConfig())
    # It tells requests that the engine is dead.
    handler = asyncio.create_task(asyncio.sleep(0))
    engine._llm = SimpleNamespace(output_handler=handler, shutdown=lambda: None)
    if waiting is not None:
        getattr(engine, waiting).add("a request")
    engine._quiet.clear()
    await engine.stop()
    await asyncio.wait({handler})
    assert handler.cancelled() == (waiting is None)
    await asyncio.wait_for(engine.idle(), 5)
