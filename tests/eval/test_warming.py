"""What reading early costs, measured on the scripted engine, whose times are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.errors import NotMeasured
from eval.results import results_file
from eval.warming import Spread, Warming, measure_warming, warming_lines
from serving.errors import PromptTooLong
from serving.scripted_engine import Script, ScriptedEngine


async def _measure(folder: Path, script: Script, **settings: int) -> tuple[Warming, int, list[str]]:
    engine = ScriptedEngine(script)
    await engine.start()
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    given = {"length": 1200, "repeats": 2, "questions": 6, "seed": 1, **settings}
    with results_file(folder / "results.jsonl") as results:
        measured = await measure_warming(engine, folder, results=results, step=step, **given)
    await engine.stop()
    lines = (folder / "results.jsonl").read_text().splitlines()
    return measured, steps, [json.loads(line)["kind"] for line in lines]


async def test_everything_is_measured_and_written_down(tmp_path: Path) -> None:
    script = Script(seconds_per_token=0.0002, gap_s=0.01)
    measured, steps, kinds = await _measure(tmp_path, script)
    assert kinds == ["throughput", "questions", "estimates"]
    # Two documents in one go; alone, beside the reading, and for estimates six each.
    assert steps == 2 + 3 * 6
    assert len(measured.pairs) == 2
    assert measured.throughput > 0
    assert measured.idle_gaps.p50 > 0.009
    assert measured.idle.n == measured.beside.n == measured.estimate_errors.n == 6


async def test_a_question_beside_the_reading_waits_for_a_step(tmp_path: Path) -> None:
    measured, _, _ = await _measure(tmp_path, Script(seconds_per_token=0.0005, gap_s=0.01), questions=8)
    assert measured.added_steps == (measured.beside.p95 - measured.idle.p50) / measured.step
    assert measured.added_steps > 0


async def test_documents_longer_than_the_window_are_told(tmp_path: Path) -> None:
    with pytest.raises(PromptTooLong, match="window is 1,000"):
        await _measure(tmp_path, Script(window=1000))


async def test_documents_that_the_cache_cannot_hold_are_told(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="not read early: no room"):
        await _measure(tmp_path, Script(window=2000, kv_windows=1))


async def test_an_answer_in_one_piece_has_no_gaps(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="one piece"):
        await _measure(tmp_path, Script(answer=("word",), seconds_per_token=0.0001))


def test_lines_name_every_measure() -> None:
    spread = Spread.of([0.1, 0.2, 0.3])
    assert (spread.n, spread.p50) == (3, 0.2)
    warming = Warming(6000, 1.0, 0.9, ((1.0, 1.1),), spread, spread, 0.25, spread, spread, spread)
    text = "\n".join(f"{name} {value}" for name, value in warming_lines(warming))
    for part in ("6,000 tokens", "90% of reading in one go", "0.25 steps of 1000 ms", "p80"):
        assert part in text
