"""Planted personal data at known places, and how much of it is found. Its names and sentences are of its own.

A value counts as found when every character of it lies in what was found: what is left of a name is still a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from eval.findings import Privacy, Rate
from eval.tasks.words import Language
from ingest.redact import Span, resolve

Find = Callable[[str], Sequence[Span]]

_NAMES: dict[Language, tuple[Sequence[str], Sequence[str]]] = {
    "en": (
        "Abigail Benedict Clementine Desmond Eleanor Fergus Gwendolyn Horatio Imogen Jasper Keziah Lysander".split(),
        "Ashdown Birtwistle Carmody Dunmore Eastlake Fairweather Gillespie Hargreaves Ibbotson Kingsley".split(),
    ),
    "zh": (
        "王 李 张 刘 陈 杨 赵 黄 周 吴 欧阳 司马".split(),
        "建国 秀英 志强 丽华 海燕 文博 思远 雨桐 子涵 国栋 晓梅 俊杰".split(),
    ),
}
_SENTENCES: dict[Language, Sequence[str]] = {
    "en": (
        "The form was signed by {PERSON} on the second day.",
        "Please write to {EMAIL_ADDRESS} before noon.",
        "Whoever is late calls {PHONE_NUMBER} and waits.",
        "The deposit was taken from card {CREDIT_CARD} at once.",
        "Refunds go to the account {IBAN_CODE} within a week.",
        "Her social security number is {US_SSN}, as she says.",
        "The last login came from {IP_ADDRESS} at night.",
    ),
    "zh": (
        "合同由{PERSON}在第二天签字。",
        "请在中午以前写信到{EMAIL_ADDRESS}。",
        "迟到的人请拨打{PHONE_NUMBER}并等候。",
    ),
}
_FILLER: dict[Language, Sequence[str]] = {
    "en": (
        "The gate is oiled every spring and painted every other year.",
        "A heavy door needs three hinges, a light one two.",
        "Water runs downhill, and so does most of the work.",
        "Nobody counts the chairs before the last guest has left.",
    ),
    "zh": ("大门每年春天上油，隔年刷漆。", "重的门要三个合页，轻的门要两个。", "客人走完以前没有人去数椅子。"),
}
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_]+")


@dataclass(frozen=True, slots=True)
class Planted:
    """A value at characters [start, end) of a text."""

    kind: str
    start: int
    end: int


def plant(draw: Random, language: Language, values: int) -> tuple[str, list[Planted]]:
    """A text with so many values of each kind that the language's sentences have, among sentences without any."""
    parts: list[str] = []
    planted: list[Planted] = []
    place = 0
    between = "" if language == "zh" else " "

    def add(text: str) -> None:
        nonlocal place
        parts.append(text + between)
        place += len(text) + len(between)

    for _ in range(values):
        for sentence in draw.sample(_SENTENCES[language], len(_SENTENCES[language])):
            before, kind, after = re.split(r"\{(\w+)\}", sentence)
            value = _value(draw, kind, language)
            planted.append(Planted(kind, place + len(before), place + len(before) + len(value)))
            add(f"{before}{value}{after}")
            add(draw.choice(_FILLER[language]))
    return "".join(parts), planted


def measure_privacy(find: Find, values: int, seed: int, languages: Sequence[Language] = ("en", "zh")) -> Privacy:
    """Plant values, and look for them.

    Args:
        find: all personal data in a text.
        values: of each kind and language.
    """
    rates: list[Rate] = []
    words = false_alarms = 0
    for language in languages:
        text, planted = plant(Random(f"{seed}/{language}"), language, values)
        found = resolve(find(text))
        words += len(_WORD.findall(text))
        false_alarms += sum(not any(_overlap(span, one) for one in planted) for span in found)
        for kind in dict.fromkeys(one.kind for one in planted):
            ones = [one for one in planted if one.kind == kind]
            hits = sum(any(span.start <= one.start and one.end <= span.end for span in found) for one in ones)
            rates.append(Rate.of(f"{kind} {language}", hits, len(ones)))
    return Privacy(tuple(rates), words, false_alarms)


def _overlap(span: Span, one: Planted) -> bool:
    return span.start < one.end and one.start < span.end


def _value(draw: Random, kind: str, language: Language) -> str:
    return _VALUES[kind](draw, language)


def _person(draw: Random, language: Language) -> str:
    first, last = _NAMES[language]
    return f"{draw.choice(first)}{'' if language == 'zh' else ' '}{draw.choice(last)}"


def _email(draw: Random, _: Language) -> str:
    first, last = _NAMES["en"]
    return f"{draw.choice(first)}.{draw.choice(last)}{draw.randrange(100)}@example.com".lower()


def _phone(draw: Random, language: Language) -> str:
    if language == "zh":
        return f"13{draw.randrange(10)}{draw.randrange(10**8):08d}"
    return f"({draw.randrange(201, 989)}) {draw.randrange(200, 999)}-{draw.randrange(10**4):04d}"


def _card(draw: Random, _: Language) -> str:
    digits = [4, *(draw.randrange(10) for _ in range(14))]
    digits.append(-sum(_luhn(digits)) % 10)
    text = "".join(map(str, digits))
    return " ".join(text[start : start + 4] for start in range(0, 16, 4))


def _luhn(digits: Sequence[int]) -> Iterator[int]:
    """What each digit before the check digit adds to the sum (ISO/IEC 7812-1)."""
    for place, digit in enumerate(reversed(digits)):
        doubled = digit * 2 if place % 2 == 0 else digit
        yield doubled - 9 if doubled > 9 else doubled


def _iban(draw: Random, _: Language) -> str:
    account = "".join(str(draw.randrange(10)) for _ in range(18))
    # DE is 13 14, and the check digits make the whole number 1 modulo 97 (ISO 13616).
    return f"DE{98 - int(f'{account}131400') % 97:02d}{account}"


def _ssn(draw: Random, _: Language) -> str:
    return f"{draw.randrange(100, 665)}-{draw.randrange(11, 99)}-{draw.randrange(1000, 9999)}"


def _ip(draw: Random, _: Language) -> str:
    return ".".join(str(draw.randrange(11, 250)) for _ in range(4))


_VALUES: dict[str, Callable[[Random, Language], str]] = {
    "PERSON": _person,
    "EMAIL_ADDRESS": _email,
    "PHONE_NUMBER": _phone,
    "CREDIT_CARD": _card,
    "IBAN_CODE": _iban,
    "US_SSN": _ssn,
    "IP_ADDRESS": _ip,
}
