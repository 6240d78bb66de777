"""The vLLM adapter's estimates and limits, before vLLM is there and beside a stand-in for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serving import vllm_engine
from serving.config import EngineConfig
from serving.engine import Request
from serving.model import ModelFolder
from serving.vllm_engine import VllmEngine

BLOCK = 32


def _loaded(window: int = 8192, blocks: int = 100) -> Any:
    """What the adapter reads of a loaded vLLM."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=window),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=BLOCK)),
        errored=False,
    )


def _engine(loaded: Any = None, **config: Any) -> VllmEngine:
    engine = VllmEngine(EngineConfig(model="someone/model", token_budget=512, **config))
    engine._llm = loaded
    return engine


def _observe(engine: VllmEngine) -> None:
    """A machine that reads a token in a millisecond, whatever came before."""
    for computed in (100, 200, 400, 800):
        engine._speed["exact"].observe(computed, 0, computed / 1000)
        engine._speed["sparse"].observe(computed, 0, computed / 2000)


@pytest.mark.parametrize(
    ("reading", "seconds"),
    [
        pytest.param([], 0.1, id="nothing before"),
        pytest.param([(1000, 0)], 1.1, id="a prompt not yet begun"),
        pytest.param([(1000, 600)], 0.5, id="what remains of a prompt"),
        pytest.param([(1000, 600), (300, 0)], 0.8, id="two prompts"),
    ],
)
def test_a_plan_waits_for_the_prompts_before_it(reading: list[tuple[int, int]], seconds: float) -> None:
    engine = _engine(_loaded())
    _observe(engine)
    for number, (total, done) in enumerate(reading):
        engine._reading[str(number)] = vllm_engine._Reading("exact", total=total, done=done, alone=False)
    plan = engine.plan(Request(range(100), "r", "s"))
    assert (plan.path, plan.tokens_to_compute) == ("exact", 100)
    assert plan.eta_s == pytest.approx(seconds, rel=1e-3)


def test_a_sparse_plan_has_a_speed_of_its_own_and_waits_for_exact_prompts() -> None:
    engine = _engine(_loaded())
    _observe(engine)
    engine._reading["0"] = vllm_engine._Reading("exact", total=1000, done=0, alone=False)
    plan = engine.plan(Request(range(100), "r", "s", prefill="sparse"))
    assert (plan.path, plan.tokens_to_compute) == ("sparse", 100)
    assert plan.eta_s == pytest.approx(1.05, rel=1e-3)


def test_a_plan_knows_what_is_cached_under_its_salt() -> None:
    engine = _engine(_loaded())
    engine._blocks.stored([b"a", b"b", b"c"], None, range(96), BLOCK, "s")
    plan = engine.plan(Request(range(100), "r", "s"))
    assert (plan.path, plan.tokens_to_compute, plan.eta_s) == ("warm", 100 - 3 * BLOCK, None)
    assert engine.plan(Request(range(100), "r", "other")).tokens_to_compute == 100


def test_a_plan_made_while_the_engine_loads_expects_nothing_cached() -> None:
    # A restart may begin between the check of a question and its plan.
    plan = _engine().plan(Request(range(100), "r", "s"))
    assert (plan.path, plan.tokens_to_compute, plan.eta_s) == ("exact", 100, None)


def test_the_window_is_the_loaded_engine_s_whatever_was_asked_before() -> None:
    # Of a model on the hub nothing is known until vLLM has fetched it.
    engine = _engine()
    assert engine.limits.window == 8192
    engine._llm = _loaded(window=2048)
    assert engine.limits.window == 2048


@pytest.mark.parametrize(
    ("config", "folder", "window"),
    [
        pytest.param({"max_model_len": 1024}, {"max_position_embeddings": 4096}, 1024, id="the setting"),
        pytest.param({}, {"max_position_embeddings": 4096}, 4096, id="the model's"),
        pytest.param({}, {}, 8192, id="a guess"),
    ],
)
def test_the_window_before_it_is_loaded(config: dict[str, Any], folder: dict[str, Any], window: int) -> None:
    engine = _engine(**config)
    engine.__dict__["_folder"] = ModelFolder("x", "x", folder)
    assert engine.limits.window == window


async def test_only_the_first_of_the_prompts_has_started() -> None:
    engine = _engine(_loaded())
    requests = [Request(range(100), id, "s") for id in "ab"]
    async with engine._read(requests[0]) as first:
        alone = [first.alone]
        async with engine._read(requests[1]) as second:
            # A time measured beside another prompt says nothing about one alone.
            alone += [first.alone, second.alone]
            seen = [await engine.progress(id) for id in "ab"]
            assert [progress.started for progress in seen if progress] == [True, False]
            assert engine.stats.pending == 2
        assert await engine.progress("b") is None
    assert engine.stats.pending == 0
    assert alone == [True, False, False]


async def test_cached_tokens_count_as_read_from_the_start() -> None:
    engine = _engine(_loaded())
    engine._blocks.stored([b"a", b"b", b"c"], None, range(96), BLOCK, "s")
    async with engine._read(Request(range(100), "r", "s")):
        progress = await engine.progress("r")
        assert progress is not None
        assert (progress.done, progress.total) == (3 * BLOCK, 100)
