"""The whole speed run with an engine whose speed is known."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import pytest

from eval.arms import Variant, parse_arms
from eval.errors import BadUsage, NotMeasured
from eval.results import Results
from eval.serve import OpenServer
from eval.speed import Speed, run_speed
from eval.tables import speed_table
from serving.errors import StartError
from serving.scripted_engine import Script
from tests.eval.reading_engine import ReadingEngine, opener

SLOW = Script(seconds_per_token=5e-5, window=1500)


async def run(
    arms: str, lengths: list[int], results: Results, open_server: OpenServer | None = None, at_once: int = 1
) -> Speed:
    return await run_speed(
        parse_arms(arms),
        lengths,
        4,
        open_server or opener(SLOW),
        seed=0,
        results=results,
        say=lambda _: None,
        step=lambda: None,
        at_once=at_once,
    )


async def test_lengths_go_upwards_until_one_fails(results: Results, lines: io.StringIO) -> None:
    speed = await run("exact,again", [2000, 400, 800], results)
    assert [(row.length, row.arm, row.n) for row in speed.rows] == [
        (400, "exact", 4),
        (400, "again", 4),
        (800, "exact", 4),
        (800, "again", 4),
    ]
    assert speed.limits == (
        "exact, again: 2,000 tokens failed (the window is 1,500 tokens); the last good length is 800",
    )
    assert speed.unwanted_hits == 0
    engine, *requests = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert (engine["kind"], engine["model"]) == ("engine", "scripted")
    assert [request["arm"] for request in requests[:4]] == ["exact", "again", "again", "exact"]
    assert json.loads(json.dumps(asdict(speed)))["rows"]
    assert "exact" in speed_table(speed)


async def test_prompts_that_are_sent_at_once_wait_for_each_other(results: Results, lines: io.StringIO) -> None:
    engines: list[ReadingEngine] = []
    speed = await run("exact,again", [800], results, opener(SLOW, engines), at_once=3)
    requests = [json.loads(line) for line in lines.getvalue().splitlines()[1:]]
    assert [(one["arm"], one["round"], one["number"]) for one in requests[:9]] == [
        *(("exact", 0, number) for number in range(3)),
        *(("again", 0, number) for number in range(3)),
        *(("again", 1, number) for number in range(3, 6)),
    ]
    assert [(row.n, row.ratio is None) for row in speed.rows] == [(12, True), (12, False)]
    for row in speed.rows:
        assert row.ttft < row.last
        assert row.prompt_tokens is not None
        assert row.tokens_per_s == pytest.approx(3 * row.prompt_tokens / row.last, rel=0.05)
    prompts = [tuple(one.prompt) for one in engines[0].requests]
    assert [prompts.count(one) for one in dict.fromkeys(prompts)] == [2] * 13


async def test_what_is_read_before_makes_the_first_token_sooner(results: Results) -> None:
    speed = await run("exact,warm", [1200], results)
    exact, warm = speed.rows
    assert exact.ratio is None
    assert warm.ratio is not None
    assert warm.ratio.estimate < 0.5
    assert (exact.cached_tokens, exact.paths, warm.paths) == (0, ("exact",), ("warm",))
    assert (warm.cached_tokens or 0) > 1000
    assert speed.unwanted_hits == 0


async def test_an_engine_that_does_not_start_is_told_and_the_others_count(results: Results) -> None:
    works = opener(SLOW)

    def open_server(variant: Variant):  # type: ignore[no-untyped-def]
        if variant.kv == "fp8":
            raise StartError("there is no fp8 here")
        return works(variant)

    speed = await run("exact,exact+kv=fp8", [400], results, open_server)
    assert [row.arm for row in speed.rows] == ["exact"]
    assert speed.limits == ("exact+kv=fp8: not measured, there is no fp8 here",)
    with pytest.raises(StartError):
        await run("exact+kv=fp8", [400], results, open_server)


async def test_what_the_control_cannot_read_is_asked_of_nobody(results: Results) -> None:
    speed = await run("exact,exact+chunk=256", [400, 2000], results)
    assert [(row.arm, row.length) for row in speed.rows] == [("exact", 400), ("exact+chunk=256", 400)]
    assert len(speed.limits) == 1


async def test_one_prompt_has_no_interval_and_is_still_json(results: Results, lines: io.StringIO) -> None:
    speed = await run_speed(
        parse_arms("exact,again"), [400], 1, opener(SLOW), seed=0, results=results, say=print, step=lambda: None
    )
    results.add("summary", asdict(speed))
    assert json.loads(lines.getvalue().splitlines()[-1])["rows"][1]["ratio"]["high"] is None


async def test_a_shorter_prompt_is_no_match(results: Results) -> None:
    with pytest.raises(BadUsage, match="'half' reads shorter prompts"):
        await run("exact,half", [400], results)


async def test_nothing_measured_is_an_error(results: Results) -> None:
    with pytest.raises(NotMeasured, match=r"2,000 tokens failed .*; no length before it"):
        await run("exact,again", [2000], results)


async def test_an_arm_that_cannot_be_served_is_refused(results: Results) -> None:
    with pytest.raises(BadUsage, match="sparse prefill"):
        await run("sparse", [400], results)


async def test_sparse_arms_are_served_as_they_say(results: Results) -> None:
    engines: list[ReadingEngine] = []
    script = replace(SLOW, selector="alpha:0.02", density=0.3)
    speed = await run("exact,sparse,sparse+select=mass:0.9", [800], results, opener(script, engines))
    exact, *sparse = speed.rows
    assert (exact.paths, exact.density) == (("exact",), 1.0)
    assert all(row.paths == ("sparse",) and row.density == pytest.approx(0.3) for row in sparse)
    assert " 30%" in speed_table(speed)
    [engine] = engines
    assert {(one.prefill, one.selector) for one in engine.requests} == {
        ("exact", None),
        ("sparse", None),
        ("sparse", "mass:0.9"),
    }
    for one in engine.requests:
        assert one.dense_from is not None
        assert "\n\nQuestion: " in engine.decode(one.prompt[one.dense_from :])
