"""What a report contains and in which order, however it is written: sections of paragraphs, lists, tables, charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.findings import Asked, Case, Findings, Level, Privacy, Rate
from eval.formats import NOTHING, count, difference, gib, interval, ms, number, points, share
from eval.quality import Answer, Comparison, Report
from eval.report.plots import load_chart, quality_chart, ttft_chart
from eval.report.validity import checks
from eval.report.verdict import verdict
from eval.speed import Row, Speed
from eval.tables import SCORE_HEADS, bucket_cells, bucket_heads, score_cells

_WORST = 10  # regressions that are shown
_LONGEST = 400  # characters of an answer


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells. `words` are the heads of the columns that hold words; all others hold figures."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...] = ("arm",)


@dataclass(frozen=True, slots=True)
class Chart:
    """An inline SVG with a caption."""

    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Points:
    """Paragraphs that are a list."""

    items: tuple[str, ...]


Part = str | Table | Chart | Points


@dataclass(frozen=True, slots=True)
class Section:
    """A title and what stands under it; the first one of a report is its opening."""

    title: str
    parts: tuple[Part, ...]


def title(findings: Findings) -> str:
    """What the report is of."""
    return f"Foreword, suite {findings.suite}: {', '.join(findings.arms) or 'no arms'}"


def sections(findings: Findings) -> tuple[Section, ...]:
    """The whole report: the verdict, what was demanded, each stage that was run, and whether to believe it."""
    return (
        _opening(findings),
        *_gates(findings),
        *([_speed(findings.speed)] if findings.speed else ()),
        *([_quality(findings.quality, findings.margin)] if findings.quality else ()),
        *_cases(findings.cases),
        *_load(findings),
        *_asked(findings.asked),
        *([_privacy(findings.privacy)] if findings.privacy else ()),
        *_regressions(findings),
        _validity(findings),
        _identity(findings),
    )


def _opening(findings: Findings) -> Section:
    chart = ttft_chart(findings.speed.rows, findings.arms) if findings.speed else ""
    caption = (
        "Time to first token, medians. Below, each arm's ratio to the control with its 95% interval: wholly under the "
        "line at 1 is sooner."
    )
    return Section("Verdict", (verdict(findings), *_charts((chart, caption))))


def _charts(*charts: tuple[str, str]) -> Iterator[Chart]:
    """Those that there was something to draw for."""
    for svg, caption in charts:
        if svg:
            yield Chart(svg, caption)


def _gates(findings: Findings) -> Iterator[Section]:
    if findings.gates:
        rows = tuple((gate.name, gate.outcome, gate.told) for gate in findings.gates)
        against = (f"Compared with the run {findings.baseline}.",) if findings.baseline else ()
        heads = ("gate", "outcome", "told")
        yield Section("Gates", (*against, Table(heads, rows, words=heads)))


def _speed(speed: Speed) -> Section:
    heads = (
        *("tokens", "arm", "n", "TTFT ms", "queue", "read", "rest", "longest step", "cached", "density", "memory"),
        *("ratio to the control", "faster"),
    )
    told = (
        "Times in milliseconds, medians over n prompts, but the longest engine step, which is the maximum. The ratio "
        "is that of geometric means over the same prompts with its 95% interval; faster is the share of prompts with "
        "the arm's first token before the control's. Memory is the peak so far of all that the arm's engine has done."
    )
    limits = (Points(speed.limits),) if speed.limits else ()
    return Section("Speed", (told, Table(heads, tuple(map(_speed_cells, speed.rows))), *limits))


def _speed_cells(row: Row) -> tuple[str, ...]:
    return (
        count(row.prompt_tokens),
        row.arm,
        str(row.n),
        ms(row.ttft),
        ms(row.queue),
        ms(row.read),
        ms(row.rest),
        ms(row.longest_step),
        count(row.cached_tokens),
        share(row.density),
        gib(row.memory),
        NOTHING if row.ratio is None else interval(row.ratio),
        share(row.faster),
    )


def _quality(report: Report, margin: float) -> Section:
    if not report.comparisons:
        told = "The control's own scores, in points; a task that is not informative would not count."
        return Section(
            "Quality", (told, Table(SCORE_HEADS, tuple(map(score_cells, report.scores)), words=("task", "")))
        )
    told = (
        f"Scores in points, paired over the same questions. A difference is that to the control with its 95% interval, "
        f"pooled over the informative tasks; the margin is {points(margin, '.3g')} points, against the one-sided bound."
    )
    agreement = (
        "Agreement does not need to be: a true answer may be worded otherwise. KL is the divergence of the first token "
        "in nats, over its likeliest tokens, a lower bound."
    )
    parts: list[Part] = [
        told,
        _pooled(report.comparisons),
        agreement,
        Table(
            ("arm", "same answer", "F1 between answers", "same first token", "first-token KL", "largest KL"),
            tuple(map(_agreement_cells, report.comparisons)),
        ),
    ]
    for one in report.comparisons:
        caption = (
            f"{one.arm} - {one.control}: differences with their 95% intervals, and the margin dashed. Tasks with "
            "hollow marks are not informative: the control itself scores too low there."
        )
        parts += _charts((quality_chart(one, margin), caption))
        parts.append(Table(bucket_heads(one), tuple(map(bucket_cells, one.buckets)), words=("task", "")))
    return Section("Quality", tuple(parts))


def _pooled(comparisons: Sequence[Comparison]) -> Table:
    heads = ("arm", "answers", "pairs", "contexts", "difference", "one-sided bound", "pairs needed")
    return Table(heads, tuple(map(_pooled_cells, comparisons)), words=("arm", "answers"))


def _pooled_cells(one: Comparison) -> tuple[str, ...]:
    found = one.verdict
    if found is None:
        return (one.arm, "nothing is informative", *[NOTHING] * 5)
    return (
        one.arm,
        found.outcome,
        count(found.difference.n),
        count(found.difference.contexts),
        difference(found.difference),
        points(found.lower_bound),
        count(found.n_needed),
    )


def _agreement_cells(one: Comparison) -> tuple[str, ...]:
    return (
        one.arm,
        number(one.same_answer, ".1%"),
        number(one.answer_f1, ".3f"),
        number(one.same_first_token, ".1%"),
        number(one.first_token_kl, ".2g"),
        number(one.largest_kl, ".2g"),
    )


def _cases(cases: Sequence[Case]) -> Iterator[Section]:
    if cases:
        heads = ("case", "arm", "passed", "prompt tokens", "TTFT ms", "between tokens ms", "total ms", "faults")
        told = "Everyday requests and whether they came out as they must; times are medians over what was answered."
        yield Section("Cases", (told, Table(heads, tuple(map(_case_cells, cases)), words=("case", "arm", "faults"))))


def _case_cells(case: Case) -> tuple[str, ...]:
    return (
        case.name,
        case.arm,
        f"{case.passed} of {case.n}",
        count(case.prompt_tokens),
        ms(case.ttft),
        _fine_ms(case.itl),
        ms(case.total),
        "; ".join(case.faults),
    )


def _fine_ms(seconds: float | None) -> str:
    """Times between tokens are so short that a whole millisecond is too coarse."""
    return number(None if seconds is None else 1000 * seconds, ",.1f")


def _load(findings: Findings) -> Iterator[Section]:
    if not findings.levels:
        return
    heads = (
        *("arm", "at once", "n", "TTFT p50 ms", "p90", "p99", "between tokens p50 ms", "p99", "requests/s"),
        *("prompt tokens/s", "output tokens/s", "goodput", "failures", ""),
    )
    told = (
        "So many requests are always in work. Goodput is the share of them that were answered within the limits set. "
        "The knee is where more at once begins to bring next to no more throughput. Below 300 answers the 99th "
        "percentile of TTFT is not given, but the worst of them."
    )
    if findings.kv_tokens is not None:
        told += f" The KV cache holds {count(findings.kv_tokens)} tokens."
    chart = (load_chart(findings.levels, findings.arms), "Time to first token and throughput under load.")
    table = Table(heads, tuple(map(_level_cells, findings.levels)), words=("arm", "failures", ""))
    yield Section("Load", (told, *_charts(chart), table))


def _level_cells(level: Level) -> tuple[str, ...]:
    worst = NOTHING if level.ttft_worst is None else f"worst {ms(level.ttft_worst)}"
    return (
        level.arm,
        count(level.at_once),
        count(level.n),
        ms(level.ttft_p50),
        ms(level.ttft_p90),
        worst if level.ttft_p99 is None else ms(level.ttft_p99),
        _fine_ms(level.itl_p50),
        _fine_ms(level.itl_p99),
        number(level.requests_per_s, ".3g"),
        count(level.prompt_tokens_per_s),
        count(level.output_tokens_per_s),
        share(level.goodput),
        ", ".join(f"{n:,} {kind}" for kind, n in level.failures.items()) or "0",
        "knee" if level.knee else "",
    )


def _asked(asked: Sequence[Asked]) -> Iterator[Section]:
    if asked:
        heads = ("way", "n", "right", "cited", "recall", "MRR", "supported", "TTFT ms")
        told = (
            "Documents and questions through the whole service. Recall is the share of questions whose page is among "
            "the passages found, MRR the mean of one over its rank; supported is the share of sentences that the "
            "context bears out. Shares have their exact 95% interval."
        )
        yield Section("Asked end to end", (told, Table(heads, tuple(map(_asked_cells, asked)), words=("way",))))


def _asked_cells(one: Asked) -> tuple[str, ...]:
    rates = (_rate(rate) for rate in (one.right, one.cited, one.recall))
    return (one.way, count(one.n), *rates, number(one.mrr, ".2f"), share(one.supported), ms(one.ttft))


def _rate(rate: Rate) -> str:
    if not rate.n:
        return NOTHING
    return f"{share(rate.share)} [{share(rate.low)}, {share(rate.high)}], {rate.hits:,} of {rate.n:,}"


def _privacy(privacy: Privacy) -> Section:
    rows = (
        *((f"found: {rate.name}", _rate(rate)) for rate in privacy.recall),
        ("taken for personal and is not", f"{privacy.false_alarms:,} in {privacy.words:,} words"),
    )
    told = "Personal data planted in documents, with exact 95% intervals."
    return Section("Privacy", (told, Table(("what", "measured"), rows, words=("what",))))


def _regressions(findings: Findings) -> Iterator[Section]:
    if findings.quality is None or not findings.quality.comparisons:
        return
    control = findings.quality.comparisons[0].control
    worst = regressions(findings.quality.answers, control)
    if not worst:
        yield Section("Largest regressions", ("No arm scores below the control in any question.",))
        return
    heads = ("arm", "question", "gold", "answer begins", f"{control} says", "score", "the arm says", "score")
    told = f"Questions in which an arm scores furthest below {control}, {len(worst)} at most {_WORST}."
    table = Table(heads, tuple(_regression_cells(*pair) for pair in worst), words=tuple(set(heads) - {"score"}))
    yield Section("Largest regressions", (told, table))


def regressions(answers: Sequence[Answer], control: str) -> tuple[tuple[Answer, Answer], ...]:
    """The control's and an arm's answer to one question, where the arm's scores lower; the largest losses first."""
    controls = {(one.context, one.question): one for one in answers if one.arm == control}
    pairs = [
        (controls[key], one)
        for one in answers
        if (key := (one.context, one.question)) in controls and one.score < controls[key].score
    ]
    return tuple(sorted(pairs, key=lambda pair: pair[1].score - pair[0].score)[:_WORST])


