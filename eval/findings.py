"""What a run of `foreword eval run` has found, stage by stage: what its report is written from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scipy.stats import binomtest

from eval.quality import Report
from eval.speed import Speed


@dataclass(frozen=True, slots=True)
class Case:
    """One everyday case through one arm. Times in seconds, medians over the requests that were answered.

    `n` requests were sent and `passed` of them came out as the case demands; `faults` says how the others did not, each
    reason once. `itl` is the time between two tokens of an answer. `recalled` is the share of the planted facts that
    the answers hold, where some are planted; it fails no case, for a small model forgets.
    """

    name: str
    arm: str
    n: int
    passed: int
    prompt_tokens: float | None
    ttft: float | None
    itl: float | None
    total: float | None
    faults: tuple[str, ...] = ()
    recalled: float | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One arm with `at_once` requests always in work. Times in seconds; the rates are of the whole level.

    `ttft_p99` is given from 300 answers on, for below it is the worst of them. `goodput` is the share of the requests
    that were answered within the limits that the run set. `failures` counts by kind. `knee`: from here on more at once
    brings next to no more throughput.
    """

    arm: str
    at_once: int
    n: int
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    ttft_worst: float | None
    itl_p50: float | None
    itl_p99: float | None
    requests_per_s: float
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    goodput: float | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    knee: bool = False


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of `n`, with its exact 95% interval (Clopper and Pearson)."""

    name: str
    hits: int
    n: int
    low: float
    high: float

    @classmethod
    def of(cls, name: str, hits: int, n: int) -> Rate:
        """The share of `hits` among `n`; of nothing it may be anything."""
        if not n:
            return cls(name, 0, 0, 0.0, 1.0)
        interval = binomtest(hits, n).proportion_ci(method="exact")
        return cls(name, hits, n, float(interval.low), float(interval.high))

    @property
    def share(self) -> float:
        return self.hits / self.n if self.n else 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """Documents, questions, answers and pages, end to end through the service, by one way of asking.

    `recall` is the share of questions whose page is among the best passages found, `mrr` the mean of one over its rank.
    `supported` is the share of the answers' sentences that the context given bears out. Times in seconds, medians.
    """

    way: str
    n: int
    right: Rate
    cited: Rate
    recall: Rate
    mrr: float
    supported: float | None
    ttft: float | None


@dataclass(frozen=True, slots=True)
class Privacy:
    """Planted personal data: what was found of each kind, and what was taken for some that is none.

    `words` were looked through, a Chinese character counting as one.
    """

    recall: tuple[Rate, ...]
    words: int
    false_alarms: int


@dataclass(frozen=True, slots=True)
class Gate:
    """One demand on the run. `outcome` is "open" where there was too little to tell, which does not pass."""

    name: str
    outcome: Literal["passed", "failed", "open"]
    told: str

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


@dataclass(frozen=True, slots=True)
class Findings:
    """A whole run. A stage that the suite does not have is None or empty.

    `about` is the run's identity (`eval.identity`) and its settings: `suite` with all that it fixes, `arms`, `seed`,
    `repeats`, `date`, `finished`. `kv_tokens` is the engine's KV capacity. `notes` are what was left out or did not
    count, each one sentence. `baseline` names the run that `gates` compared this one with.
    """

    about: Mapping[str, Any]
    suite: str
    arms: tuple[str, ...]
    margin: float
    speed: Speed | None = None
    quality: Report | None = None
    cases: tuple[Case, ...] = ()
    levels: tuple[Level, ...] = ()
    asked: tuple[Asked, ...] = ()
    privacy: Privacy | None = None
    kv_tokens: int | None = None
    gates: Sequence[Gate] = ()
    notes: tuple[str, ...] = ()
    baseline: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every demand is met."""
        return all(gate.passed for gate in self.gates)
