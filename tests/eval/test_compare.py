"""Two runs side by side."""

from __future__ import annotations

from typing import Any

from eval.compare import Change, Setting, compare
from eval.findings import Findings
from eval.served import Served
from eval.speed import Speed, Timed
from tests.eval.test_gates import found, level, row


def timed(number: int, ttft: float | None, tokens: int = 4000) -> Timed:
    return Timed("sparse", 4096, number, number, Served(prompt_tokens=tokens, ttft=ttft))


def run(ttft: float, **about: Any) -> Findings:
    given = {"date": str(ttft), "seed": 1, "flags": {"token_budget": 512, "kv_gib": None}, **about}
    findings = found(speed=Speed((row(ttft=ttft, memory=None),), (), 0), levels=(level(requests_per_s=1 / ttft),))
    return Findings(**{**{f: getattr(findings, f) for f in findings.__slots__}, "about": given})


def test_what_differs_is_told() -> None:
    compared = compare(run(1.0), run(2.0, flags={"token_budget": 256, "kv_gib": None}, commit="b"), (), ())
    assert compared.settings == (Setting("flags.token_budget", 512, 256), Setting("commit", None, "b"))
    assert compared.warning is not None
    assert compared.warning.startswith("the runs differ in 2 settings")
    assert compared.changes == (
        Change("TTFT of sparse at 4,096 tokens", 1000.0, 2000.0, "ms"),
        Change("throughput of exact, 4 at once", 1.0, 0.5, "requests/s"),
    )


def test_prompts_that_both_read_are_paired() -> None:
    before = [timed(0, 1.0), timed(1, 2.0), timed(2, 3.0), timed(3, None), timed(4, 1.0, tokens=3999)]
    after = [timed(0, 2.0), timed(1, 4.0), timed(2, 6.0), timed(3, 1.0), timed(4, 9.0)]
    compared = compare(run(1.0), run(2.0), before, after)
    assert (compared.settings, compared.warning) == ((), None)
    ratio = compared.changes[0].ratio
    assert ratio is not None
    assert (ratio.n, round(ratio.estimate, 6), round(ratio.low, 6), round(ratio.high, 6)) == (3, 2.0, 2.0, 2.0)
    # Another seed means other prompts.
    assert compare(run(1.0), run(2.0, seed=2), before, after).changes[0].ratio is None
