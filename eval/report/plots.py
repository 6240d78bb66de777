"""Charts as inline SVG: pure functions from findings to text.

Colours come from the page's style by class (`arm0`, `arm1`, ..., `axis`, `grid`), so that light and dark both work.
What differs in colour differs in the shape of its marks, too. Positions are in the units of the view box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from unicodedata import east_asian_width

from eval.findings import Level
from eval.formats import difference, number
from eval.quality import Comparison
from eval.speed import Row
from eval.statistics import Difference

COLOURS = 6  # that the style has; the marks go on

_WIDTH = 760.0
_LEFT = 64.0  # room for the values of a y axis
_SIZE = 12.0  # of text
_LINE = 16.0  # from one line of text to the next
_MARK = 4.5
_FARTHEST = 2.0  # that an interval is drawn to, times the largest ratio
_LABEL = 24  # characters of a label before it is cut


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values to positions; values outside land on the nearer edge, as infinite ends do."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class _Panel:
    """An area with both scales; x goes right and y goes up."""

    x: _Scale
    y: _Scale


def ttft_chart(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """TTFT against prompt length for each arm, logarithmic, above each arm's ratio to the control with its interval.

    Nothing where no length was read.
    """
    if not rows:
        return ""
    lengths = sorted({row.length for row in rows})
    x = _Scale(*_widened(lengths, 1.15), _LEFT, _right(arms), log=True)
    times = _Panel(x, _Scale(*_widened([row.ttft for row in rows], 1.3), 290, 34, log=True))
    ratios = [row for row in rows if row.ratio is not None]
    parts = [_y_axis(times, _ticks(times.y), _seconds, "time to first token (log)")]
    ends: list[tuple[float, str, int]] = []
    for place, arm in enumerate(arms):
        mine = sorted((row for row in rows if row.arm == arm), key=lambda row: row.length)
        spots = [(x(row.length), times.y(row.ttft)) for row in mine]
        if spots:
            hints = [f"{arm}, {row.length:,} tokens: {_seconds(row.ttft)}" for row in mine]
            parts.append(_series(spots, place, hints))
            ends.append((spots[-1][1], arm, place))
    parts += _labels(ends, times)
    height = 350.0
    if ratios:
        # One wild interval would press all others onto the line; its end lands on the edge.
        found = [1.0, *(row.ratio.estimate for row in ratios if row.ratio)]
        low, high = min(found) / _FARTHEST, max(found) * _FARTHEST
        bounds = [min(max(end, low), high) for row in ratios for end in _finite(row)]
        panel = _Panel(x, _Scale(*_widened([*bounds, 1.0], 1.15), 500, 376, log=True))
        parts += [_y_axis(panel, _ticks(panel.y, 4), _plain, f"ratio to {_cut(arms[0])}, 95% interval (log)")]
        parts += [_rule(panel, panel.y(1.0), "one"), *_ratio_bars(ratios, arms, panel)]
        height = 560.0
    bottom = height - 60
    parts.append(_x_axis(x, bottom, _apart(x, lengths, _plain), _plain, "prompt length, tokens (log)"))
    told = "; ".join(f"{row.arm} at {row.length:,} tokens {_seconds(row.ttft)}" for row in rows)
    return _svg(height, "Time to first token against prompt length", told, parts)


def quality_chart(comparison: Comparison, margin: float) -> str:
    """The difference in score to the control, by bucket and over all that counts, with 95% intervals and the margin.

    Buckets that are not informative have hollow marks and do not count.
    """
    found = [(one.name, one.difference, one.informative) for one in comparison.buckets]
    if comparison.verdict is not None:
        found.append(("all that counts", comparison.verdict.difference, True))
    if not found:
        return ""
    ends = [100 * end for _, one, _ in found for end in (one.low, one.high)] + [-100 * margin, 0.0]
    label = max(_text_width(_cut(name)) for name, _, _ in found) + 24
    pad = (max(ends) - min(ends)) * 0.04
    x = _Scale(min(ends) - pad, max(ends) + pad, label, _WIDTH - 152, log=False)
    top, step = 44.0, 22.0
    bottom = top + step * len(found)
    parts = [_x_axis(x, bottom, _ticks(x, 6), _signed, f"{_cut(comparison.arm)} - {_cut(comparison.control)}, points")]
    for value, name, told in ((0.0, "one", ""), (-100 * margin, "margin", f"margin {_signed(-100 * margin)}")):
        parts.append(f'<line class="{name}" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top - 8}" y2="{bottom:.1f}"/>')
        parts.append(_text(x(value), top - 16, told, "middle"))
    for place, (name, one, counts) in enumerate(found):
        parts.append(
            _forest_row(name, one, counts, x, top + step * (place + 0.5), pooled=place == len(comparison.buckets))
        )
    told = "; ".join(f"{name} {difference(one)}" for name, one, _ in found)
    title = f"Difference in score, {comparison.arm} - {comparison.control}"
    return _svg(bottom + 60, title, told, parts)


def load_chart(levels: Sequence[Level], arms: Sequence[str]) -> str:
    """TTFT at the median and the 90th percentile, and requests answered, against requests at once; knees are ringed."""
    if not levels:
        return ""
    counts = sorted({level.at_once for level in levels})
    x = _Scale(*_widened(counts, 1.15), _LEFT, _right(arms), log=True)
    known = [value for level in levels for value in (level.ttft_p50, level.ttft_p90) if value]
    times = _Panel(x, _Scale(*_widened(known or [1.0], 1.3), 250, 58, log=True))
    rates = _Panel(x, _Scale(0.0, max(level.requests_per_s for level in levels) * 1.1 or 1.0, 446, 306, log=False))
    parts = [
        _y_axis(times, _ticks(times.y), _seconds, "time to first token (log)"),
        _y_axis(rates, _ticks(rates.y, 4), _plain, "requests answered per second"),
        _x_axis(x, 446, _apart(x, counts, _plain), _plain, "requests at once (log)"),
        _legend(),
    ]
    ends: list[tuple[float, str, int]] = []
    rate_ends: list[tuple[float, str, int]] = []
    for place, arm in enumerate(arms):
        mine = sorted((level for level in levels if level.arm == arm), key=lambda level: level.at_once)
        medians = [(level, level.ttft_p50) for level in mine if level.ttft_p50]
        tails = [(level, level.ttft_p90) for level in mine if level.ttft_p90]
        for name, kind, times_of in (("p90", "hollow", tails), ("p50", "", medians)):
            spots = [(x(level.at_once), times.y(value)) for level, value in times_of]
            hints = [f"{arm}, {level.at_once:,} at once, {name}: {_seconds(value)}" for level, value in times_of]
            parts.append(_series(spots, place, hints, kind))
        if medians:
            ends.append((times.y(medians[-1][1]), arm, place))
        if mine:
            spots = [(x(level.at_once), rates.y(level.requests_per_s)) for level in mine]
            hints = [f"{arm}, {level.at_once:,} at once: {_plain(level.requests_per_s)} requests/s" for level in mine]
            parts.append(_series(spots, place, hints))
            parts += [_ring(*spot, place) for spot, level in zip(spots, mine, strict=True) if level.knee]
            rate_ends.append((spots[-1][1], arm, place))
    parts += [*_labels(ends, times), *_labels(rate_ends, rates)]
    told = "; ".join(f"{one.arm}, {one.at_once:,} at once: {_plain(one.requests_per_s)} requests/s" for one in levels)
    return _svg(506, "Time to first token and throughput against requests at once", told, parts)


def _ratio_bars(rows: Sequence[Row], arms: Sequence[str], panel: _Panel) -> Iterator[str]:
    """Intervals as bars; those of one length stand side by side."""
    compared = [arm for arm in arms if any(row.arm == arm for row in rows)]
    for row in rows:
        if row.ratio is None or row.arm not in compared:
            continue
        shift = (compared.index(row.arm) - (len(compared) - 1) / 2) * 11
        x, place = panel.x(row.length) + shift, arms.index(row.arm)
        low, high = panel.y(row.ratio.low), panel.y(row.ratio.high)
        told = f"{row.arm}, {row.length:,} tokens: {number(row.ratio.estimate, '.3f')} of the control's time"
        yield (
            f'<g class="{_class(place)}"><path class="bar" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
            f"{_mark(x, panel.y(row.ratio.estimate), place, told)}</g>"
        )


def _finite(row: Row) -> Iterator[float]:
    """What of a ratio a logarithmic scale can hold; an end that is not bounded reaches the edge."""
    for value in (row.ratio.low, row.ratio.estimate, row.ratio.high) if row.ratio else ():
        if 0 < value < math.inf:
            yield value


def _forest_row(name: str, one: Difference, counts: bool, x: _Scale, y: float, *, pooled: bool) -> str:
    low, high, middle = (x(100 * value) for value in (one.low, one.high, one.estimate))
    kind = "" if counts else "hollow"
    return (
        f'<g class="{_class(1)} {kind}">{_text(x.start - 12, y + 4, _cut(name), "end", "strong" if pooled else "")}'
        f'<path class="bar" d="M{low:.1f} {y:.1f}H{high:.1f}"/>{_mark(middle, y, 3 if pooled else 0, name)}</g>'
        f"{_text(_WIDTH - 140, y + 4, difference(one))}"
    )


def _series(spots: Sequence[tuple[float, float]], place: int, hints: Sequence[str], kind: str = "") -> str:
    """One line with its marks, in an arm's colour and shape."""
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
    marks = "".join(_mark(x, y, place, hint) for (x, y), hint in zip(spots, hints, strict=True))
    return f'<g class="{_class(place)} {kind}"><path class="line" d="M{line}"/>{marks}</g>' if spots else ""


