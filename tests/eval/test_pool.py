"""Runs on several seeds are one run, and what is not the same measurement is not pooled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from eval.arms import parse_arms
from eval.errors import BadUsage
from eval.pool import pooled
from eval.quality import Report, Suite, load_suite, run_quality
from eval.results import results_file
from serving.scripted_engine import Script
from tests.eval.reading_engine import opener

SUITE = replace(load_suite("quick"), lengths=(700,), tasks=("facts-single", "documents"), number=15, questions=2)
ARMS = "exact,again,half"


async def measured(file: Path, seed: int, suite: Suite = SUITE, about: Mapping[str, Any] | None = None) -> Report:
    arms = parse_arms(ARMS)
    identity = {
        "date": "2026-01-01",
        "seed": seed,
        "model": "m",
        "weights": None,
        "engine": "vllm",
        "commit": None,
        "arms": [asdict(arm) for arm in arms],
        "suite": asdict(suite),
    }
    with results_file(file) as results:
        results.add("identity", identity | dict(about or {}))
        return await run_quality(arms, suite, opener(Script()), seed=seed, results=results, step=lambda: None)


async def test_one_run_pooled_is_that_run(tmp_path: Path) -> None:
    report = await measured(tmp_path / "a", 0)
    alone, _ = pooled([tmp_path / "a"])
    assert alone.scores == report.scores
    assert [one.verdict for one in alone.comparisons] == [one.verdict for one in report.comparisons]
    assert alone.unwanted_hits == 0


async def test_seeds_add_contexts(tmp_path: Path) -> None:
    for seed in (1, 2):
        report = await measured(tmp_path / f"{seed}", seed)
        verdict = report.comparisons[0].verdict
        assert verdict is not None
        assert verdict.outcome == "too few samples"
    report, about = pooled([tmp_path / "1", tmp_path / "2"])
    again, half = (comparison.verdict for comparison in report.comparisons)
    assert again is not None
    assert half is not None
    assert (again.difference.n, again.outcome, half.outcome) == (120, "non-inferior", "inferior")
    # Contexts of one name and different seeds are different samples.
    assert len({answer.context for answer in report.answers}) == 2 * 2 * 15
    assert [run["seed"] for run in about["runs"]] == [1, 2]


async def test_a_run_that_was_broken_off_counts_with_what_it_has(tmp_path: Path) -> None:
    await measured(tmp_path / "whole", 1)
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    (tmp_path / "part").write_text("".join(lines[:9]) + lines[9][:40])
    report, _ = pooled([tmp_path / "part"])
    assert len(report.answers) == 7
    (tmp_path / "first").write_text("".join(lines[:4]))
    report, _ = pooled([tmp_path / "first"])
    assert report.failures == ("again: not measured", "half: not measured")
    assert not report.passed


@pytest.mark.parametrize(
    ("seed", "about", "told"),
    [
        pytest.param(1, {}, "of seed 1 once more", id="seed"),
        pytest.param(2, {"model": "other"}, "differ in their model", id="model"),
        pytest.param(2, {"engine": "reference"}, "differ in their engine", id="engine"),
        pytest.param(2, {"suite": asdict(replace(SUITE, margin=0.3))}, "differ in their margin", id="margin"),
    ],
)
async def test_other_measurements_are_not_pooled(seed: int, about: dict[str, Any], told: str, tmp_path: Path) -> None:
    suite = replace(SUITE, number=1)
    await measured(tmp_path / "a", 1, suite)
    await measured(tmp_path / "b", seed, suite, about)
    with pytest.raises(BadUsage, match=told):
        pooled([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param("", "does not hold the answers", id="empty"),
        pytest.param("no\njson\n", "line 1 of .* is not JSON", id="no JSON"),
        pytest.param("[1]\n", "line 1 of .* is no object", id="no record"),
        pytest.param(json.dumps({"kind": "identity", "seed": 0}), "does not begin with", id="another run"),
    ],
)
def test_what_is_no_quality_run_is_told(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(content)
    with pytest.raises(BadUsage, match=told):
        pooled([tmp_path / "a"])


async def test_a_run_without_the_control_is_told(tmp_path: Path) -> None:
    await measured(tmp_path / "a", 1)
    lines = (tmp_path / "a").read_text().splitlines(keepends=True)
    (tmp_path / "a").write_text("".join(line for line in lines if '"arm": "exact"' not in line))
    with pytest.raises(BadUsage, match="no answer of the control 'exact'"):
        pooled([tmp_path / "a"])
