"""Measures from tables of cases (tests/eval/cases), and what holds for every text and every distribution."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.measures import (
    agreement,
    contains,
    exact,
    f1,
    first_token,
    normalise,
    rouge_l,
    supported_share,
    unsupported,
)

PAIRED: dict[str, Callable[[str, str], float]] = {"exact": exact, "f1": f1, "rouge_l": rouge_l}

# The same examples in every run, and no failures on a machine that is merely slow.
steady = settings(deadline=None, derandomize=True, database=None)

words = st.lists(st.sampled_from("the a red Gate 47 4,821 -5 4.7 5kg 绿 色的 。 ** \n".split(" ")), max_size=12)
texts = st.text() | words.map(" ".join) | words.map("".join)
logprobs = st.floats(max_value=1e-6, allow_nan=False) | st.floats(-12, 0)
distributions = st.dictionaries(st.integers(0, 9), logprobs, min_size=1, max_size=8)


def cases(name: str) -> list[Any]:
    table = json.loads((Path(__file__).parent / "cases" / f"{name}.json").read_text("utf-8"))
    return [pytest.param(case, id=case["note"]) for case in table]


def about(value: float | str) -> Any:
    """Tables give hand-worked values as fractions."""
    return pytest.approx(float(Fraction(value)), abs=1e-7)


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, *case.values, id=f"{name}: {case.id}") for name in PAIRED for case in cases(name)],
)
def test_pairs(name: str, case: dict[str, Any]) -> None:
    assert PAIRED[name](case["input"], case["gold"]) == about(case["expected"])


@pytest.mark.parametrize("case", cases("contains"))
def test_contains(case: dict[str, Any]) -> None:
    assert contains(case["input"], case["gold"]) == about(case["expected"])


def test_no_gold_strings() -> None:
    with pytest.raises(ValueError, match="no gold"):
        contains("47", [])


@pytest.mark.parametrize("case", cases("numbers"))
def test_unsupported(case: dict[str, Any]) -> None:
    answer, context, expected = case["input"], case["gold"], case["expected"]
    question = case.get("question", "")
    missing = unsupported(answer, context, question=question)
    assert [list(missing.numbers), list(missing.names)] == [expected["numbers"], expected["names"]]
    assert supported_share(answer, context, question=question) == expected["share"]


@pytest.mark.parametrize("case", cases("agreement"))
def test_agreement(case: dict[str, Any]) -> None:
    expected = case["expected"]
    for one, other in [(case["input"], case["gold"]), (case["gold"], case["input"])]:
        alike = agreement(one, other)
        assert alike.exact is expected["exact"]
        assert (alike.f1, alike.common_prefix) == (about(expected["f1"]), about(expected["common_prefix"]))


@pytest.mark.parametrize("case", cases("first_token"))
def test_first_token(case: dict[str, Any]) -> None:
    control, treated = ({int(token): value for token, value in case[key].items()} for key in ("input", "gold"))
    first = first_token(control, treated)
    assert first.top1 is case["expected"]["top1"]
    assert first.kl == about(case["expected"]["kl"])


@pytest.mark.parametrize(("control", "treated"), [({}, {1: 0.0}), ({1: 0.0}, {})])
def test_no_log_probabilities(control: dict[int, float], treated: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="no log probabilities"):
        first_token(control, treated)


@steady
@given(texts, texts)
def test_ranges_and_symmetry(a: str, b: str) -> None:
    for measure in PAIRED.values():
        assert 0 <= measure(a, b) <= 1
        assert measure(a, b) == measure(b, a)
    assert rouge_l(a, b) <= f1(a, b)
    assert 0 <= contains(a, [b, "47"]) <= 1
    share = supported_share(a, b)
    assert share is None or 0 <= share <= 1
    alike = agreement(a, b)
    assert 0 <= alike.common_prefix <= 1
    assert alike.f1 == f1(a, b)


@steady
@given(texts)
def test_a_text_agrees_with_itself_and_supports_itself(text: str) -> None:
    assert [measure(text, text) for measure in PAIRED.values()] == [1, 1, 1]
    assert contains(text, [text]) == 1
    assert agreement(text, text).exact
    assert agreement(text, text).common_prefix == 1
    assert supported_share(text, text) in (None, 1)


@steady
@given(texts, texts)
def test_what_is_contained_stays_contained_in_a_longer_answer(answer: str, more: str) -> None:
    assert contains(f"{more}. {answer}. {more}", [answer]) == (1 if normalise(answer) or not normalise(more) else 0)


@steady
@given(words.map(" ".join))
def test_normal_form_is_final(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


def _plain_common_subsequence(a: str, b: str) -> int:
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            rows[i + 1][j + 1] = rows[i][j] + 1 if x == y else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


@steady
@given(st.text("甲乙丙丁", min_size=1), st.text("甲乙丙丁", min_size=1))
def test_rouge_l_against_the_table_of_all_prefixes(a: str, b: str) -> None:
    assert rouge_l(a, b) == pytest.approx(2 * _plain_common_subsequence(a, b) / (len(a) + len(b)))


@steady
@given(distributions, distributions)
def test_divergence_is_finite_and_never_negative(control: dict[int, float], treated: dict[int, float]) -> None:
    assert 0 <= first_token(control, treated).kl < math.inf
    same = first_token(control, dict(reversed(control.items())))
    assert (same.top1, same.kl) == (True, 0.0)


@steady
@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=2, max_size=12),
    st.integers(1, 12),
    st.integers(1, 12),
)
def test_divergence_of_the_top_is_a_lower_bound(weights: list[tuple[float, float]], k: int, j: int) -> None:
    p, q = ([weight / math.fsum(side) for weight in side] for side in zip(*weights, strict=True))
    full = math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True))

    def top(side: list[float], size: int) -> dict[int, float]:
        best = sorted(range(len(side)), key=lambda token: -side[token])[:size]
        return {token: math.log(side[token]) for token in best}

    assert first_token(top(p, k), top(q, j)).kl <= full + 1e-7