def _class(place: int) -> str:
    return f"arm{place % COLOURS}"


def _mark(x: float, y: float, place: int, hint: str = "") -> str:
    """A circle, square, triangle, diamond, star or reversed triangle, told when pointed at."""
    path = _SHAPES[place % len(_SHAPES)]
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<path class="mark" transform="translate({x:.1f} {y:.1f}) scale({_MARK})" d="{path}">{title}</path>'


_SHAPES = (
    "M1 0A1 1 0 1 1-1 0A1 1 0 1 1 1 0Z",
    "M-.9-.9H.9V.9H-.9Z",
    "M0-1.15L1.1.9H-1.1Z",
    "M0-1.3L1.2 0L0 1.3L-1.2 0Z",
    "M-.35-1.1H.35V-.35H1.1V.35H.35V1.1H-.35V.35H-1.1V-.35H-.35Z",
    "M0 1.15L1.1-.9H-1.1Z",
    "M-.5-1.1H.5L1.1 0L.5 1.1H-.5L-1.1 0Z",
)


def _ring(x: float, y: float, place: int) -> str:
    return f'<circle class="ring {_class(place)}" cx="{x:.1f}" cy="{y:.1f}" r="10"/>'


def _legend() -> str:
    """How the load chart tells median, tail and knee apart, for all arms."""
    ring = '<circle class="ring axis" cx="330" cy="14" r="7"/>'
    filled = f'<g class="plain">{_mark(70, 14, 0)}</g>'
    hollow = f'<g class="plain hollow">{_mark(170, 14, 0)}</g>'
    words = (
        _text(80, 18, "median"),
        _text(180, 18, "90th percentile"),
        _text(343, 18, "knee: more at once brings little"),
    )
    return filled + hollow + ring + "".join(words)


