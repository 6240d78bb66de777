"""How long a prompt will take, from the prompts read so far.

The cost of prefill is a constant (one step's overhead), plus the tokens computed (weights), plus the query-key pairs
(attention): `t = s + a * n + b * n * (c + n / 2)` for n new tokens after c cached ones. The three coefficients are
fitted to the last observations, weighted so that relative errors count.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from scipy.optimize import nnls


class PrefillSpeed:
    """Fits and predicts prefill times."""

    def __init__(self, keep: int = 64) -> None:
        self._costs: deque[tuple[float, float, float]] = deque(maxlen=keep)
        self._seconds: deque[float] = deque(maxlen=keep)
        self._coefficients: tuple[float, ...] = ()

    def observe(self, computed: int, cached: int, seconds: float) -> None:
        """Record that `computed` tokens after `cached` ones took `seconds`."""
        if computed <= 0 or cached < 0 or not 0 < seconds < math.inf:
            return
        self._costs.append(_costs(computed, cached))
        self._seconds.append(seconds)
        relative = np.array(self._costs) / np.array(self._seconds)[:, None]  # [observations, 3]
        coefficients, _ = nnls(relative, np.ones(len(relative)))
        self._coefficients = tuple(float(value) for value in coefficients)

    def estimate(self, computed: int, cached: int) -> float | None:
        """Predicted seconds, or None before the first observation."""
        if not self._coefficients:
            return None
        return sum(k * cost for k, cost in zip(self._coefficients, _costs(computed, cached), strict=True))


def _costs(computed: int, cached: int) -> tuple[float, float, float]:
    return 1.0, float(computed), computed * (cached + computed / 2)
