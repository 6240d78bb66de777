"""Two runs side by side: every setting in which they differ, and what differs in what they found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.findings import Findings
from eval.speed import Timed
from eval.statistics import Interval, ratio_of_geometric_means

# What differs between any two runs and says nothing.
_PASSING = re.compile(r"(date|command|finished)$")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that the runs have not in common, by its path, such as `flags.token_budget`; None: it is not there."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of both runs. `ratio` is after over before, with its interval where the same prompts were read."""

    name: str
    before: float
    after: float
    unit: str
    ratio: Interval | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """Two runs. `warning` says why their difference cannot be laid to one setting."""

    settings: tuple[Setting, ...]
    changes: tuple[Change, ...]
    warning: str | None


def compare(before: Findings, after: Findings, timed_before: Sequence[Timed], timed_after: Sequence[Timed]) -> Compared:
    """Compare two runs by what both have.

    Args:
        timed_before, timed_after: the single requests, so that prompts that both read can be paired; may be empty.
    """
    settings = tuple(_differing(before.about, after.about))
    warning = None
    if len(settings) > 1:
        warning = f"the runs differ in {len(settings)} settings, so what differs cannot be laid to one of them"
    same = before.about.get("seed") == after.about.get("seed")
    pairs = _paired(timed_before, timed_after) if same else {}
    changes = (*_speeds(before, after, pairs), *_answers(before, after), *_levels(before, after))
    return Compared(settings, changes, warning)


def _differing(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[Setting]:
    for name in dict.fromkeys((*before, *after)):
        where = f"{path}{name}"
        one, other = before.get(name), after.get(name)
        if _PASSING.match(where) or one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differing(one, other, f"{where}.")
        else:
            yield Setting(where, one, other)


Prompt = tuple[str, int, int]


def _paired(before: Sequence[Timed], after: Sequence[Timed]) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """TTFT of the prompts that both read, by arm and length; the prompt itself must be as long, or it was another."""

    def known(timed: Sequence[Timed]) -> dict[Prompt, Timed]:
        return {(one.arm, one.length, one.number): one for one in timed if one.served.ttft and not one.served.error}

    pairs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    first, second = known(before), known(after)
    for key in first.keys() & second.keys():
        one, other = first[key].served, second[key].served
        if one.prompt_tokens == other.prompt_tokens and one.ttft and other.ttft:
            pairs.setdefault(key[:2], []).append((one.ttft, other.ttft))
    return pairs


def _speeds(
    before: Findings, after: Findings, pairs: Mapping[tuple[str, int], Sequence[tuple[float, float]]]
) -> Iterator[Change]:
    if before.speed is None or after.speed is None:
        return
    old = {(row.arm, row.length): row for row in before.speed.rows}
    for row in after.speed.rows:
        if (one := old.get((row.arm, row.length))) is None:
            continue
        both = pairs.get((row.arm, row.length), ())
        ratio = None
        if both:
            ratio = ratio_of_geometric_means([b for _, b in both], [a for a, _ in both], seed=0)
        yield Change(f"TTFT of {row.arm} at {row.length:,} tokens", 1000 * one.ttft, 1000 * row.ttft, "ms", ratio)
        if one.memory and row.memory:
            name = f"memory of {row.arm} at {row.length:,} tokens"
            yield Change(name, one.memory / 2**20, row.memory / 2**20, "MiB")


def _answers(before: Findings, after: Findings) -> Iterator[Change]:
    if before.quality is None or after.quality is None:
        return
    old = {score.bucket: score for score in before.quality.scores}
    for score in after.quality.scores:
        if one := old.get(score.bucket):
            yield Change(f"the control's score in {score.bucket}", 100 * one.score, 100 * score.score, "points")
    verdicts = {one.arm: one.verdict for one in before.quality.comparisons}
    for comparison in after.quality.comparisons:
        verdict, earlier = comparison.verdict, verdicts.get(comparison.arm)
        if verdict and earlier:
            name = f"{comparison.arm} - {comparison.control}"
            yield Change(name, 100 * earlier.difference.estimate, 100 * verdict.difference.estimate, "points")


def _levels(before: Findings, after: Findings) -> Iterator[Change]:
    old = {(level.arm, level.at_once): level for level in before.levels}
    for level in after.levels:
        if one := old.get((level.arm, level.at_once)):
            name = f"throughput of {level.arm}, {level.at_once} at once"
            yield Change(name, one.requests_per_s, level.requests_per_s, "requests/s")
