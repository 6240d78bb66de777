"""A whole run on an engine that reads well: written down, broken off, gone on with, judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.errors import BadUsage, NotWritten
from eval.findings import Findings
from eval.plan import Plan, SpeedStage, load_plan
from eval.run import Folder, Parts, measure, read_findings, read_timed
from eval.serve import OpenServer
from serving.errors import StartError
from serving.scripted_engine import Script
from tests.eval.reading_engine import ReadingEngine, opener

SCRIPT = Script(window=2000, selector="alpha:0.02")
ABOUT: dict[str, Any] = {"seed": 3, "suite": {"name": "quick"}, "flags": {"a": 1}}


class BrokenOff(Exception):
    """The run is ended from outside."""


def small(arms: str = "exact,half") -> Plan:
    plan = load_plan("quick", arms, None)
    assert plan.quality is not None
    quality = plan.quality.narrowed(tasks=["facts-single"], lengths=[400], number=40)
    return replace(plan, quality=quality, speed=SpeedStage((300, 500), 2, ("again",)), cases=None)


def counting(stop_after: int | None = None) -> tuple[list[int], Callable[[int, str], Any]]:
    """Progress that counts, and breaks off after so many steps."""
    steps: list[int] = []

    @contextmanager
    def progress(_total: int, _unit: str) -> Iterator[Callable[[], None]]:
        def step() -> None:
            steps.append(1)
            if stop_after is not None and len(steps) >= stop_after:
                raise BrokenOff

        yield step

    return steps, progress


async def run(
    folder: Folder, plan: Plan, open_server: OpenServer | None = None, stop_after: int | None = None, **more: Any
) -> tuple[Findings, int]:
    steps, progress = counting(stop_after)
    parts = Parts(open_server or opener(SCRIPT), service=lambda _: pytest.fail("no stage needs one"), find=lambda _: [])
    findings = await measure(plan, folder, ABOUT, parts, seed=3, say=lambda _: None, progress=progress, **more)
    return findings, len(steps)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "run")
    folder.begin(ABOUT)
    return folder


async def test_a_run_finds_the_broken_arm_and_keeps_what_it_found(folder: Folder) -> None:
    engines: list[ReadingEngine] = []
    findings, _ = await run(folder, small(), opener(SCRIPT, engines))
    # One engine for all stages.
    assert len(engines) == 1
    assert findings.speed is not None
    assert {(row.arm, row.length, row.n) for row in findings.speed.rows} == {
        (arm, length, 2) for arm in ("exact", "again") for length in (300, 500)
    }
    outcomes = {gate.name: gate.outcome for gate in findings.gates}
    assert outcomes["answers of half"] == "failed"
    assert outcomes["nothing was cached"] == "passed"
    assert not findings.passed
    folder.save(findings)
    again = read_findings(folder.findings)
    assert (again.speed, again.gates, again.arms) == (findings.speed, list(findings.gates), findings.arms)
    assert again.quality is not None
    assert findings.quality is not None
    assert again.quality.comparisons == findings.quality.comparisons
    assert len(read_timed(folder.results)) == 8


@pytest.mark.parametrize("stop_after", [1, 5, 8, 9, 40, 87])
async def test_a_run_that_was_broken_off_goes_on(folder: Folder, stop_after: int) -> None:
    plan = small()
    with pytest.raises(BrokenOff):
        await run(folder, plan, stop_after=stop_after)
    # A process that is ended from outside may leave half a line.
    with folder.results.open("a") as stream:
        stream.write('{"kind": "answer", "arm": "ex')
    findings, steps = await run(folder, plan)
    assert steps <= 8 + 80 - stop_after + 1
    assert findings.quality is not None
    assert len(findings.quality.answers) == 2 * 40 * 4
    assert len({(a.arm, a.context, a.question) for a in findings.quality.answers}) == 2 * 40 * 4
    assert {(row.arm, row.n) for row in findings.speed.rows} == {("exact", 2), ("again", 2)}  # type: ignore[union-attr]
    # Nothing is left to do.
    engines: list[ReadingEngine] = []
    last, steps = await run(folder, plan, opener(SCRIPT, engines))
    assert (steps, engines) == (0, [])
    assert last.gates == findings.gates
    assert last.quality == findings.quality


async def test_an_arm_that_cannot_start_is_told_and_the_rest_counts(folder: Folder) -> None:
    works = opener(SCRIPT)

    def open_server(variant: Any) -> Any:
        if variant.kv is not None:
            raise StartError("there is no fp8 here")
        return works(variant)

    findings, _ = await run(folder, small("exact,half,exact+kv=fp8"), open_server)
    told = [gate.told for gate in findings.gates if gate.outcome == "failed"]
    assert "exact+kv=fp8: not measured, there is no fp8 here" in told
    assert findings.quality is not None
    assert [comparison.arm for comparison in findings.quality.comparisons] == ["half"]


async def test_a_control_that_cannot_start_ends_the_run(folder: Folder) -> None:
    def open_server(_: Any) -> Any:
        raise StartError("there is no engine here")

    with pytest.raises(StartError, match="there is no engine here"):
        await run(folder, small(), open_server)


async def test_a_full_disk_is_one_sentence(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small()
    with pytest.raises(BrokenOff):
        await run(folder, plan, stop_after=3)
    with monkeypatch.context() as patch:
        opened = Path.open

        def on_a_full_disk(path: Path, mode: str = "r", **more: Any) -> Any:
            full = path.name == "results.jsonl" and mode != "r" and "b" not in mode
            return opened(Path("/dev/full") if full else path, mode, **more)

        patch.setattr(Path, "open", on_a_full_disk)
        with pytest.raises(NotWritten, match=r"No space left on device.*; what came before it is there"):
            await run(folder, plan)
    findings, _ = await run(folder, plan)
    assert findings.quality is not None
    assert len(findings.quality.answers) == 2 * 40 * 4


def test_a_run_is_not_begun_twice_nor_gone_on_with_as_another(folder: Folder) -> None:
    with pytest.raises(BadUsage, match=r"there is a run in .* already; go on with it by --resume"):
        folder.begin(ABOUT)
    folder.require_same({**ABOUT, "date": "later", "command": "another"})
    with pytest.raises(BadUsage, match="was begun with another seed and flags; begin a new one"):
        folder.require_same({**ABOUT, "seed": 4, "flags": {"a": 2}})
    with pytest.raises(BadUsage, match="holds no findings of a finished run"):
        read_findings(folder.findings)
    folder.findings.write_text(json.dumps({"about": 3}))
    with pytest.raises(BadUsage, match="holds no findings of a finished run"):
        read_findings(folder.findings)
