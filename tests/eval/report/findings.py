"""Findings that nobody has measured, as a run has them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from eval.findings import Asked, Case, Findings, Gate, Level, Privacy, Rate
from eval.quality import Answer, Bucket, Comparison, Report
from eval.served import Served
from eval.speed import Row, Speed
from eval.statistics import Difference, Interval, McNemar, Verdict

ARMS = ("exact", "again", "sparse", "warm")
_BUCKETS = ("facts-single en 1024", "facts-single en 7900", "documents zh 1024", "documents zh 7900")


def row(arm: str, length: int, ttft: float, ratio: Interval | None = None) -> Row:
    return Row(
        arm=arm,
        length=length,
        n=6,
        prompt_tokens=length - 25.0,
        ttft=ttft,
        queue=0.001,
        read=ttft * 0.97,
        rest=ttft * 0.02,
        last=ttft,
        longest_step=min(ttft, 0.72),
        tokens_per_s=length / ttft,
        cached_tokens=0,
        paths=("exact",),
        density=0.21 if arm == "sparse" else None,
        memory=3 * 2**30,
        ratio=ratio,
        faster=None if ratio is None else 0.83,
    )


def bare_row(arm: str, length: int) -> Row:
    """A row of which everything is unknown that can be."""
    unknown: dict[str, Any] = dict.fromkeys(
        ("prompt_tokens", "queue", "read", "rest", "longest_step", "tokens_per_s", "cached_tokens", "density", "memory")
    )
    return replace(row(arm, length, 1.0), **unknown)


SPEED = Speed(
    rows=(
        row("exact", 1024, 0.73),
        row("again", 1024, 0.735, Interval(1.004, 0.962, 1.055, 6)),
        row("sparse", 1024, 0.75, Interval(1.03, 0.99, 1.08, 6)),
        row("warm", 1024, 0.09, Interval(0.123, 0.1, 0.15, 6)),
        row("exact", 4096, 4.25),
        row("again", 4096, 4.2, Interval(0.99, 0.95, 1.039, 6)),
        row("sparse", 4096, 2.9, Interval(0.68, 0.62, 0.75, 6)),
        row("warm", 4096, 0.11, Interval(0.026, 0.02, 0.03, 6)),
        row("exact", 7900, 11.2),
        row("again", 7900, 11.3, Interval(1.01, 0.98, 1.03, 6)),
        row("sparse", 7900, 5.1, Interval(0.455, 0.43, 0.48, 6)),
        row("warm", 7900, 0.17, Interval(0.015, 0.0, math.inf, 1)),
    ),
    limits=(),
    unwanted_hits=0,
)


def verdict_of(outcome: str, n_needed: int | None = None, lower: float = -0.021) -> Verdict:
    return Verdict(outcome, Difference(-0.003, -0.024, 0.016, 216, 54), lower, 0.01, n_needed)  # type: ignore[arg-type]


def bucket(name: str, estimate: float, *, informative: bool = True) -> Bucket:
    return Bucket(
        name=name,
        control=0.81 if informative else 0.4,
        treated=0.81 + estimate,
        difference=Difference(estimate, estimate - 0.045, estimate + 0.04, 54, 14),
        mcnemar=McNemar(1, 2, 0.9),
        p=0.42,
        informative=informative,
        density=0.21,
    )


def comparison(arm: str, verdict: Verdict | None, buckets: tuple[Bucket, ...] = ()) -> Comparison:
    return Comparison(
        arm=arm,
        control="exact",
        verdict=verdict,
        buckets=buckets,
        same_answer=0.912,
        answer_f1=0.957,
        same_first_token=0.981,
        first_token_kl=0.0123,
        largest_kl=0.4,
        fallbacks={"the prompt is short": 12} if arm == "sparse" else {},
    )


def answer(arm: str, context: str, text: str, score: float, question: int = 0, served: Served | None = None) -> Answer:
    return Answer(
        arm=arm,
        context=context,
        bucket="documents zh 1024",
        question=question,
        gold=("铜钥匙", "a | b"),
        lead="钥匙是",
        served=served or Served(path="exact", ttft=0.7, text=text, tokens=9, finish_reason="stop"),
        score=score,
        f1=score,
        rouge_l=score,
        exact=score,
        supported=None,
    )


ANSWERS = (
    answer("exact", "documents-zh-1024-3", "钥匙是铜钥匙，放在灯塔看守人的抽屉里。", 1.0),
    answer("sparse", "documents-zh-1024-3", "<script>alert('1')</script> a|b\n钥匙是银色的。", 0.0),
    answer("warm", "documents-zh-1024-3", "钥匙是铜钥匙。", 1.0),
    answer("exact", "facts-single-en-7900-1", "The lighthouse keeper has *it* in `a | b`.", 1.0, 2),
    answer("sparse", "facts-single-en-7900-1", "The captain.", 0.5, 2),
    answer("warm", "facts-single-en-7900-1", "", 0.0, 2, Served(error="the engine gave up & left")),
    answer("sparse", "facts-single-en-7900-2", "nothing to compare it with", 0.0),
)

QUALITY = Report(
    scores=(),
    comparisons=(
        comparison("again", verdict_of("non-inferior"), tuple(bucket(name, 0.0) for name in _BUCKETS)),
        comparison(
            "sparse",
            verdict_of("non-inferior"),
            (
                bucket(_BUCKETS[0], 0.0),
                bucket(_BUCKETS[1], -0.031),
                bucket(_BUCKETS[2], 0.019, informative=False),
                bucket(_BUCKETS[3], -0.007),
            ),
        ),
        comparison("warm", verdict_of("too few samples", 640, -0.061), tuple(bucket(name, 0.01) for name in _BUCKETS)),
    ),
    answers=ANSWERS,
    failures=("warm: facts-single-en-7900-1: the engine gave up & left",),
    unwanted_hits=0,
    skipped=("skipped fr: the model reads English and Chinese only",),
)


def level(arm: str, at_once: int, ttft: float, rate: float, *, n: int = 48, knee: bool = False) -> Level:
    return Level(
        arm=arm,
        at_once=at_once,
        n=n,
        ttft_p50=ttft,
        ttft_p90=ttft * 1.8,
        ttft_p99=ttft * 2.2 if n >= 300 else None,
        ttft_worst=ttft * 2.5,
        itl_p50=0.0312,
        itl_p99=0.08,
        requests_per_s=rate,
        prompt_tokens_per_s=rate * 1000,
        output_tokens_per_s=rate * 60,
        goodput=0.97,
        failures={"timeout": 2} if at_once == 8 and arm == "sparse" else {},
        knee=knee,
    )


LEVELS = (
    level("exact", 1, 0.8, 0.5),
    level("exact", 2, 1.1, 0.8),
    level("exact", 4, 2.0, 0.95, knee=True),
    level("exact", 8, 4.4, 0.97, n=300),
    level("sparse", 1, 0.6, 0.61),
    level("sparse", 2, 0.8, 1.0),
    level("sparse", 4, 1.4, 1.25, knee=True),
    level("sparse", 8, 3.0, 1.28),
    level("warm", 1, 0.1, 0.9),
    level("warm", 2, 0.12, 1.6),
    level("warm", 4, 0.2, 2.4),
    level("warm", 8, 0.35, 2.5, knee=True),
)

CASES = (
    Case("follow-up", "exact", 5, 5, 1200.0, 0.9, 0.031, 2.4),
    Case("follow-up", "sparse", 5, 4, 1200.0, 0.7, 0.0325, 2.3, ("no citation | <b>none</b>",)),
    Case("empty document", "exact", 3, 0, None, None, None, None, ("refused: 'too short'",)),
)


def rate(name: str, hits: int, n: int) -> Rate:
    return Rate(name, hits, n, max(0.0, hits / n - 0.1) if n else 0.0, min(1.0, hits / n + 0.1) if n else 1.0)


ASKED = (
    Asked("auto", 24, rate("right", 18, 24), rate("cited", 15, 24), rate("recall", 22, 24), 0.81, 0.9, 0.41),
    Asked("retrieve", 24, rate("right", 16, 24), rate("cited", 15, 24), rate("recall", 0, 0), 0.7, None, None),
)
PRIVACY = Privacy((rate("PERSON", 39, 40), rate("EMAIL_ADDRESS", 12, 12)), 5400, 7)

ABOUT = {
    "date": "2026-12-02T10:00:00+00:00",
    "command": "foreword eval run --suite quick",
    "seed": 0,
    "weights": None,
    "machine": {"processor": "A <fast> one", "cores": 2, "memory_gib": 24.0},
    "arms": [{"name": "exact", "warm": False, "variant": {}}, {"name": "sparse", "warm": False}],
    "suite": {"name": "quick", "lengths": [1024, 7900], "limits": {"ttft_s": math.inf}},
}

FINDINGS = Findings(
    about=ABOUT,
    suite="quick",
    arms=ARMS,
    margin=0.05,
    speed=SPEED,
    quality=QUALITY,
    cases=CASES,
    levels=LEVELS,
    asked=ASKED,
    privacy=PRIVACY,
    kv_tokens=65_536,
    gates=(
        Gate("sparse: first token", "passed", "0.455 [0.430, 0.480] at 7,900 tokens, at most 1"),
        Gate("sparse: answers", "passed", "non-inferior"),
        Gate("warm: answers", "open", "too few samples | 640 needed"),
        Gate("cases", "failed", "follow-up through sparse: 4 of 5"),
    ),
    notes=("Chinese documents were left out of the load.",),
    baseline="quick-20261201T090000Z",
)
EMPTY = Findings(about={}, suite="quick", arms=(), margin=0.05)
