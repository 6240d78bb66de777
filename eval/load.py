"""Load in a closed loop: so many requests always in work, level after level, and what the server makes of each.

A level ends when all of its requests have; as one is answered the next one is sent. Percentiles are interpolated
linearly between the two nearest values (numpy's default, type 7 of Hyndman and Fan, doi:10.2307/2684934).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import log2
from statistics import fmean

import numpy as np

from eval.arms import Arm
from eval.errors import BadUsage
from eval.findings import Level
from eval.results import Results
from eval.served import Served, Server
from serving.engine import Message

# Below so many values the 99th percentile is the worst of them, or nearly so.
_P99_FROM = 300
# One more doubling that brings less than this share of throughput is not worth its wait.
_KNEE_GAIN = 0.1
_TIMED_OUT = "TimeoutError"


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `number` requests at each level of `at_once`, each level after `warmups` that do not count.

    `timeout_s` is how long one request may take in all. `ttft_s` and `itl_s` are what goodput demands of the time to
    the first text and of the mean time between the pieces of an answer; without either there is no goodput.

    Raises:
        BadUsage: a level would have fewer requests than are to be in work at once, or comes twice.
    """

    at_once: tuple[int, ...]
    number: int
    max_tokens: int
    timeout_s: float
    warmups: int = 1
    ttft_s: float | None = None
    itl_s: float | None = None

    def __post_init__(self) -> None:
        if not self.at_once or self.at_once != tuple(sorted(set(self.at_once))) or self.at_once[0] < 1:
            raise BadUsage(f"the levels are {self.at_once!r}; give each once and upwards, such as 1, 2, 4, 8")
        if self.number < self.at_once[-1]:
            raise BadUsage(
                f"{self.number} requests cannot be {self.at_once[-1]} at once; ask for at least as many as that"
            )

    @property
    def requests(self) -> int:
        """Requests that count."""
        return len(self.at_once) * self.number

    @property
    def prompts(self) -> int:
        """Prompts needed for all requests."""
        return len(self.at_once) * (self.number + self.warmups)


async def measure_levels(
    server: Server,
    arm: Arm,
    prompts: Sequence[Sequence[Message]],
    load: Load,
    *,
    results: Results,
    done: Callable[[Served], None],
) -> tuple[Level, ...]:
    """Send every prompt once, each with a cache salt of its own.

    Args:
        prompts: `load.prompts` of them; the first ones of each level warm up.
        done: called after each request that counts.

    Raises:
        BadUsage: there are fewer prompts than that, or the server cannot serve the arm.
    """
    if len(prompts) < load.prompts:
        raise BadUsage(f"the load needs {load.prompts} prompts, and there are {len(prompts)}; ask for fewer requests")
    server.require(arm)
    left = iter(prompts)
    levels: list[Level] = []
    for at_once in load.at_once:
        warming = [next(left) for _ in range(load.warmups)]
        counted = [next(left) for _ in range(load.number)]
        await _keep_at_work(server, arm, warming, at_once, load, lambda _number, _served: None)

        def add(number: int, served: Served, at_once: int = at_once) -> None:
            results.add("request", {"arm": arm.name, "at_once": at_once, "number": number, "served": asdict(served)})
            done(served)

        started = time.perf_counter()
        answers = await _keep_at_work(server, arm, counted, at_once, load, add)
        level = level_of(arm.name, at_once, answers, time.perf_counter() - started, load)
        results.add("level", asdict(level))
        levels.append(level)
    return with_knee(levels)


def level_of(arm: str, at_once: int, answers: Sequence[Served], seconds: float, load: Load) -> Level:
    """What came of the requests of a level that took so many seconds from the first sending to the last end.

    Times and tokens are of the answers; what failed counts in `n`, in `failures` and against goodput.
    """
    good = [served for served in answers if served.error is None]
    ttfts = [served.ttft for served in good if served.ttft is not None]
    gaps = [gap for served in good for gap in served.gaps or ()]
    counted = bool(good) and all(served.prompt_tokens is not None for served in good)
    return Level(
        arm=arm,
        at_once=at_once,
        n=len(answers),
        ttft_p50=percentile(ttfts, 50),
        ttft_p90=percentile(ttfts, 90),
        ttft_p99=percentile(ttfts, 99),
        ttft_worst=max(ttfts, default=None),
        itl_p50=percentile(gaps, 50),
        itl_p99=percentile(gaps, 99),
        requests_per_s=len(good) / seconds,
        prompt_tokens_per_s=sum(served.prompt_tokens or 0 for served in good) / seconds if counted else None,
        output_tokens_per_s=sum(served.tokens for served in good) / seconds if counted else None,
        goodput=_goodput(answers, load),
        failures=dict(sorted(Counter(failure_of(served.error) for served in answers if served.error).items())),
    )


