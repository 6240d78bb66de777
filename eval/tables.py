"""Results as short tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eval.compare import Change
from eval.findings import Level
from eval.formats import NOTHING, count, difference, gib, interval, ms, number, points, share, tenths
from eval.quality import Bucket, Comparison, Report, Score
from eval.speed import Row, Speed

if TYPE_CHECKING:
    # It needs the whole service, which a table of speeds does not.
    from eval.volumes import Volumes, Way

_SPEED = (
    *(
        "tokens",
        "arm",
        "n",
        "TTFT ms",
        "queue",
        "read",
        "rest",
        "last",
        "longest step",
        "tokens/s",
        "cached",
        "path",
        "density",
    ),
    *("memory", "ratio to the first arm", "faster"),
)
SCORE_HEADS = ("task", "n", "score", "exact", "F1", "ROUGE-L", "supported", "")
_LEFT = ("arm", "asked", "path", "task", "")


def speed_table(speed: Speed) -> str:
    """One line an arm and length; times are medians in milliseconds, ratios are of TTFT with their 95% interval."""
    return _aligned(_SPEED, [_speed_cells(row) for row in speed.rows])


def quality_tables(report: Report) -> str:
    """The control's own scores when it is alone, else for each arm one line a task and length and its verdict."""
    if not report.comparisons:
        return _aligned(SCORE_HEADS, [score_cells(score) for score in report.scores])
    return "\n\n".join(
        f"{_aligned(bucket_heads(one), [bucket_cells(bucket) for bucket in one.buckets])}\n{_verdict(one)}"
        for one in report.comparisons
    )


def changes_table(changes: Sequence[Change]) -> str:
    """Figures of two runs, one a line."""
    rows = [
        (
            change.name,
            f"{change.before:,.4g} {change.unit}",
            f"{change.after:,.4g} {change.unit}",
            NOTHING if change.ratio is None else interval(change.ratio),
        )
        for change in changes
    ]
    return _aligned(("figure", "before", "after", "ratio on the same prompts"), rows)


def volumes_table(measured: Volumes) -> str:
    """The document, one line a way to ask, and the comparisons with their 95% intervals."""
    found = measured.comparison
    heads = ("asked", "n", "held", "right", "cited", "prompt tokens", "computed", "TTFT ms", "path")
    ratio = NOTHING if found.ttft is None else f"{interval(found.ttft)} (n {found.ttft.n})"
    left_out = f", {measured.left_out} left out: not on their pages as stored" if measured.left_out else ""
    warm = f"{measured.warm} of {measured.volumes} volumes warm after {measured.read_s:,.0f} s"
    return "\n".join(
        [
            f"{measured.pages:,} pages, {measured.tokens:,} tokens; {warm}; {found.asked} questions{left_out}",
            f"answered from a warm volume: {found.served} of {found.asked} ({found.served / found.asked:.0%})",
            "",
            _aligned(heads, [_way_cells(way) for way in found.ways]),
            "",
            f"right, auto - retrieve: {difference(found.right)} points",
            f"cited, auto - retrieve: {difference(found.cited)} points",
            f"TTFT, auto over filled: {ratio}",
        ]
    )


def levels_table(levels: Sequence[Level]) -> str:
    """One line a level; times are in milliseconds, and rates are of the requests that were answered."""
    heads = (
        *("at once", "n", "ok", "failed", "TTFT p50", "p90", "p99", "worst", "ITL p50", "p99"),
        *("req/s", "prompt tok/s", "output tok/s", "goodput", ""),
    )
    return _aligned(heads, [_level_cells(level) for level in levels])


def _level_cells(level: Level) -> tuple[str, ...]:
    failed = sum(level.failures.values())
    return (
        str(level.at_once),
        str(level.n),
        str(level.n - failed),
        ", ".join(f"{n} {kind}" for kind, n in level.failures.items()) or "0",
        ms(level.ttft_p50),
        ms(level.ttft_p90),
        ms(level.ttft_p99),
        ms(level.ttft_worst),
        tenths(level.itl_p50),
        tenths(level.itl_p99),
        f"{level.requests_per_s:.2f}",
        count(level.prompt_tokens_per_s),
        count(level.output_tokens_per_s),
        share(level.goodput),
        "knee" if level.knee else "",
    )


def _way_cells(way: Way) -> tuple[str, ...]:
    return (
        way.name,
        str(way.n),
        share(way.held),
        share(way.right),
        share(way.cited),
        count(way.prompt_tokens),
        count(way.computed_tokens),
        ms(way.ttft),
        ", ".join(f"{path} {n}" for path, n in way.paths.items()),
    )


def bucket_heads(comparison: Comparison) -> tuple[str, ...]:
    """What the columns of a comparison are called."""
    return ("task", "n", comparison.control, comparison.arm, "difference", "only one right", "p", "density", "")


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = zip(heads, row, widths, strict=True)
        lines.append(
            "  ".join(cell.ljust(width) if head in _LEFT else cell.rjust(width) for head, cell, width in cells)
        )
    return "\n".join(line.rstrip() for line in lines)


def _speed_cells(row: Row) -> tuple[str, ...]:
    return (
        count(row.prompt_tokens),
        row.arm,
        str(row.n),
        ms(row.ttft),
        ms(row.queue),
        ms(row.read),
        ms(row.rest),
        ms(row.last),
        ms(row.longest_step),
        count(row.tokens_per_s),
        count(row.cached_tokens),
        ", ".join(row.paths),
        share(row.density),
        gib(row.memory),
        NOTHING if row.ratio is None else interval(row.ratio),
        share(row.faster),
    )


def bucket_cells(bucket: Bucket) -> tuple[str, ...]:
    """A row under `bucket_heads`."""
    discordant = f"{bucket.mcnemar.only_control} / {bucket.mcnemar.only_treated}"
    return (
        bucket.name,
        str(bucket.difference.n),
        points(bucket.control, ".0f"),
        points(bucket.treated, ".0f"),
        difference(bucket.difference),
        discordant,
        number(bucket.p if bucket.informative else None, ".3f"),
        share(bucket.density),
        "" if bucket.informative else "not informative",
    )


def score_cells(score: Score) -> tuple[str, ...]:
    """A row under `SCORE_HEADS`."""
    measures = (score.score, score.exact, score.f1, score.rouge_l, score.supported)
    return (
        score.bucket,
        str(score.n),
        *(points(value, ".0f") for value in measures),
        "" if score.informative else "not informative",
    )


def _verdict(comparison: Comparison) -> str:
    agreement = "no answer to compare"
    if comparison.same_answer is not None and comparison.answer_f1 is not None:
        agreement = f"same answer {comparison.same_answer:.1%}, F1 between answers {comparison.answer_f1:.3f}"
    if comparison.same_first_token is not None and comparison.first_token_kl is not None:
        agreement += (
            f", same first token {comparison.same_first_token:.1%}, "
            f"first-token KL {comparison.first_token_kl:.2g} nats (largest {comparison.largest_kl:.2g})"
        )
    agreement += "".join(f"; {n} not read sparsely ({why})" for why, n in comparison.fallbacks.items())
    verdict = comparison.verdict
    if verdict is None:
        return f"{comparison.arm}: no verdict, nothing is informative; {agreement}"
    needed = "" if verdict.n_needed is None else f"; about {verdict.n_needed:,} pairs would do"
    found = difference(verdict.difference)
    return (
        f"{comparison.arm}: {verdict.outcome}{needed} (difference {found} points over {verdict.difference.n} pairs, "
        f"one-sided bound {points(verdict.lower_bound, '.1f')}); {agreement}"
    )
