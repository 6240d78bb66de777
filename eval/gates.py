"""What a run must show to pass, and how it is held against an earlier one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.findings import Case, Findings, Gate, Level
from eval.quality import Comparison
from eval.speed import Row, Speed

# How much worse than the baseline a run may be: less than machines that others use, too, differ by from day to day is
# no finding, and a third of the gain that makes `auto` read sparsely would be one.
SLOWER = 0.10
LARGER = 0.10


def judge(findings: Findings, baseline: Findings | None = None) -> tuple[Gate, ...]:
    """Every demand on a run; those on what a baseline has, too, only where there is one."""
    return (
        *_quality(findings),
        *_served(findings),
        *(_case(case) for case in findings.cases),
        *_load(findings.levels),
        *(Gate("complete", "failed", note) for note in findings.notes if "not measured" in note),
        *(_against(findings, baseline) if baseline else ()),
    )


def _quality(findings: Findings) -> Iterator[Gate]:
    if findings.quality is None:
        return
    for comparison in findings.quality.comparisons:
        yield _verdict(comparison, findings.margin)
    for failure in findings.quality.failures:
        yield Gate("answers", "failed", failure)


def _verdict(comparison: Comparison, margin: float) -> Gate:
    name = f"answers of {comparison.arm}"
    if comparison.verdict is None:
        return Gate(name, "open", "the control could do no task well enough for a comparison")
    verdict = comparison.verdict
    told = (
        f"{verdict.outcome} to {comparison.control}: {100 * verdict.difference.estimate:+.1f} points over "
        f"{verdict.difference.n:,} pairs, one-sided bound {100 * verdict.lower_bound:+.1f}, margin {100 * margin:g}"
    )
    if verdict.outcome == "too few samples" and verdict.n_needed:
        told += f"; {verdict.n_needed:,} pairs would probably do"
    outcomes = {"non-inferior": "passed", "inferior": "failed", "too few samples": "open"}
    return Gate(name, outcomes[verdict.outcome], told)  # type: ignore[arg-type]


def _served(findings: Findings) -> Iterator[Gate]:
    """That the arms were what they are called: nothing cached where it should not be, and the fast path taken."""
    speed = findings.speed
    hits = [part.unwanted_hits for part in (speed, findings.quality) if part is not None]
    if hits:
        if any(hit is None for hit in hits):
            yield Gate("nothing was cached", "open", "a server did not tell what it found in its cache")
        else:
            found = sum(hit or 0 for hit in hits)
            yield Gate("nothing was cached", "failed" if found else "passed", f"{found} cold requests found something")
    if speed is None:
        return
    for limit in speed.limits:
        yield Gate("speed", "failed", limit)
    for arm, rows in _by_arm(speed).items():
        if arm.startswith("sparse"):
            last = rows[-1]
            taken = "sparse" in last.paths
            told = f"at {last.length:,} tokens it was read {' and '.join(last.paths)}"
            yield Gate(f"{arm} reads sparsely", "passed" if taken else "failed", told)


def _case(case: Case) -> Gate:
    told = f"{case.passed} of {case.n}" + "".join(f"; {fault}" for fault in case.faults)
    return Gate(f"{case.name}, {case.arm}", "passed" if case.passed == case.n else "failed", told)


def _load(levels: Sequence[Level]) -> Iterator[Gate]:
    for arm in dict.fromkeys(level.arm for level in levels):
        failed = {level.at_once: dict(level.failures) for level in levels if level.arm == arm and level.failures}
        told = "; ".join(
            f"{at_once} at once: " + ", ".join(f"{count} {kind}" for kind, count in failures.items())
            for at_once, failures in failed.items()
        )
        yield Gate(f"load on {arm}", "failed" if failed else "passed", told or "every request was answered")


def _against(findings: Findings, baseline: Findings) -> Iterator[Gate]:
    """TTFT, throughput, memory and failures, each where both runs have it."""
    if findings.speed and baseline.speed:
        before = {(row.arm, row.length): row for row in baseline.speed.rows}
        for row in findings.speed.rows:
            if old := before.get((row.arm, row.length)):
                yield from _row(row, old)
    then = {(level.arm, level.at_once): level for level in baseline.levels}
    for level in findings.levels:
        if old_level := then.get((level.arm, level.at_once)):
            name = f"throughput of {level.arm}, {level.at_once} at once"
            yield _change(name, level.requests_per_s, old_level.requests_per_s, "requests/s", -SLOWER)
            yield _rate(f"failures of {level.arm}, {level.at_once} at once", level, old_level)


def _row(row: Row, old: Row) -> Iterator[Gate]:
    at = f"{row.arm} at {row.length:,} tokens"
    yield _change(f"TTFT of {at}", 1000 * row.ttft, 1000 * old.ttft, "ms", SLOWER)
    if row.tokens_per_s and old.tokens_per_s:
        yield _change(f"reading of {at}", row.tokens_per_s, old.tokens_per_s, "tokens/s", -SLOWER)
    if row.memory and old.memory:
        yield _change(f"memory of {at}", row.memory / 2**20, old.memory / 2**20, "MiB", LARGER)


def _change(name: str, now: float, before: float, unit: str, most: float) -> Gate:
    """A change that may be at most so much of what was before; a negative one is of what should be large."""
    change = now / before - 1 if before else 0.0
    worse = change > most if most > 0 else change < most
    told = f"{now:,.0f} {unit} after {before:,.0f} ({100 * change:+.0f}%, {100 * most:+.0f}% allowed)"
    return Gate(f"{name}, against the baseline", "failed" if worse else "passed", told)


def _rate(name: str, level: Level, old: Level) -> Gate:
    now, before = sum(level.failures.values()), sum(old.failures.values())
    worse = now * old.n > before * level.n
    told = f"{now} of {level.n} after {before} of {old.n}"
    return Gate(f"{name}, against the baseline", "failed" if worse else "passed", told)


def _by_arm(speed: Speed) -> Mapping[str, list[Row]]:
    """The rows of each arm, the longest prompts last."""
    rows: dict[str, list[Any]] = {}
    for row in sorted(speed.rows, key=lambda row: row.length):
        rows.setdefault(row.arm, []).append(row)
    return rows