def percentile(values: Sequence[float], rank: int) -> float | None:
    """A percentile, interpolated linearly; None of no value, and for the 99th of fewer than 300."""
    if not values or (rank == 99 and len(values) < _P99_FROM):
        return None
    return float(np.percentile(values, rank))


def failure_of(error: str) -> str:
    """The kind of a failure: `time-out`, `refused` where the server has too much to do already, or `error`.

    Args:
        error: as servers tell it: the HTTP status or the exception's name, then a colon.
    """
    kind, _, _ = error.partition(":")
    if kind in (_TIMED_OUT, "ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout"):
        return "time-out"
    return "refused" if kind in ("429", "Overloaded") else "error"


def knee(levels: Sequence[tuple[int, float]]) -> int | None:
    """The first level from which one more doubling brings under 10% more throughput, or None if each brings more.

    Between levels that are no doublings the throughput is taken to grow by one power of how many are at once.

    Args:
        levels: how many at once and their requests per second, upwards.
    """
    for (fewer, slower), (more, faster) in pairwise(levels):
        if slower > 0 and (faster / slower) ** (1 / log2(more / fewer)) < 1 + _KNEE_GAIN:
            return fewer
    return None


def with_knee(levels: Sequence[Level]) -> tuple[Level, ...]:
    """The levels of one arm, upwards, with the knee marked on the one that it is."""
    bent = knee([(level.at_once, level.requests_per_s) for level in levels])
    return tuple(replace(level, knee=level.at_once == bent) for level in levels)


def _goodput(answers: Sequence[Served], load: Load) -> float | None:
    if not answers or (load.ttft_s is None and load.itl_s is None):
        return None
    return fmean(_within(served, load.ttft_s, load.itl_s) for served in answers)


def _within(served: Served, ttft_s: float | None, itl_s: float | None) -> bool:
    """Whether a request was answered within the limits; what is not known is not within one."""
    if served.error is not None:
        return False
    early = ttft_s is None or (served.ttft is not None and served.ttft <= ttft_s)
    # An answer of one piece makes nobody wait between pieces.
    steady = itl_s is None or (served.gaps is not None and (not served.gaps or fmean(served.gaps) <= itl_s))
    return early and steady


async def _keep_at_work(
    server: Server,
    arm: Arm,
    prompts: Sequence[Sequence[Message]],
    at_once: int,
    load: Load,
    add: Callable[[int, Served], None],
) -> list[Served]:
    """Serve the prompts, so many at once; the answers as they ended."""
    left: Iterator[tuple[int, Sequence[Message]]] = iter(enumerate(prompts))
    answers: list[Served] = []

    async def work() -> None:
        # All workers draw from the one iterator, so that whoever is done takes the next prompt.
        for number, messages in left:
            served = await serve_within(server, messages, arm, load.max_tokens, load.timeout_s)
            answers.append(served)
            add(number, served)

    async with asyncio.TaskGroup() as workers:
        for _ in range(at_once):
            workers.create_task(work())
    return answers


async def serve_within(
    server: Server, messages: Sequence[Message], arm: Arm, max_tokens: int, timeout_s: float
) -> Served:
    """Serve one prompt that finds nothing cached; one that takes longer is a failure."""
    try:
        async with asyncio.timeout(timeout_s):
            return await server.serve(messages, arm, salt=uuid.uuid4().hex, max_tokens=max_tokens)
    except TimeoutError:
        return Served(error=f"{_TIMED_OUT}: there was no whole answer within {timeout_s:g} s")
