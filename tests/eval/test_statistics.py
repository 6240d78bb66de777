"""Known answers of small tables; coverage, error rates and power of what is random, by simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from eval.statistics import (
    Interval,
    McNemar,
    Pair,
    holm,
    loss,
    mcnemar,
    non_inferiority,
    paired_difference,
    ratio_of_geometric_means,
)

Generator = np.random.Generator

steady = settings(deadline=None, derandomize=True, database=None, max_examples=30)
seconds = st.floats(0.01, 1000)
timed = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12)
scores = st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 2 / 3, 1.0])
scored = st.lists(st.builds(Pair, st.sampled_from("abcdefgh"), scores, scores), min_size=1, max_size=40)


def table(ties: int = 0, losses: int = 0, gains: int = 0, per_context: int = 1) -> list[Pair]:
    """Right/wrong items, `per_context` neighbours to a context."""
    outcomes = [(1.0, 1.0)] * ties + [(0.0, 1.0)] * losses + [(1.0, 0.0)] * gains
    return [Pair(f"context {place // per_context}", *outcome) for place, outcome in enumerate(outcomes)]


def swapped(pairs: Sequence[Pair]) -> list[Pair]:
    return [Pair(pair.context, pair.control, pair.treated) for pair in pairs]


@dataclass(frozen=True)
class Regime:
    """Items of contexts of 1 to `most` that lose or gain together, with a share `discordant` of both."""

    contexts: int
    most: int
    discordant: float
    difference: float
    correlation: float = 0.0
    fractional: bool = False

    def samples(self, number: int) -> Iterator[list[Pair]]:
        """Data sets; the same ones each time."""
        rng = np.random.default_rng(17)
        for _ in range(number):
            yield self._sample(rng)

    def _sample(self, rng: Generator) -> list[Pair]:
        # Fractional items differ by 2/3 on average, so more of them differ.
        scale = 1.5 if self.fractional else 1.0
        discordant, difference = scale * self.discordant, scale * self.difference
        chances = [(discordant - difference) / 2, (discordant + difference) / 2, 1 - discordant]
        context = np.repeat(np.arange(self.contexts), rng.integers(1, self.most + 1, self.contexts))
        common = rng.choice([-1.0, 1.0, 0.0], self.contexts, p=chances)[context]
        own = rng.choice([-1.0, 1.0, 0.0], len(context), p=chances)
        # Two items both follow their context with this chance squared, which is then their correlation.
        change = np.where(rng.random(len(context)) < math.sqrt(self.correlation), common, own)
        if self.fractional:
            change *= rng.choice([1 / 3, 2 / 3, 1.0], len(context))
        treated, control = np.where(change < 0, 1 + change, 1), np.where(change > 0, 1 - change, 1)
        return [Pair(str(c), t, k) for c, t, k in zip(context, treated.tolist(), control.tolist(), strict=True)]


def at_most(rate: float, number: int) -> float:
    """Highest share of `number` trials that a true rate of `rate` gives but once in a thousand tests."""
    return float(stats.binom.isf(0.001, number, rate)) / number


# --- ratio of geometric means


def test_ratio_of_two_and_three_is_students_t() -> None:
    for ratios in ([1.1, 1.3], [0.5, 0.7, 0.6]):
        logs = np.log(ratios)
        expected = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
        interval = ratio_of_geometric_means(ratios, [1.0] * len(ratios), seed=0)
        assert interval.estimate == pytest.approx(stats.gmean(ratios))
        assert (interval.low, interval.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


def test_one_ratio_has_no_bounds() -> None:
    assert ratio_of_geometric_means([4.0], [4.0], seed=0) == Interval(1.0, 0.0, math.inf, 1)


def test_equal_ratios_are_a_point() -> None:
    interval = ratio_of_geometric_means([0.3, 0.6, 1.2, 2.4], [0.1, 0.2, 0.4, 0.8], seed=0)
    assert interval.low == interval.estimate == interval.high == pytest.approx(3.0)


def test_a_ratio_that_no_resample_can_bound_is_open() -> None:
    """A third of the resamples of three equal values and one other are of one value alone."""
    interval = ratio_of_geometric_means([1.0, 1.0, 1.0, 2.0], [1.0] * 4, seed=0)
    assert interval.high == math.inf


def test_a_resample_of_the_mean_alone_is_no_surprise() -> None:
    interval = ratio_of_geometric_means([1.0, 2.0, 4.0, 2.0, 2.0, 2.0], [1.0] * 6, seed=0)
    assert interval.low <= interval.estimate == pytest.approx(2.0)
    assert interval.estimate <= interval.high


@pytest.mark.parametrize("treated", [[], [1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.inf], [1.0, math.nan]])
def test_ratio_refuses(treated: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one pair of positive"):
        ratio_of_geometric_means(treated, [1.0, 1.0] if treated else [], seed=0)


@steady
@given(timed, st.sampled_from([0.125, 1000.0]))
def test_ratio_knows_no_unit_and_no_order(values: list[tuple[float, float]], unit: float) -> None:
    treated, control = zip(*values, strict=True)
    interval = ratio_of_geometric_means(treated, control, seed=1, draws=200)
    assert ratio_of_geometric_means(treated, control, seed=1, draws=200) == interval
    assert ratio_of_geometric_means(treated[::-1], control[::-1], seed=1, draws=200) == interval
    scaled = ratio_of_geometric_means([unit * value for value in treated], control, seed=1, draws=200)
    assert scaled.estimate == pytest.approx(unit * interval.estimate)
    assert (scaled.low, scaled.high) == pytest.approx((unit * interval.low, unit * interval.high), rel=1e-6)


@steady
@given(timed)
def test_exchanging_the_arms_inverts_the_ratio(values: list[tuple[float, float]]) -> None:
    treated, control = zip(*values, strict=True)
    there = ratio_of_geometric_means(treated, control, seed=1, draws=200)
    back = ratio_of_geometric_means(control, treated, seed=1, draws=200)
    assert back.estimate == pytest.approx(1 / there.estimate)
    assert there.low <= there.estimate <= there.high


@pytest.mark.parametrize("n", [3, 5, 20])
@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(lambda rng, n: rng.normal(0, 0.1, n), id="normal"),
        pytest.param(lambda rng, n: 0.1 * (rng.exponential(size=n) - 1), id="skewed"),
    ],
)
def test_coverage_of_the_ratio(n: int, noise: Callable[[Generator, int], NDArray[np.float64]]) -> None:
    rng, number = np.random.default_rng(3), 400
    missed = 0
    for trial in range(number):
        interval = ratio_of_geometric_means(list(np.exp(0.3 + noise(rng, n))), [1.0] * n, seed=trial, draws=1000)
        missed += not interval.low <= math.exp(0.3) <= interval.high
    # Three skewed values get Student's t, which misses about one in ten.
    assert missed / number <= at_most(0.10 if n == 3 else 0.06, number)


# --- paired difference


@pytest.mark.parametrize(("n", "losses"), [(20, 0), (160, 0), (100, 3), (400, 40)])
def test_bound_of_losses_alone_is_clopper_pearsons(n: int, losses: int) -> None:
    pairs = table(ties=n - losses, losses=losses)
    expected = stats.binomtest(losses, n).proportion_ci(0.95, method="exact").high
    assert paired_difference(pairs, seed=0).low == pytest.approx(-expected, rel=0.03)
    one_sided = stats.binomtest(losses, n, alternative="less").proportion_ci(0.95, method="exact").high
    assert non_inferiority(pairs, 0.05, seed=0).lower_bound == pytest.approx(-one_sided, rel=0.03)


def test_difference_is_a_mean_over_pairs() -> None:
    pairs = [Pair("long", 1.0, 0.5), Pair("long", 1.0, 0.5), Pair("long", 0.5, 0.5), Pair("short", 0.0, 1.0)]
    difference = paired_difference(pairs, seed=0)
    assert difference.estimate == pytest.approx(0.0)
    assert (difference.n, difference.contexts) == (4, 2)


def test_many_contexts_give_the_normal_interval() -> None:
    pairs = table(ties=1400, losses=100, gains=100)
    difference = paired_difference(pairs, seed=0)
    half = 1.96 * math.sqrt(0.125 / 1600)
    assert (difference.low, difference.high) == pytest.approx((-half, half), rel=0.06)


def test_items_that_fall_together_count_as_fewer() -> None:
    """Four equal items to a context tell what one tells."""
    apart = paired_difference(table(ties=280, losses=60, gains=60), seed=0)
    together = paired_difference(table(ties=280, losses=60, gains=60, per_context=4), seed=0)
    assert together.estimate == apart.estimate
    assert together.high - together.low == pytest.approx(2 * (apart.high - apart.low), rel=0.1)


def test_everything_lost() -> None:
    difference = paired_difference(table(losses=80, per_context=8), seed=0)
    assert difference.low == difference.estimate == -1
    assert -1 < difference.high < -0.5


@steady
@given(scored, st.randoms(use_true_random=False))
def test_difference_knows_no_order_and_mirrors(pairs: list[Pair], shuffle: random.Random) -> None:
    difference = paired_difference(pairs, seed=2, draws=500)
    assert -1 <= difference.low <= difference.estimate <= difference.high <= 1
    mixed = sorted(pairs, key=lambda _: shuffle.random())
    assert paired_difference(mixed, seed=2, draws=500) == difference
    mirrored = paired_difference(swapped(pairs), seed=2, draws=500)
    assert (mirrored.low, mirrored.high) == pytest.approx((-difference.high, -difference.low))


@pytest.mark.parametrize(
    "regime",
    [
        pytest.param(Regime(30, 1, 0.3, 0.0), id="one item each"),
        pytest.param(Regime(60, 1, 0.02, -0.02), id="hardly any"),
        pytest.param(Regime(40, 8, 0.2, -0.1, 0.3), id="correlated"),
        pytest.param(Regime(40, 8, 0.1, 0.1, 0.6), id="gains alone, strongly correlated"),
        pytest.param(Regime(100, 4, 0.3, -0.05, 0.3, fractional=True), id="fractional"),
    ],
)
def test_coverage_of_the_difference(regime: Regime) -> None:
    number = 300
    missed = 0
    for pairs in regime.samples(number):
        difference = paired_difference(pairs, seed=0, draws=1000)
        missed += not difference.low <= regime.difference <= difference.high
    assert missed / number <= at_most(0.06, number)


# --- McNemar


@pytest.mark.parametrize(
    ("losses", "gains", "p"),
    [
        pytest.param(0, 0, 1.0, id="none differs"),
        pytest.param(1, 0, 1.0, id="one"),
        pytest.param(0, 6, 2 / 64, id="six of six"),
        pytest.param(2, 8, 2 * (1 + 10 + 45) / 1024, id="two of ten"),
        pytest.param(5, 5, 1.0, id="as many"),
    ],
)
def test_mcnemar(losses: int, gains: int, p: float) -> None:
    counts = mcnemar(table(7, losses, gains))
    assert (counts.only_treated, counts.only_control) == (gains, losses)
    assert counts.p == pytest.approx(p)


def test_what_counts_as_right() -> None:
    pairs = [Pair("a", 0.5, 0.0), Pair("b", 1.0, 0.5), Pair("c", 0.4, 0.5)]
    assert mcnemar(pairs) == McNemar(1, 0, 1.0)
    assert mcnemar(pairs, right=0.5) == McNemar(1, 1, 1.0)


# --- the verdict


@pytest.mark.parametrize(
    ("pairs", "margin", "outcome"),
    [
        pytest.param(table(ties=20), 0.02, "too few samples", id="twenty equal items prove little"),
        pytest.param(table(ties=148), 0.02, "too few samples", id="the rule of three, not yet"),
        pytest.param(table(ties=155), 0.02, "non-inferior", id="the rule of three"),
        pytest.param(table(ties=160), 0.05, "non-inferior", id="one item to a context"),
        pytest.param(table(ties=160, per_context=4), 0.05, "non-inferior", id="four items to a context"),
        pytest.param(table(ties=160, per_context=16), 0.05, "too few samples", id="ten contexts are few"),
        pytest.param(table(ties=1600, per_context=8), 0.02, "non-inferior", id="ample"),
        pytest.param(table(1400, 100, 100), 0.02, "non-inferior", id="ample, and one in eight differs"),
        pytest.param(table(ties=700, losses=100), 0.05, "inferior", id="worse"),
        pytest.param(table(ties=752, losses=48), 0.05, "too few samples", id="surely worse, but by the margin?"),
        pytest.param(table(ties=10, gains=90), 0.05, "non-inferior", id="better"),
        pytest.param(table(ties=1), 0.05, "too few samples", id="one"),
    ],
)
def test_verdict(pairs: list[Pair], margin: float, outcome: str) -> None:
    verdict = non_inferiority(pairs, margin, seed=0)
    assert verdict.outcome == outcome
    assert (verdict.n_needed is None) == (outcome != "too few samples" or verdict.difference.estimate <= -margin)
    assert verdict.difference == paired_difference(pairs, seed=0)


def test_identical_fractional_scores_are_non_inferior() -> None:
    pairs = [Pair(str(place // 8), place % 4 / 3, place % 4 / 3) for place in range(1600)]
    assert non_inferiority(pairs, 0.02, seed=0).outcome == "non-inferior"


@steady
@given(scored, st.sampled_from([0.02, 0.1, 0.3, 0.7]))
def test_p_agrees_with_the_outcome(pairs: list[Pair], margin: float) -> None:
    verdict = non_inferiority(pairs, margin, seed=5, draws=999)
    assert (verdict.outcome == "non-inferior") == (verdict.lower_bound > -margin)
    if verdict.difference.estimate > -margin:
        assert (verdict.p <= 0.05) == (verdict.outcome == "non-inferior")
    assert non_inferiority(pairs[::-1], margin, seed=5, draws=999) == verdict


@pytest.mark.parametrize(
    ("pairs", "margin", "least", "most"),
    [
        pytest.param(table(ties=20), 0.02, 150, 150, id="nothing differs: the rule of three"),
        pytest.param(table(18, 1, 1), 0.02, 6.18 * 0.1 / 0.02**2, 2000, id="one in ten differs"),
        pytest.param(table(19, 1, 0), 0.02, 6.18 * 0.05 / 0.02**2, 1200, id="bad luck among few is not the end"),
        pytest.param(table(960, 40, 0), 0.05, 2000, 4000, id="the estimate leaves a fifth of the margin"),
    ],
)
def test_how_many_are_needed(pairs: list[Pair], margin: float, least: float, most: float) -> None:
    needed = non_inferiority(pairs, margin, seed=0).n_needed
    assert needed is not None
    assert least <= needed <= most


def test_no_number_helps_what_is_worse_by_the_margin() -> None:
    verdict = non_inferiority(table(ties=940, losses=60), 0.05, seed=0)
    assert (verdict.outcome, verdict.n_needed) == ("too few samples", None)


def test_correlated_items_need_more() -> None:
    apart = non_inferiority(table(140, 10, 10), 0.02, seed=0).n_needed
    together = non_inferiority(table(140, 10, 10, per_context=5), 0.02, seed=0).n_needed
    assert apart is not None
    assert together is not None
    assert together > 3 * apart


@pytest.mark.parametrize(
    ("regime", "bound"),
    [
        # At a true difference of -margin. The bound is the rate that is accepted as true: 7% in the hardest corners.
        pytest.param(Regime(20, 1, 0.02, -0.02), 0.05, id="20 single items, losses alone"),
        pytest.param(Regime(160, 1, 0.02, -0.02), 0.05, id="160 single items, losses alone"),
        pytest.param(Regime(200, 1, 0.05, -0.05), 0.05, id="200 single items, losses alone"),
        pytest.param(Regime(200, 1, 0.3, -0.05), 0.05, id="200 single items, both ways"),
        pytest.param(Regime(20, 8, 0.1, -0.1, 0.3), 0.05, id="20 contexts, losses alone"),
        pytest.param(Regime(20, 8, 0.3, -0.05, 0.3), 0.05, id="20 contexts, both ways"),
        pytest.param(Regime(60, 8, 0.1, -0.1, 0.6), 0.07, id="60 contexts, losses alone, strongly correlated"),
        pytest.param(Regime(200, 8, 0.02, -0.02, 0.3), 0.05, id="200 contexts, losses alone"),
        pytest.param(Regime(60, 8, 0.15, -0.05, 0.3, fractional=True), 0.05, id="60 contexts, fractional"),
    ],
)
def test_error_rates_at_the_margin(regime: Regime, bound: float) -> None:
    number, margin = 300, -regime.difference
    outcomes = [non_inferiority(pairs, margin, seed=0, draws=1000).outcome for pairs in regime.samples(number)]
    assert outcomes.count("non-inferior") / number <= at_most(bound, number)
    assert outcomes.count("inferior") / number <= at_most(bound, number)


@pytest.mark.parametrize(
    "regime",
    [
        pytest.param(Regime(40, 1, 0.1, 0.0), id="single items"),
        pytest.param(Regime(30, 8, 0.1, 0.0, 0.3), id="correlated"),
        pytest.param(Regime(40, 4, 0.2, 0.0, 0.3, fractional=True), id="fractional"),
    ],
)
def test_the_number_needed_has_the_power_it_promises(regime: Regime) -> None:
    """Of runs as long as first runs typically ask for, and with no true difference, four in five are settled."""
    margin, number = 0.05, 300
    asked = [non_inferiority(pairs, margin, seed=0, draws=1000).n_needed for pairs in regime.samples(100)]
    needed = float(np.median([n for n in asked if n is not None]))
    longer = replace(regime, contexts=round(needed / ((1 + regime.most) / 2)))
    outcomes = [non_inferiority(pairs, margin, seed=0, draws=1000).outcome for pairs in longer.samples(number)]
    assert 0.72 <= outcomes.count("non-inferior") / number <= 0.94


@pytest.mark.parametrize(("margin", "alpha"), [(0.0, 0.05), (1.0, 0.05), (math.nan, 0.05), (0.02, 0.0)])
def test_verdict_refuses(margin: float, alpha: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        non_inferiority(table(ties=5), margin, seed=0, alpha=alpha)


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        paired_difference([], seed=0)


@pytest.mark.parametrize("score", [-0.1, 1.1, math.nan])
def test_a_score_outside_its_range_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match=r"scores lie in \[0, 1\]"):
        Pair("a", score, 0.0)


# --- Holm


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        pytest.param([0.0] * 7, 1.0, id="no difference"),
        pytest.param([-1.0] * 7, 1 / 2**7, id="all lost"),
        pytest.param([1.0] * 7, 1.0, id="all won"),
        pytest.param([-1.0, 1.0], 0.75, id="one each"),
        pytest.param([-1.0, -1.0, 0.0], 0.25, id="contexts without a difference tell nothing"),
    ],
)
def test_a_loss_by_hand(differences: list[float], p: float) -> None:
    pairs = [Pair(str(place), max(0.0, d), max(0.0, -d)) for place, d in enumerate(differences)]
    assert loss(pairs, 0) == pytest.approx(p)


def test_pairs_of_one_context_count_once_as_a_loss() -> None:
    pairs = [Pair("one", 0.0, 1.0)] * 8
    assert loss(pairs, 0) == 0.5


def test_holm_by_hand() -> None:
    """0.01 * 4; 0.02 * 3; 0.03 * 2 raised to nothing below it; 0.04 * 1 raised to the one before."""
    adjusted = holm({"d": 0.04, "a": 0.01, "c": 0.03, "b": 0.02})
    assert adjusted == pytest.approx({"d": 0.06, "a": 0.04, "c": 0.06, "b": 0.06})
    assert list(adjusted) == ["d", "a", "c", "b"]
    assert holm({}) == {}
    assert holm({"only": 0.03}) == {"only": 0.03}
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


@steady
@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=8))
def test_holm_keeps_the_order_and_never_helps(p_values: dict[str, float]) -> None:
    adjusted = holm(p_values)
    assert all(p_values[name] <= adjusted[name] <= 1 for name in p_values)
    ranked = sorted(p_values, key=p_values.__getitem__)
    assert [adjusted[name] for name in ranked] == sorted(adjusted.values())
