"""Copying: a sentence of the context is begun and has to be continued word by word."""

from __future__ import annotations

from random import Random

from eval.tasks.task import Planted, Question
from eval.tasks.words import Language, cities, codes, people, things

_LINE = {
    "en": "Note by {person}: {a}, {b}, {c} and {value} for {city}.",
    "zh": "{person}的便条:{a}、{b}、{c}和{value}送往{city}。",
}
_ASK = {
    "en": "Repeat the note by {person} word by word.",
    "zh": "请一字不差地重复{person}的便条。",
}
_LEAD = {"en": "Note by {person}: {a}, {b}, {c} and", "zh": "{person}的便条:{a}、{b}、{c}和"}


def copying(draw: Random, language: Language, questions: int) -> Planted:
    """One note a question; the gold are the words that are left."""
    notes = []
    asked = []
    places = cities(draw, language, questions)
    for person, city, value in zip(
        people(draw, language, questions), places, codes(draw, language, questions), strict=True
    ):
        a, b, c = things(draw, language, 3)
        words = {"person": person, "city": city, "value": value, "a": a, "b": b, "c": c}
        notes.append(_LINE[language].format(**words))
        asked.append(Question(_ASK[language].format(**words), (value, city), _LEAD[language].format(**words)))
    draw.shuffle(notes)
    return Planted((tuple(notes),), tuple(asked))
