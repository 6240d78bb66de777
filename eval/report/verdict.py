"""What a run says about its arms, in one paragraph to act on: sooner or not, at what cost, and as true or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from eval.findings import Findings, Level
from eval.formats import difference, gib, interval, ms, number, points
from eval.quality import Comparison
from eval.report.validity import checks, failures_of, is_again, is_warm
from eval.speed import Row


def verdict(findings: Findings) -> str:
    """The outcome of the gates, what the suite can show, then each arm against the control."""
    sentences = [_outcome(findings), _suite(findings), *_doubts(findings)]
    control, *arms = findings.arms or ("",)
    if not arms:
        sentences.append("There is no arm beside the control, so nothing is compared.")
    sentences += [_noise(findings, arm, control) if is_again(arm) else _arm(findings, arm, control) for arm in arms]
    return " ".join(sentences)


def _outcome(findings: Findings) -> str:
    against = f" against the run {findings.baseline}" if findings.baseline else ""
    failed = [gate for gate in findings.gates if gate.outcome == "failed"]
    undecided = [gate for gate in findings.gates if gate.outcome == "open"]
    if not findings.gates:
        return "No gates were set, so nothing was demanded of this run."
    if not failed and not undecided:
        return f"Passed: {_all(len(findings.gates))}{against}."
    reasons = "; ".join(f"{gate.name}: {gate.told}" for gate in failed or undecided)
    several = f"{len(failed or undecided)} of {len(findings.gates)} gates{against}"
    if failed:
        rest = f"; {len(undecided)} more could not be decided" if undecided else ""
        return f"Failed: {several} ({reasons}){rest}."
    return f"Open, which does not pass: {several} had too little to tell ({reasons})."


def _all(gates: int) -> str:
    return "the one gate" if gates == 1 else f"all {gates} gates"


def _suite(findings: Findings) -> str:
    margin = f"a margin of {points(findings.margin, '.3g')} points"
    if findings.suite == "quick":
        return f"Suite quick: few samples and {margin}, which is wide, so a small loss would not be seen."
    return f"Suite {findings.suite}: {margin}."


def _doubts(findings: Findings) -> Iterator[str]:
    if bad := [check for check in checks(findings) if check.outcome == "bad"]:
        yield f"Read with care: {', '.join(check.name for check in bad)} (see Validity)."


def _noise(findings: Findings, arm: str, control: str) -> str:
    """The A/A control: what it differs by is the noise of everything else."""
    row = _last_row(findings, arm)
    ratio = f"{interval(row.ratio)} at {row.length:,} tokens" if row and row.ratio else "not measured"
    return f"{arm} is {control} under another name, and its ratio is the noise: {ratio}."


def _arm(findings: Findings, arm: str, control: str) -> str:
    parts = [_speed(findings, arm, control), _cost(findings, arm, control), _answers(findings, arm)]
    return f"{arm}: {'; '.join(part for part in parts if part)}."


def _last_row(findings: Findings, arm: str) -> Row | None:
    rows = [row for row in findings.speed.rows if row.arm == arm] if findings.speed else []
    return max(rows, key=lambda row: row.length, default=None)


def _speed(findings: Findings, arm: str, control: str) -> str:
    if findings.speed is None:
        return "its speed was not measured"
    row = _last_row(findings, arm)
    if row is None or row.ratio is None:
        reason = next((limit for limit in findings.speed.limits if _names(limit, arm)), None)
        # An arm that reads other prompts has no times to compare.
        return "its speed was not compared" if reason is None else f"its speed was not measured ({reason})"
    ratio = row.ratio
    at = f"at {row.length:,} tokens ({interval(ratio)} of {control}'s time)"
    if ratio.high < 1:
        start = _pays_from([one for one in findings.speed.rows if one.arm == arm])
        return f"the first token is sooner, {number(1 / ratio.estimate, '.2f')} times {at}, and it pays from {start} on"
    if ratio.low > 1:
        return f"the first token is later {at}"
    return f"no difference of the first token is shown {at}"


def _names(limit: str, arm: str) -> bool:
    """Whether a limit of `eval.speed` is this arm's: it begins with the names, then a colon."""
    return arm in limit.partition(": ")[0].split(", ")


