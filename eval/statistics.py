"""What a paired comparison shows, and what it does not: intervals, tests and a verdict of non-inferiority.

Scores of two arms, treated and control, on the same items. Several items ask about one context (a document), so they
succeed and fail together: contexts are resampled, never items.

Two arms that agree on nearly every item are the hard case. An ordinary bootstrap repeats what it saw, so twenty equal
items give the interval [0, 0] and "prove" any margin. Here every resample also holds one context that nobody saw and
that went badly (`_Contexts.lower_draws`). Of right/wrong items that never gain, one to a context, this is the
Clopper-Pearson bound exactly, hence the rule of three: no loss in n items still allows for 3 / n.

Every function is pure; the same seed gives the same figures, in whatever order the items come.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FloatArray = NDArray[np.float64]

_DRAWS = 10_000
_CONFIDENCE = 0.95  # of the two-sided interval of a difference
_POWER = 0.8
# Fewer values than this have too few resamples that are not all one value to studentise.
_FEWEST_RESAMPLED = 4
_ROUNDING = 1e-12  # differences below this come from floating point
# How far the items of the unseen context fall together. A higher value costs power where items are independent; 0.5
# keeps the verdict's errors at 5% where the true correlation is 0.3, and at about 7% where it is 0.6.
_UNSEEN_CORRELATION = 0.5


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate from `n` values with its two-sided confidence interval."""

    estimate: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The scores of both arms on one item, in [0, 1]; items of one `context` are correlated.

    Raises:
        ValueError: a score is outside [0, 1] or not a number.
    """

    context: str
    treated: float
    control: float

    def __post_init__(self) -> None:
        if not (0 <= self.treated <= 1 and 0 <= self.control <= 1):
            raise ValueError(f"scores lie in [0, 1], not {self.treated!r} and {self.control!r}")


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of treated - control over `n` pairs of `contexts` contexts, in score points, with its 95% interval."""

    estimate: float
    low: float
    high: float
    n: int
    contexts: int


