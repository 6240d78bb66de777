"""Levels of load on an engine whose delays are known, and the arithmetic of a level on numbers that are."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from eval.arms import Arm
from eval.errors import BadUsage
from eval.findings import Level
from eval.load import Load, failure_of, knee, level_of, measure_levels, percentile, with_knee
from eval.results import Results
from eval.serve import EngineServer
from eval.served import Served, gaps_between
from serving.engine import Message
from serving.scripted_engine import Script, ScriptedEngine

RATES = [(1, 6.0), (2, 3.0), (4, 2.9)]
LOAD = Load(at_once=(1, 2), number=3, max_tokens=8, timeout_s=30)


def prompts(number: int) -> list[list[Message]]:
    return [[Message("user", f"prompt {n} of many")] for n in range(number)]


@dataclass
class Watched(ScriptedEngine):
    """Keeps how many requests were in work when each one began."""

    beside: list[int] = field(default_factory=list)

    def _begin(self, request: Any, prefill: Any) -> None:
        super()._begin(request, prefill)
        self.beside.append(self.stats.pending)


async def measured(engine: ScriptedEngine, load: Load, results: Results) -> tuple[Level, ...]:
    await engine.start()
    server = EngineServer(engine)
    return await measure_levels(server, Arm("exact"), prompts(load.prompts), load, results=results, done=lambda _: None)


async def test_so_many_are_always_in_work(results: Results, lines: io.StringIO) -> None:
    engine = Watched(Script(first_token_s=0.02))
    levels = await measured(engine, replace(LOAD, at_once=(1, 3), number=9, warmups=2), results)
    # Two that warm up, one after the other; nine; two at once; nine, three at once as soon as there are three.
    assert engine.beside == [1] * 11 + [1, 2] + [1, 2, *[3] * 7]
    assert [(level.at_once, level.n, level.failures) for level in levels] == [(1, 9, {}), (3, 9, {})]
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["kind"] for line in told] == [*["request"] * 9, "level"] * 2
    assert sorted(line["number"] for line in told[:9]) == list(range(9))
    assert len(told[0]["served"]["gaps"]) == 2


async def test_every_request_has_a_prompt_and_a_namespace_of_its_own(results: Results) -> None:
    engine = ScriptedEngine()
    await measured(engine, LOAD, results)
    assert len(engine.requests) == LOAD.prompts == 8
    assert len({tuple(request.prompt) for request in engine.requests}) == 8
    assert len({request.salt for request in engine.requests}) == 8


async def test_delays_are_found_again(results: Results) -> None:
    script = Script(first_token_s=0.1, gap_s=0.05)
    level = (await measured(ScriptedEngine(script), replace(LOAD, at_once=(2,)), results))[0]
    assert level.ttft_p50 == pytest.approx(0.1, abs=0.05)
    assert level.itl_p50 == pytest.approx(0.05, abs=0.025)


async def test_failures_are_counted_by_kind_and_never_dropped(results: Results, lines: io.StringIO) -> None:
    busy = await measured(
        ScriptedEngine(Script(first_token_s=0.05, max_pending=1)), replace(LOAD, at_once=(3,)), results
    )
    assert (busy[0].n, busy[0].failures) == (3, {"refused": 2})
    slow = await measured(ScriptedEngine(Script(first_token_s=5)), replace(LOAD, at_once=(3,), timeout_s=0.05), results)
    assert (slow[0].n, slow[0].failures, slow[0].ttft_p50, slow[0].requests_per_s) == (3, {"time-out": 3}, None, 0)
    small = await measured(ScriptedEngine(Script(window=4)), replace(LOAD, at_once=(3,)), results)
    assert (small[0].failures, small[0].output_tokens_per_s) == ({"error": 3}, None)
    assert lines.getvalue().count('"kind": "request"') == 9


async def test_a_request_that_takes_too_long_is_aborted(results: Results) -> None:
    engine = ScriptedEngine(Script(first_token_s=5))
    await measured(engine, replace(LOAD, at_once=(1,), number=1, warmups=0, timeout_s=0.05), results)
    assert engine.aborted == [request.id for request in engine.requests]


def answered(ttft: float, gaps: tuple[float, ...] = (), prompt_tokens: int | None = 100, tokens: int = 3) -> Served:
    return Served(ttft=ttft, gaps=gaps, prompt_tokens=prompt_tokens, tokens=tokens, finish_reason="stop")


def test_a_level_is_what_its_answers_say() -> None:
    answers = [answered(float(ttft), (0.25, 0.75)) for ttft in range(1, 12)]
    level = level_of("exact", 2, [*answers, Served(error="429: later")], 10.0, LOAD)
    assert level == Level(
        arm="exact",
        at_once=2,
        n=12,
        ttft_p50=6.0,
        ttft_p90=10.0,
        ttft_p99=None,
        ttft_worst=11.0,
        itl_p50=0.5,
        itl_p99=None,
        requests_per_s=1.1,
        prompt_tokens_per_s=110.0,
        output_tokens_per_s=3.3,
        failures={"refused": 1},
    )


def test_tokens_that_a_server_does_not_tell_are_not_guessed() -> None:
    level = level_of("exact", 1, [answered(1.0), answered(1.0, prompt_tokens=None)], 1.0, LOAD)
    assert (level.prompt_tokens_per_s, level.output_tokens_per_s) == (None, None)


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "share"),
    [
        pytest.param(None, None, None, id="no limits"),
        pytest.param(1.0, None, 0.5, id="first text"),
        pytest.param(None, 0.2, 0.5, id="pieces"),
        pytest.param(1.0, 0.2, 0.25, id="both"),
        pytest.param(0.1, 0.01, 0.0, id="nothing"),
    ],
)
def test_goodput_is_the_share_of_all_requests(ttft_s: float | None, itl_s: float | None, share: float | None) -> None:
    # The mean of the first one's gaps is within the limit, though one of them is not.
    answers = [
        answered(1.0, (0.1, 0.3)),
        answered(2.0, (0.2,)),
        answered(0.5, (0.1, 0.5)),
        Served(error="500: no", ttft=0.1, gaps=()),
    ]
    assert level_of("exact", 1, answers, 1.0, replace(LOAD, ttft_s=ttft_s, itl_s=itl_s)).goodput == share


@pytest.mark.parametrize(
    ("n", "rank", "value"),
    [(0, 50, None), (1, 90, 0.0), (4, 50, 1.5), (11, 90, 9.0), (299, 99, None), (300, 99, pytest.approx(296.01))],
)
def test_percentiles_are_interpolated_and_the_99th_needs_300(n: int, rank: int, value: float | None) -> None:
    assert percentile([float(value) for value in reversed(range(n))], rank) == value


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("429: {}", "refused"),
        ("Overloaded: 32 requests wait already", "refused"),
        ("TimeoutError: no answer", "time-out"),
        ("ReadTimeout: ", "time-out"),
        ("500: 429", "error"),
        ("ConnectError: All connection attempts failed", "error"),
        ("the server's stream ended before the answer did", "error"),
    ],
)
def test_kinds_of_failures(error: str, kind: str) -> None:
    assert failure_of(error) == kind


@pytest.mark.parametrize(
    ("levels", "at"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([(1, 5.0)], None, id="one level"),
        pytest.param([(1, 1.0), (2, 2.0), (4, 4.0)], None, id="it grows to the end"),
        pytest.param([(1, 1.0), (2, 2.0), (4, 2.1), (8, 4.2)], 2, id="the first one"),
        pytest.param([(1, 10.0), (2, 11.0)], None, id="10% are enough"),
        pytest.param([(1, 10.0), (2, 10.9)], 1, id="9% are not"),
        pytest.param([(1, 4.0), (2, 3.0)], 1, id="less than before"),
        pytest.param([(1, 0.0), (2, 0.0), (4, 1.0)], None, id="nothing answered at first"),
        pytest.param([(1, 2.0), (2, 0.0)], 1, id="nothing answered any more"),
        pytest.param([(1, 1.0), (4, 1.25)], None, id="two doublings of 12%"),
        pytest.param([(1, 1.0), (4, 1.15)], 1, id="two doublings of 7%"),
        pytest.param([(2, 1.0), (3, 1.07)], None, id="part of a doubling, 12% a whole one"),
    ],
)
def test_the_knee_is_where_one_more_doubling_brings_little(levels: list[tuple[int, float]], at: int | None) -> None:
    assert knee(levels) == at


def test_the_knee_is_marked_on_its_level_only() -> None:
    levels = [level_of("exact", at_once, [answered(1.0)] * 6, seconds, LOAD) for at_once, seconds in RATES]
    assert [level.knee for level in with_knee(levels)] == [False, True, False]


async def test_an_engine_that_only_waits_has_no_knee(results: Results) -> None:
    load = replace(LOAD, at_once=(1, 2, 4), number=8)
    levels = await measured(ScriptedEngine(Script(first_token_s=0.05)), load, results)
    assert [level.knee for level in levels] == [False, False, False]
    rates = [level.requests_per_s for level in levels]
    assert all(faster > 1.4 * slower for slower, faster in pairwise(rates))


@pytest.mark.parametrize("at_once", [(), (0,), (2, 1), (1, 1)])
def test_levels_go_upwards(at_once: tuple[int, ...]) -> None:
    with pytest.raises(BadUsage, match="the levels are"):
        replace(LOAD, at_once=at_once)


async def test_too_few_requests_or_prompts_are_refused(results: Results) -> None:
    with pytest.raises(BadUsage, match="3 requests cannot be 4 at once"):
        replace(LOAD, at_once=(1, 4))
    server = EngineServer(ScriptedEngine())
    with pytest.raises(BadUsage, match="needs 8 prompts, and there are 7"):
        await measure_levels(server, Arm("exact"), prompts(7), LOAD, results=results, done=lambda _: None)


def test_gaps_lie_between_arrivals() -> None:
    assert gaps_between([]) == gaps_between([1.0]) == ()
    assert gaps_between([1.0, 1.5, 3.5]) == (0.5, 2.0)
