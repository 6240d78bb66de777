"""Whether a run measured what it says: failures, fallbacks, cache hits, the A/A control, answers cut off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from eval.findings import Findings
from eval.formats import interval


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at; a "note" is for the reader to judge, and "bad" puts the figures in doubt."""

    name: str
    outcome: Literal["good", "bad", "note"]
    told: str


def checks(findings: Findings) -> tuple[Check, ...]:
    """What there was to look at, in the order of importance."""
    return (
        *_failures(findings),
        *_fallbacks(findings),
        *_hits(findings),
        *_again(findings),
        *_cut_off(findings),
    )


def is_again(arm: str) -> bool:
    """Whether the arm is the control under another name, so that what differs is noise (`eval.arms`)."""
    return arm.partition("+")[0] == "again"


def is_warm(arm: str) -> bool:
    """Whether the arm reads prompts early, and otherwise as the control does."""
    return arm.partition("+")[0] == "warm"


def failures_of(findings: Findings, arm: str) -> dict[str, int]:
    """Requests of an arm that failed, by stage; stages without any are left out."""
    answers = findings.quality.answers if findings.quality else ()
    counts = {
        "quality": sum(answer.arm == arm and answer.served.error is not None for answer in answers),
        "cases": sum(case.n - case.passed for case in findings.cases if case.arm == arm),
        "load": sum(sum(level.failures.values()) for level in findings.levels if level.arm == arm),
    }
    return {stage: n for stage, n in counts.items() if n}


def _failures(findings: Findings) -> Iterator[Check]:
    told = [
        f"{arm}: {', '.join(f'{n:,} in {stage}' for stage, n in failed.items())}"
        for arm in findings.arms
        if (failed := failures_of(findings, arm))
    ]
    told += findings.speed.limits if findings.speed else ()
    # Of failed answers the first are enough to see why; all of them are in the results file.
    told += findings.quality.failures[:_MOST_TOLD] if findings.quality else ()
    if findings.speed or findings.quality or findings.cases or findings.levels:
        yield Check("failures", "bad" if told else "good", "; ".join(told) or "none")


_MOST_TOLD = 3


def _fallbacks(findings: Findings) -> Iterator[Check]:
    for one in findings.quality.comparisons if findings.quality else ():
        if one.fallbacks:
            reasons = "; ".join(f"{n:,} prompts: {why}" for why, n in one.fallbacks.items())
            yield Check(f"{one.arm}, not read sparsely", "note", reasons)


def _hits(findings: Findings) -> Iterator[Check]:
    for stage, found in (("speed", findings.speed), ("quality", findings.quality)):
        if found is None:
            continue
        hits = found.unwanted_hits
        told = "not told by a server" if hits is None else f"{hits:,} prompts of cold arms found something cached"
        yield Check(f"cache hits, {stage}", "good" if hits == 0 else "bad", told)


def _again(findings: Findings) -> Iterator[Check]:
    for row in findings.speed.rows if findings.speed else ():
        if is_again(row.arm) and row.ratio is not None:
            holds = row.ratio.low <= 1 <= row.ratio.high
            told = f"ratio to the control {interval(row.ratio)}, which {'holds' if holds else 'does not hold'} 1"
            yield Check(f"A/A control at {row.length:,} tokens", "good" if holds else "bad", told)


def _cut_off(findings: Findings) -> Iterator[Check]:
    answers = findings.quality.answers if findings.quality else ()
    asked = Counter(answer.arm for answer in answers)
    cut = Counter(answer.arm for answer in answers if answer.served.finish_reason == "length")
    if answers:
        told = ", ".join(f"{arm} {cut[arm]:,} of {n:,}" for arm, n in asked.items())
        yield Check("answers cut off at their limit", "note" if cut else "good", told)