@dataclass(frozen=True, slots=True)
class McNemar:
    """Items that one arm alone got right, and the exact two-sided p of the two counts being equal but for chance."""

    only_treated: int
    only_control: int
    p: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether treated is worse than control by the margin.

    `lower_bound` is one-sided, at the level of the test. `p` is that of "worse by the margin or more": small means
    non-inferior, and it may go to `holm`. `n_needed` is the number of pairs that would probably settle it (see
    `non_inferiority`); None when it is settled or no number would do.
    """

    outcome: Literal["non-inferior", "inferior", "too few samples"]
    difference: Difference
    lower_bound: float
    p: float
    n_needed: int | None


def ratio_of_geometric_means(
    treated: Sequence[float], control: Sequence[float], seed: int, confidence: float = 0.95, draws: int = _DRAWS
) -> Interval:
    """Geometric mean of treated / control over paired positive values, such as seconds, of shape [n] each.

    The interval is the studentised bootstrap of the mean log ratio (Efron & Tibshirani 1993, An Introduction to the
    Bootstrap, ch. 12), which follows skew that Student's t does not. Two or three values are too few to resample and
    get Student's t; one value tells nothing of its spread and gets (0, inf); equal ratios give a point.

    Raises:
        ValueError: no values, different numbers of them, or one that is not positive and finite.
    """
    pairs = np.array([treated, control], dtype=np.float64) if len(treated) == len(control) else np.empty((2, 0))
    if not pairs.size or not np.all((pairs > 0) & np.isfinite(pairs)):
        raise ValueError("a ratio needs at least one pair of positive, finite values, as many treated as control")
    logs = np.sort(np.log(pairs[0]) - np.log(pairs[1]))
    n, centre = len(logs), math.fsum(logs) / len(logs)
    if n == 1:
        return Interval(math.exp(centre), 0.0, math.inf, n)
    if np.ptp(logs) <= _ROUNDING:
        return Interval(math.exp(centre), math.exp(centre), math.exp(centre), n)
    tails = np.array([(1 + confidence) / 2, (1 - confidence) / 2])
    if n < _FEWEST_RESAMPLED:
        quantiles = stats.t.ppf(tails, n - 1)
    else:
        quantiles = np.quantile(_studentised(logs, seed, draws), tails, method="nearest")
    with np.errstate(over="ignore"):
        low, high = np.exp(centre - quantiles * stats.sem(logs))
    return Interval(math.exp(centre), float(low), float(high), n)


def paired_difference(pairs: Sequence[Pair], seed: int, draws: int = _DRAWS) -> Difference:
    """Mean of treated - control, in score points, with a two-sided 95% interval that respects contexts.

    The mean is over pairs: a context counts by its pairs. The interval is a Bayesian bootstrap over contexts (Rubin
    1981, Annals of Statistics 9:130) with one unseen context at the bad end of each side, which makes it the bound of
    Gaffke (2005) as Learned-Miller & Thomas describe it (arXiv:1905.06208).

    Raises:
        ValueError: no pairs.
    """
    contexts = _by_context(pairs)
    return _difference(contexts, *_draws(contexts, seed, draws))


def mcnemar(pairs: Sequence[Pair], right: float = 1.0) -> McNemar:
    """McNemar's exact test of items that are right, a score of at least `right`, or wrong.

    It takes items as independent, so beside several items of one context it is a description, not a test. No pairs,
    or none that differ, give p = 1. Source: McNemar 1947, Psychometrika 12:153.
    """
    outcomes = Counter((pair.treated >= right, pair.control >= right) for pair in pairs)
    only_treated, only_control = outcomes[True, False], outcomes[False, True]
    discordant = only_treated + only_control
    p = float(stats.binomtest(only_treated, discordant).pvalue) if discordant else 1.0
    return McNemar(only_treated, only_control, p)


def non_inferiority(
    pairs: Sequence[Pair], margin: float, seed: int, alpha: float = 0.05, draws: int = _DRAWS
) -> Verdict:
    """Whether treated is worse than control by `margin` score points, fixed before the run, or more.

    Non-inferior if the lower one-sided bound of treated - control is above -margin; inferior if the upper one is
    below -margin; too few samples otherwise. Both bounds are those of `paired_difference`, at level `alpha`, so at a
    true difference of -margin each of the first two outcomes has a probability of about alpha. A difference that is
    surely below zero and probably below -margin is not yet inferior: at -margin that would be said half the time.

    `n_needed` gives 80% power if the arms are truly equal, from the variance between contexts; a run that had as many
    is judged by its estimate instead, and no number will do if that is at or below -margin. It assumes contexts of the
    size measured, and after few pairs it is as rough as their variance.

    Raises:
        ValueError: no pairs, or a margin or an alpha that is not between 0 and 1.
    """
    if not (0 < margin < 1 and 0 < alpha < 1):
        raise ValueError(f"margin and alpha lie between 0 and 1, not {margin!r} and {alpha!r}")
    contexts = _by_context(pairs)
    lows, highs = _draws(contexts, seed, draws)
    lower, upper = _bounds(contexts.estimate, lows, highs, alpha)
    outcome: Literal["non-inferior", "inferior", "too few samples"] = "too few samples"
    if lower > -margin:
        outcome = "non-inferior"
    elif upper < -margin:
        outcome = "inferior"
    return Verdict(
        outcome=outcome,
        difference=_difference(contexts, lows, highs),
        lower_bound=lower,
        p=float(1 + np.count_nonzero(lows <= -margin)) / (1 + draws),
        n_needed=_pairs_needed(contexts, margin, alpha) if outcome == "too few samples" else None,
    )


def loss(pairs: Sequence[Pair], seed: int, *, draws: int = _DRAWS) -> float:
    """The p-value of "nothing was lost": a one-sided sign-flip permutation test over contexts, exact when they are few.

    Contexts are exchangeable between the arms when nothing was lost, so each context's sum of differences may have
    either sign (Fisher's randomisation test for pairs).
    """
    lost: dict[str, float] = {}
    for pair in pairs:
        lost[pair.context] = lost.get(pair.context, 0.0) + pair.treated - pair.control
    sums = np.array(list(lost.values()))
    if not np.any(sums):
        return 1.0
    if len(sums) == 1:  # scipy asks for two
        return 0.5 if sums[0] < 0 else 1.0
    tested = stats.permutation_test(
        (sums,),
        np.sum,
        permutation_type="samples",
        alternative="less",
        n_resamples=draws,
        rng=np.random.default_rng(seed),
    )
    return float(tested.pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for their number, in the order given: one at or below alpha is significant at alpha.

    The chance of any false finding among them is at most alpha, however they depend on each other. Source: Holm 1979,
    Scandinavian Journal of Statistics 6:65.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def _studentised(values: FloatArray, seed: int, draws: int) -> FloatArray:
    """t statistics [draws] of resampled `values` [n] about their mean.

    A resample of one value alone has no spread, so its t is infinite, or zero where that value is the mean. If these
    were left out, intervals of few values would be too short.
    """
    resamples = np.random.default_rng(seed).choice(values, (draws, len(values)))
    shifts = resamples.mean(axis=1) - values.mean()
    errors = np.where(np.ptp(resamples, axis=1) <= _ROUNDING, 0.0, stats.sem(resamples, axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(shifts) <= _ROUNDING, 0.0, shifts / errors)


@dataclass(frozen=True, slots=True)
class _Contexts:
    """What a bootstrap by context needs: kinds of contexts, and how many there are of each.

    Attributes:
        sums: sum of treated - control in a context of each kind, score points [kinds].
        sizes: its pairs [kinds].
        counts: contexts of that kind [kinds].
    """

    sums: FloatArray
    sizes: FloatArray
    counts: FloatArray

    @property
    def n(self) -> int:
        """Pairs."""
        return int(self.counts @ self.sizes)

    @property
    def estimate(self) -> float:
        """Mean difference of a pair."""
        return float(self.counts @ self.sums / self.n)

    @property
    def variance(self) -> float:
        """Variance of the estimate times the number of pairs, by linearising the ratio of sums over contexts."""
        total = self.counts.sum()
        residuals = self.sums - self.estimate * self.sizes
        return float(self.counts @ residuals**2 / self.n * total / max(total - 1, 1))

    @property
    def unseen_loss(self) -> float:
        """Pairs that the unseen context of mean size loses: one, and of the others the correlated part."""
        return 1 + _UNSEEN_CORRELATION * (self.n / float(self.counts.sum()) - 1)

    def mirrored(self) -> _Contexts:
        """The same with the arms exchanged."""
        order = np.lexsort((self.sizes, -self.sums))  # as `_by_context` sorts, so that the draws mirror exactly
        return _Contexts(-self.sums[order], self.sizes[order], self.counts[order])

    def lower_draws(self, seed: int, draws: int) -> FloatArray:
        """Plausible mean differences [draws], leaning down by one unseen context that loses.

        Contexts get exponential weights, so the weight of all equal contexts together is gamma.
        """
        rng = np.random.default_rng(seed)
        unseen = rng.standard_exponential(draws)
        weights = rng.standard_gamma(self.counts, (draws, len(self.counts)))
        sums = weights @ self.sums - unseen * self.unseen_loss
        return np.asarray(sums / (weights @ self.sizes + unseen * self.n / self.counts.sum()), dtype=np.float64)


def _by_context(pairs: Sequence[Pair]) -> _Contexts:
    differences: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        differences[pair.context].append(pair.treated - pair.control)
    if not differences:
        raise ValueError("there are no pairs to compare")
    # Rounded, so that contexts that are equal but for floating point are of one kind.
    kinds = Counter((round(math.fsum(of_one), 12), len(of_one)) for of_one in differences.values())
    table = np.array([(*kind, kinds[kind]) for kind in sorted(kinds)], dtype=np.float64)
    return _Contexts(*table.T)


def _draws(contexts: _Contexts, seed: int, draws: int) -> tuple[FloatArray, FloatArray]:
    """Plausible mean differences that lean down, and others that lean up, [draws] each."""
    return contexts.lower_draws(seed, draws), -contexts.mirrored().lower_draws(seed, draws)


def _difference(contexts: _Contexts, lows: FloatArray, highs: FloatArray) -> Difference:
    low, high = _bounds(contexts.estimate, lows, highs, (1 - _CONFIDENCE) / 2)
    return Difference(contexts.estimate, low, high, contexts.n, int(contexts.counts.sum()))


def _bounds(estimate: float, lows: FloatArray, highs: FloatArray, level: float) -> tuple[float, float]:
    """One-sided bounds of the mean difference, each missed with a probability of about `level`."""
    # The unseen context is not the worst one where nearly everything was lost, hence the estimate as the limit.
    return min(_order_statistic(lows, level), estimate), max(-_order_statistic(-highs, level), estimate)


def _order_statistic(values: FloatArray, level: float) -> float:
    """The value that is above -margin exactly when p, counted with the data as one more draw, is at most `level`."""
    place = max(math.floor(level * (len(values) + 1)), 1) - 1
    return float(np.partition(values, place)[place])


def _pairs_needed(contexts: _Contexts, margin: float, alpha: float) -> int | None:
    """Pairs for 80% power at no difference, or at the estimate if so many were measured; None if it is too low."""
    if (equal := _sample_size(contexts, margin, alpha)) > contexts.n:
        return equal
    if (distance := margin + min(contexts.estimate, 0.0)) <= 0:
        return None
    return max(_sample_size(contexts, distance, alpha), contexts.n + 1)


def _sample_size(contexts: _Contexts, distance: float, alpha: float) -> int:
    """Pairs n that bring the bound within `distance` of the true difference with 80% power.

    distance = z * sqrt(variance / n) + 2 * loss / n, solved for n: the usual normal part, by itself 6.18 * variance /
    distance**2, and the unseen context, which shifts the bound by its loss and, by simulation, costs about as much
    again in spread. Where the arms agree on everything the rule of three remains, log(1 / alpha) * loss / distance.
    """
    spread = float(stats.norm.isf(alpha) + stats.norm.ppf(_POWER)) * math.sqrt(contexts.variance)
    root = (spread + math.sqrt(spread**2 + 8 * distance * contexts.unseen_loss)) / (2 * distance)
    return math.ceil(max(root**2, -math.log(alpha) * contexts.unseen_loss / distance))
