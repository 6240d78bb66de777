"""How long a prompt will take, from the prompts read so far.

The cost of prefill is linear in the tokens computed (weights) plus linear in the query-key pairs (attention):
`t = a * n + b * n * (c + n / 2)` for n new tokens after c cached ones. Both coefficients are fitted to the
last observations, weighted so that relative errors count.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from scipy.optimize import nnls


class PrefillSpeed:
    """Fits and predicts prefill times."""

    def __init__(self, keep: int = 64) -> None:
        self._rows: deque[tuple[float, float, float]] = deque(maxlen=keep)
        self._fit: tuple[float, float] | None = None

    def observe(self, computed: int, cached: int, seconds: float) -> None:
        """Record that `computed` tokens after `cached` ones took `seconds`."""
        if computed <= 0 or seconds <= 0:
            return
        self._rows.append((*_costs(computed, cached), seconds))
        rows = np.array(self._rows)  # [observations, 3]
        coefficients, _ = nnls(rows[:, :2] / rows[:, 2:], np.ones(len(rows)))
        self._fit = (float(coefficients[0]), float(coefficients[1]))

    def estimate(self, computed: int, cached: int) -> float | None:
        """Predicted seconds, or None before the first observation."""
        if self._fit is None:
            return None
        tokens, pairs = _costs(computed, cached)
        return self._fit[0] * tokens + self._fit[1] * pairs


def _costs(computed: int, cached: int) -> tuple[float, float]:
    return float(computed), computed * (cached + computed / 2)
