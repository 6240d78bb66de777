"""Planted personal data against finders that find all, nothing, or too much."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from presidio_analyzer.predefined_recognizers import CreditCardRecognizer, IbanRecognizer

from eval.privacy import measure_privacy, plant
from eval.tasks.words import Language
from ingest.redact import Span


@pytest.mark.parametrize("language", ["en", "zh"])
def test_values_stand_where_they_are_said_to(language: Language) -> None:
    text, planted = plant(Random(1), language, 20)
    kinds = {one.kind for one in planted}
    assert {kind: sum(one.kind == kind for one in planted) for kind in kinds} == dict.fromkeys(kinds, 20)
    for one in planted:
        value = text[one.start : one.end]
        assert value.strip() == value
        if one.kind == "EMAIL_ADDRESS":
            assert value.endswith("@example.com")
        elif one.kind == "CREDIT_CARD":
            assert CreditCardRecognizer().validate_result(value)
        elif one.kind == "IBAN_CODE":
            assert IbanRecognizer().validate_result(value)


def _all(text: str) -> list[Span]:
    return [Span(one.start, one.end, one.kind, 1.0) for one in _PLANTED[text]]


_LANGUAGES: tuple[Language, ...] = ("en", "zh")
_PLANTED = dict(plant(Random(f"0/{language}"), language, 5) for language in _LANGUAGES)


def _half(text: str) -> list[Span]:
    """All but the last character."""
    return [Span(one.start, one.end - 1, one.entity, 1.0) for one in _all(text)]


@pytest.mark.parametrize(
    ("find", "share", "false_alarms"),
    [(_all, 1.0, 0), (lambda _: [], 0.0, 0), (_half, 0.0, 0), (lambda t: [Span(0, len(t), "PERSON", 1.0)], 1.0, 0)],
)
def test_shares(find: Callable[[str], list[Span]], share: float, false_alarms: int) -> None:
    found = measure_privacy(find, 5, 0)
    assert {rate.share for rate in found.recall} == {share}
    assert found.false_alarms == false_alarms
    assert all(rate.n == 5 and rate.low <= share <= rate.high for rate in found.recall)


def test_what_is_no_personal_data_is_a_false_alarm() -> None:
    assert measure_privacy(lambda text: [Span(0, 1, "PERSON", 1.0)] if text else [], 5, 0).false_alarms == 2