def _right(arms: Sequence[str]) -> float:
    """Where a panel ends, so that the names of the lines have room beside it."""
    return _WIDTH - 36 - max(_text_width(_cut(arm)) for arm in arms)


def _labels(ends: Sequence[tuple[float, str, int]], panel: _Panel) -> Iterator[str]:
    """Names at the right of the lines, moved apart where lines end close together."""
    lowest = -math.inf
    # So many labels below each other may need to begin higher than where their lines end.
    room = panel.y.start + 8
    ordered = sorted(ends)
    for left, (y, name, place) in zip(range(len(ordered) - 1, -1, -1), ordered, strict=True):
        lowest = max(min(y, room - left * _LINE), lowest + _LINE)
        x = panel.x.end + 16
        yield f'<g class="{_class(place)}">{_mark(x, lowest, place, name)}</g>{_text(x + 12, lowest + 4, _cut(name))}'


def _y_axis(panel: _Panel, ticks: Sequence[float], told: Callable[[float], str], name: str) -> str:
    """Grid lines with their values at the left and the axis' name above."""
    lines = [
        f"{_rule(panel, panel.y(tick), 'grid')}{_text(panel.x.start - 8, panel.y(tick) + 4, told(tick), 'end')}"
        for tick in ticks
    ]
    return "".join(lines) + _text(8, panel.y.end - 12, name, "start", "strong")


