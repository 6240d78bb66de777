"""The vLLM adapter's estimates and limits, before vLLM is there and beside a stand-in for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving import vllm_engine
from serving.config import EngineConfig
from serving.engine import Request
from serving.kv.files import KvFiles, digest, namespace
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
    async with engine._read(requests[0], 0) as first:
        alone = [first.alone]
        async with engine._read(requests[1], 0) as second:
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
    request = Request(range(100), "r", "s")
    async with engine._read(request, engine._at_hand(request).memory):
        progress = await engine.progress("r")
        assert progress is not None
        assert (progress.done, progress.total) == (3 * BLOCK, 100)


@pytest.mark.parametrize(
    ("bytes_per_s", "seconds", "tokens", "compute"),
    [
        pytest.param(None, 0.004, 4, False, id="nobody knows yet"),
        pytest.param(3 * 10**9, 0.005, 4, False, id="a fast disk"),
        pytest.param(10**7, 0.1, 100, True, id="a disk that is slower than computing"),
    ],
)
def test_files_are_read_only_when_that_is_sooner_than_computing(
    tmp_path: Path, bytes_per_s: float | None, seconds: float, tokens: int, compute: bool
) -> None:
    engine = _engine(_loaded(), kv_disk=tmp_path, kv_disk_gib=1)
    _observe(engine)
    files = KvFiles(tmp_path, 2**30, digest("a model"))
    files.begin(namespace("s"))
    for number in range(3):
        assert files.write(namespace("s"), bytes([number]), [bytes(10**6)])
    if bytes_per_s is not None:
        files.observe(int(bytes_per_s), 1.0)
    request = Request(range(100), "r", "s")
    plan = engine.plan(request)
    assert (plan.tokens_to_compute, plan.path) == (tokens, "exact" if compute else "warm")
    assert plan.eta_s == pytest.approx(seconds, abs=1e-4)
    assert engine._extra_args(request, engine._at_hand(request)).get("foreword_compute") == (1 if compute else None)
    # What is in memory is not read again.
    engine._blocks.stored([b"a", b"b", b"c"], None, range(96), BLOCK, "s")
    assert engine.plan(request).tokens_to_compute == 4


def test_the_host_s_memory_is_counted_in_chunks_whatever_the_disk() -> None:
    engine = _engine(_loaded())
    engine._tiers = True
    names = [bytes([number]) for number in range(20)]
    engine._blocks.stored(names, None, range(20 * BLOCK), BLOCK, "s")
    # A chunk of 256 tokens is known by its eighth block.
    engine._host_blocks.stored([names[7], names[15]])
    engine._blocks.removed(names[3:])
    request = Request(range(700), "r", "s")
    assert engine.plan(request).tokens_to_compute == 700 - 2 * 256
    engine._host_blocks.removed([names[15]])
    assert engine.plan(request).tokens_to_compute == 700 - 256
    engine._host_blocks.removed([names[7]])
    assert engine.plan(request).tokens_to_compute == 700 - 3 * BLOCK
    assert engine.plan(Request(range(700), "r", "other")).tokens_to_compute == 700


@pytest.mark.parametrize(("tokens", "kept"), [(40, False), (200, True)])
def test_what_is_computed_sooner_than_loaded_does_not_go_to_the_host_s_memory(tokens: int, kept: bool) -> None:
    engine = _engine(_loaded())
    engine._tiers = True
    _observe(engine)
    request = Request(range(tokens), "r", "s", keep=True)
    params = engine._extra_args(request, engine._at_hand(request))["kv_transfer_params"]
    assert ("max_offload_tokens" not in params) == kept