def _pays_from(rows: Sequence[Row]) -> str:
    """The shortest length from which on the whole interval is below 1 at every measured length."""
    start = 0
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        if row.ratio is None or row.ratio.high >= 1:
            break
        start = row.length
    return f"{start:,} tokens"


def _cost(findings: Findings, arm: str, control: str) -> str:
    """What there is of ITL, throughput and memory, the arm's before the control's, and the failures."""
    told = [*_load(findings, arm, control), *_memory(findings, arm, control)]
    failed = failures_of(findings, arm)
    told.append(
        f"failures {', '.join(f'{n:,} in {stage}' for stage, n in failed.items())}" if failed else "no failures"
    )
    return f"cost against {control}: {', '.join(told)}"


def _load(findings: Findings, arm: str, control: str) -> Iterator[str]:
    both = _common_level(findings.levels, arm, control)
    if both is None:
        itl, other = _cases_itl(findings, arm), _cases_itl(findings, control)
        if itl is not None and other is not None:
            yield f"{ms(itl)} ms between tokens instead of {ms(other)}"
        return
    mine, others = both
    if mine.itl_p50 is not None and others.itl_p50 is not None:
        yield f"{ms(mine.itl_p50)} ms between tokens instead of {ms(others.itl_p50)}"
    rates = f"{number(mine.requests_per_s, '.3g')} requests/s instead of {number(others.requests_per_s, '.3g')}"
    yield f"{rates}, both at {mine.at_once:,} at once"


def _common_level(levels: Sequence[Level], arm: str, control: str) -> tuple[Level, Level] | None:
    """The busiest level that both have."""
    mine, others = ({level.at_once: level for level in levels if level.arm == name} for name in (arm, control))
    at_once = max(mine.keys() & others.keys(), default=None)
    return None if at_once is None else (mine[at_once], others[at_once])


def _cases_itl(findings: Findings, arm: str) -> float | None:
    known = [case.itl for case in findings.cases if case.arm == arm and case.itl is not None]
    return median(known) if known else None


def _memory(findings: Findings, arm: str, control: str) -> Iterator[str]:
    mine, others = _last_row(findings, arm), _last_row(findings, control)
    if mine and others and mine.memory is not None and others.memory is not None:
        taken, before = gib(mine.memory), gib(others.memory)
        yield f"as much memory, {taken}" if taken == before else f"memory {taken} instead of {before}"


def _answers(findings: Findings, arm: str) -> str:
    comparisons = findings.quality.comparisons if findings.quality else ()
    one = next((one for one in comparisons if one.arm == arm), None)
    if one is not None:
        return _truth(one, findings.margin)
    if is_warm(arm):
        return "reading early is exact, so its answers are those of an exact arm"
    return "whether its answers are as true was not measured"


def _truth(one: Comparison, margin: float) -> str:
    if one.verdict is None:
        return f"nothing can be said of its answers, for {one.control} itself scores too low in every task"
    found = one.verdict
    allowed = points(-margin, ".3g")
    over = f"difference {difference(found.difference)} points over {found.difference.n:,} pairs"
    bound = f"one-sided bound {points(found.lower_bound)}"
    if found.outcome == "non-inferior":
        return f"its answers are as true (non-inferior: {over}, {bound}, above {allowed})"
    if found.outcome == "inferior":
        return f"its answers are less true (inferior: {over}, worse than {allowed})"
    needed = "no number of pairs would settle it"
    if found.n_needed is not None:
        needed = f"about {found.n_needed:,} pairs would do"
    return f"whether its answers are as true is open (too few samples: {over}, {bound}, not above {allowed}; {needed})"
