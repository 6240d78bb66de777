"""Figures as text, alike in every table; what is not known is a dash."""

from __future__ import annotations

import math

from eval.statistics import Difference, Interval

NOTHING = "-"


def number(value: float | None, form: str) -> str:
    """A figure in a format of its own; an end that is not bounded is the sign of infinity."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return format(value, form)


def share(value: float | None) -> str:
    """A share of 1 in percent."""
    return number(value, ".0%")


def count(value: float | None) -> str:
    """A whole figure with its thousands apart."""
    return number(value, ",.0f")


def ms(seconds: float | None) -> str:
    """Seconds in milliseconds."""
    return number(None if seconds is None else 1000 * seconds, ",.0f")


def tenths(seconds: float | None) -> str:
    """Seconds in milliseconds that are few."""
    return number(None if seconds is None else 1000 * seconds, ",.1f")


def gib(size: float | None) -> str:
    """Bytes in GiB."""
    return NOTHING if size is None else f"{size / 2**30:.1f} GiB"


def points(value: float | None, form: str = "+.1f") -> str:
    """A share of 1 in points."""
    return number(None if value is None else 100 * value, form)


def difference(found: Difference) -> str:
    """Points with their 95% interval."""
    return f"{points(found.estimate)} [{points(found.low)}, {points(found.high)}]"


def interval(ratio: Interval) -> str:
    """A ratio with its 95% interval."""
    return f"{number(ratio.estimate, '.3f')} [{number(ratio.low, '.3f')}, {number(ratio.high, '.3f')}]"