def _x_axis(x: _Scale, y: float, ticks: Sequence[float], told: Callable[[float], str], name: str) -> str:
    lines = [
        f'<path class="axis" d="M{x(tick):.1f} {y:.1f}v5"/>{_text(x(tick), y + 20, told(tick), "middle")}'
        for tick in ticks
    ]
    axis = f'<path class="axis" d="M{x.start:.1f} {y:.1f}H{x.end:.1f}"/>'
    return axis + "".join(lines) + _text((x.start + x.end) / 2, y + 42, name, "middle", "strong")


def _rule(panel: _Panel, y: float, name: str) -> str:
    return f'<line class="{name}" x1="{panel.x.start}" x2="{panel.x.end}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    if not text:
        return ""
    look = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{escape(text)}</text>'


def _svg(height: float, title: str, told: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" viewBox="0 0 {_WIDTH:.0f} {height:.0f}">'
        f"<title>{escape(title)}</title><desc>{escape(told)}</desc>{''.join(parts)}</svg>"
    )


def _widened(values: Sequence[float], factor: float) -> tuple[float, float]:
    """The range of positive values with some room at both ends of a logarithmic scale."""
    return min(values) / factor, max(values) * factor


def _ticks(scale: _Scale, most: int = 6) -> list[float]:
    """At most so many round values of a scale: 1, 2 and 5 times powers of ten, evenly spaced where it is linear."""
    if scale.log and scale.high / scale.low > 2.5:
        first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
        for steps in ((1, 2, 5), (1, 3), (1,)):
            ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            if len(ticks := [tick for tick in ticks if scale.low <= tick <= scale.high]) <= most:
                break
        return ticks[:: math.ceil(len(ticks) / most)]
    exact = (scale.high - scale.low) / most
    power = 10.0 ** math.floor(math.log10(exact))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= exact)
    first = math.ceil(scale.low / step - 1e-9)
    # Counted rather than added up, so that rounding never gathers.
    return [place * step for place in range(first, math.floor(scale.high / step + 1e-9) + 1)]


def _apart(x: _Scale, values: Sequence[float], told: Callable[[float], str]) -> list[float]:
    """Those measured values whose labels leave room for each other; the longest is always among them."""
    kept: list[float] = []
    for value in sorted(values, reverse=True):
        if not kept or x(kept[-1]) - x(value) > (_text_width(told(value)) + _text_width(told(kept[-1]))) / 2 + 8:
            kept.append(value)
    return kept


def _text_width(text: str) -> float:
    """About how wide a text is; Chinese characters take a whole square."""
    return sum(_SIZE if east_asian_width(char) in "WF" else 0.58 * _SIZE for char in text)


def _cut(name: str) -> str:
    return name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…"


def _seconds(value: float) -> str:
    return f"{number(value, ',.3g')} s" if value >= 1 else f"{number(1000 * value, '.3g')} ms"


def _plain(value: float) -> str:
    return number(value, ",.0f" if value >= 100 else ".3g")


def _signed(value: float) -> str:
    return "0" if abs(value) < 1e-9 else number(value, "+.3g")
