"""What passes, what fails, and what is left open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eval.findings import Case, Findings, Level
from eval.gates import judge
from eval.quality import Comparison, Report
from eval.speed import Row, Speed
from eval.statistics import Difference, Verdict


def verdict(outcome: Any, needed: int | None = None) -> Verdict:
    return Verdict(outcome, Difference(-0.01, -0.03, 0.01, 160, 40), -0.027, 0.2, needed)


def quality(verdict: Verdict | None, *failures: str, hits: int | None = 0) -> Report:
    comparison = Comparison("sparse", "exact", verdict, (), None, None, None, None, None, {})
    return Report((), (comparison,), (), failures, hits)


def row(arm: str = "sparse", length: int = 4096, **more: Any) -> Row:
    fields: dict[str, Any] = {
        "n": 5,
        "prompt_tokens": 4000.0,
        "ttft": 1.0,
        "queue": 0.0,
        "read": 0.9,
        "rest": 0.1,
        "last": 1.0,
        "longest_step": 0.3,
        "tokens_per_s": 4000.0,
        "cached_tokens": 0,
        "paths": ("sparse",),
        "density": 0.4,
        "memory": 2**30,
        "ratio": None,
        "faster": None,
    }
    return Row(arm, length, **{**fields, **more})


def level(**more: Any) -> Level:
    return replace(Level("exact", 4, 16, 1.0, 1.2, None, 1.5, 0.02, 0.04, 2.0, 4000.0, 60.0), **more)


def found(**more: Any) -> Findings:
    return Findings(about={}, suite="quick", arms=("exact", "sparse"), margin=0.05, **more)


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        pytest.param(found(), [], id="nothing measured"),
        pytest.param(
            found(quality=quality(verdict("non-inferior"))),
            [("answers of sparse", "passed"), ("nothing was cached", "passed")],
            id="non-inferior",
        ),
        pytest.param(
            found(quality=quality(verdict("inferior"), hits=2)),
            [("answers of sparse", "failed"), ("nothing was cached", "failed")],
            id="inferior, and cached",
        ),
        pytest.param(
            found(quality=quality(verdict("too few samples", 1478), hits=None)),
            [("answers of sparse", "open"), ("nothing was cached", "open")],
            id="too few samples, and not told",
        ),
        pytest.param(
            found(quality=quality(None, "sparse: a: EngineDied")),
            [("answers of sparse", "open"), ("answers", "failed"), ("nothing was cached", "passed")],
            id="nothing informative, one failure",
        ),
        pytest.param(
            found(speed=Speed((row("exact", paths=("exact",)), row(length=512, paths=("exact",)), row()), (), 0)),
            [("nothing was cached", "passed"), ("sparse reads sparsely", "passed")],
            id="sparse where it pays",
        ),
        pytest.param(
            found(speed=Speed((row(paths=("exact",)),), ("sparse: 8,000 tokens failed",), 0)),
            [("nothing was cached", "passed"), ("speed", "failed"), ("sparse reads sparsely", "failed")],
            id="never sparse",
        ),
        pytest.param(
            found(cases=(Case("short", "exact", 3, 3, 1, 1, 1, 1), Case("short", "sparse", 3, 2, 1, 1, 1, 1, ("x",)))),
            [("short, exact", "passed"), ("short, sparse", "failed")],
            id="cases",
        ),
        pytest.param(
            found(levels=(level(), level(at_once=8, failures={"timed out": 2}), level(arm="sparse"))),
            [("load on exact", "failed"), ("load on sparse", "passed")],
            id="load",
        ),
        pytest.param(
            found(notes=("skipped zh", "load: not measured, the engine died")), [("complete", "failed")], id="a stage"
        ),
    ],
)
def test_gates(findings: Findings, expected: list[tuple[str, str]]) -> None:
    gates = judge(findings)
    assert [(gate.name, gate.outcome) for gate in gates] == expected
    assert replace(findings, gates=gates).passed == all(outcome == "passed" for _, outcome in expected)


def test_too_few_samples_say_how_many_would_do() -> None:
    told = judge(found(quality=quality(verdict("too few samples", 1478))))[0].told
    assert told == (
        "too few samples to exact: -1.0 points over 160 pairs, one-sided bound -2.7, margin 5; "
        "1,478 pairs would probably do"
    )


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        pytest.param(found(speed=Speed((row(),), (), 0)), [], id="the same"),
        pytest.param(found(speed=Speed((row(ttft=1.09, memory=2**30 * 1.09),), (), 0)), [], id="within"),
        pytest.param(found(speed=Speed((row(ttft=1.11),), (), 0)), ["TTFT"], id="later"),
        pytest.param(found(speed=Speed((row(tokens_per_s=3500.0),), (), 0)), ["reading"], id="slower"),
        pytest.param(found(speed=Speed((row(memory=2**31),), (), 0)), ["memory"], id="larger"),
        pytest.param(found(levels=(level(requests_per_s=1.7),)), ["throughput"], id="less at once"),
        pytest.param(found(levels=(level(failures={"error": 1}),)), ["failures", "load on exact"], id="failures"),
        pytest.param(found(speed=Speed((row(length=8192, ttft=9.0),), (), 0)), [], id="nothing to compare"),
    ],
)
def test_a_run_is_held_against_a_baseline(now: Findings, worse: list[str]) -> None:
    before = found(speed=Speed((row(),), (), 0), levels=(level(),))
    failed = [gate.name for gate in judge(now, before) if not gate.passed]
    assert len(failed) == len(worse)
    assert all(any(name.startswith(one) for name in failed) for one in worse)
