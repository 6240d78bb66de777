"""Names, keys and numbers that tasks plant; the lists are in words.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random
from typing import Any, Literal

Language = Literal["en", "zh"]

WORDS: dict[Language, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "words.toml").read_text("utf-8"))  # type: ignore[assignment]


def people(draw: Random, language: Language, count: int) -> list[str]:
    """Different full names."""
    return draw.sample(WORDS[language]["people"], count)


def cities(draw: Random, language: Language, count: int) -> list[str]:
    """Different cities."""
    return draw.sample(WORDS[language]["cities"], count)


def things(draw: Random, language: Language, count: int) -> list[str]:
    """Different small things."""
    return draw.sample(WORDS[language]["things"], count)


def objects(draw: Random, language: Language, count: int) -> list[str]:
    """Different coloured objects that share no word, such as "amber gate"."""
    colours, kinds = draw.sample(WORDS[language]["colours"], count), draw.sample(WORDS[language]["objects"], count)
    return [_coloured(language, colour, kind) for colour, kind in zip(colours, kinds, strict=True)]


def alike_objects(draw: Random, language: Language, count: int) -> list[str]:
    """Different coloured objects of one kind: they share a word, so each distracts from the others."""
    kind = draw.choice(WORDS[language]["objects"])
    return [_coloured(language, colour, kind) for colour in draw.sample(WORDS[language]["colours"], count)]


def codes(draw: Random, _language: Language, count: int) -> list[str]:
    """Different five-digit numbers."""
    return [str(number) for number in draw.sample(range(10_000, 100_000), count)]


def _coloured(language: Language, colour: str, kind: str) -> str:
    return f"{colour} {kind}" if language == "en" else f"{colour}的{kind}"
