"""Prefill times: the fit finds a machine's coefficients again, and nonsense does not disturb it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.prefill_speed import PrefillSpeed

# Seconds per step, per token and per query-key pair: about those of two cores, one card, and a pure-attention machine.
MACHINES = {
    "two cores": (0.05, 2e-3, 1e-7),
    "one card": (0.01, 2e-5, 2e-10),
    "no overhead": (0.0, 1e-3, 1e-8),
    "only attention": (0.0, 0.0, 1e-7),
}


def _seconds(machine: tuple[float, float, float], computed: int, cached: int) -> float:
    """The cost as an independent sum: each new token looks at all before it and, half of the time, at itself."""
    step, token, pair = machine
    return step + token * computed + pair * (computed * cached + computed**2 / 2)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("noise", [0.0, 0.02], ids=["exact", "2% noise"])
def test_known_coefficients_are_predicted_within_five_percent(
    machine: tuple[float, float, float], noise: float
) -> None:
    draw = random.Random(1)
    speed = PrefillSpeed()
    for _ in range(64):
        computed, cached = draw.randint(16, 8000), draw.choice([0, draw.randint(0, 20_000)])
        speed.observe(computed, cached, _seconds(machine, computed, cached) * draw.uniform(1 - noise, 1 + noise))
    for computed, cached in [(64, 0), (64, 16_000), (500, 7500), (8000, 0), (8000, 8000), (16_000, 16_000)]:
        assert speed.estimate(computed, cached) == pytest.approx(_seconds(machine, computed, cached), rel=0.05)


def test_nothing_is_predicted_before_the_first_observation() -> None:
    assert PrefillSpeed().estimate(100, 0) is None


def test_one_observation_is_enough_to_predict_it_again() -> None:
    speed = PrefillSpeed()
    speed.observe(1000, 500, 2.5)
    assert speed.estimate(1000, 500) == pytest.approx(2.5)


def test_only_the_last_observations_count() -> None:
    speed = PrefillSpeed(keep=8)
    for seconds_per_token in (1.0, 0.001):
        for computed in range(100, 900, 100):
            speed.observe(computed, 0, seconds_per_token * computed)
    assert speed.estimate(500, 0) == pytest.approx(0.5)


NONSENSE = {
    "no tokens": (0, 100, 1.0),
    "negative tokens": (-5, 0, 1.0),
    "negative cache": (100, -200, 1.0),
    "no time": (100, 0, 0.0),
    "time runs backwards": (100, 0, -1.0),
    "time is not a number": (100, 0, math.nan),
    "time without end": (100, 0, math.inf),
}


@pytest.mark.parametrize("observation", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_changes_nothing(observation: tuple[int, int, float]) -> None:
    speed = PrefillSpeed()
    speed.observe(*observation)
    assert speed.estimate(100, 0) is None
    speed.observe(100, 0, 1.0)
    speed.observe(*observation)
    assert speed.estimate(100, 0) == pytest.approx(1.0)


@settings(deadline=None, max_examples=50)
@given(
    observations=st.lists(
        st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(1e-6, 1e6)), min_size=1, max_size=12
    ),
    computed=st.integers(0, 10**6),
    cached=st.integers(0, 10**6),
)
def test_an_estimate_is_finite_and_never_negative(
    observations: list[tuple[int, int, float]], computed: int, cached: int
) -> None:
    speed = PrefillSpeed()
    for observation in observations:
        speed.observe(*observation)
    estimate = speed.estimate(computed, cached)
    assert estimate is not None
    assert 0 <= estimate < math.inf
    more = speed.estimate(computed + 1, cached)
    assert more is not None
    assert more >= estimate