def _regression_cells(control: Answer, treated: Answer) -> tuple[str, ...]:
    return (
        treated.arm,
        f"{treated.bucket}, {treated.context}, question {treated.question + 1}",
        ", ".join(treated.gold),
        treated.lead,
        _said(control),
        points(control.score, ".0f"),
        _said(treated),
        points(treated.score, ".0f"),
    )


def _said(answer: Answer) -> str:
    if answer.served.error is not None:
        return f"(failed: {answer.served.error})"
    text = answer.served.text.strip()
    return (text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …") or "(nothing)"


def _validity(findings: Findings) -> Section:
    rows = tuple((check.name, check.outcome, check.told) for check in checks(findings))
    heads = ("check", "outcome", "told")
    notes = (*(findings.quality.skipped if findings.quality else ()), *findings.notes)
    there = {
        "speed": findings.speed,
        "quality": findings.quality,
        "cases": findings.cases,
        "load": findings.levels,
        "asked end to end": findings.asked,
        "privacy": findings.privacy,
    }
    missing = [stage for stage, found in there.items() if not found]
    return Section(
        "Validity",
        (
            *([Table(heads, rows, words=heads)] if rows else ()),
            *([f"Not part of this run: {', '.join(missing)}."] if missing else ()),
            *([Points(notes)] if notes else ()),
        ),
    )


def _identity(findings: Findings) -> Section:
    settings = {
        "suite": findings.suite,
        "arms": list(findings.arms),
        "margin": f"{points(findings.margin, '.3g')} points",
        "KV capacity": None if findings.kv_tokens is None else f"{count(findings.kv_tokens)} tokens",
        "baseline": findings.baseline,
    }
    # What the run says of itself stands; the same in short is for runs that say nothing.
    rows = tuple(_flat({**{name: value for name, value in settings.items() if value}, **findings.about}))
    return Section("Identity", (Table(("name", "value"), rows, words=("name", "value")),))


def _flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every setting as a line, named by the way to it; parts of lists by their own names, else by their numbers."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _flat(part, (*path, str(name)))
    elif isinstance(value, list | tuple) and any(isinstance(part, Mapping | list | tuple) for part in value):
        for place, part in enumerate(value, start=1):
            name = part.get("name", place) if isinstance(part, Mapping) else place
            yield from _flat(part, (*path, str(name)))
    else:
        yield " › ".join(path), _value(value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, "g")
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or NOTHING
    return NOTHING if value is None or value == {} or value == "" else str(value)
