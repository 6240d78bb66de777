"""Aggregation: no single sentence answers; it is the word that stands most often beside a name."""

from __future__ import annotations

from random import Random

from eval.tasks.task import Planted, Question
from eval.tasks.words import Language, people, things

_NOTES = {
    "en": (
        ("Purchase by {person} =", "What did {person} purchase most often?"),
        ("Loan to {person} =", "What was lent to {person} most often?"),
        ("Sketch by {person} =", "What did {person} sketch most often?"),
        ("Repair by {person} =", "What did {person} repair most often?"),
        ("Find of {person} =", "What did {person} find most often?"),
        ("Gift from {person} =", "What did {person} give away most often?"),
    ),
    "zh": (
        ("{person}订购 =", "{person}订购得最多的是什么?"),
        ("{person}借走 =", "{person}借走得最多的是什么?"),
        ("{person}描绘 =", "{person}描绘得最多的是什么?"),
        ("{person}修好 =", "{person}修好得最多的是什么?"),
        ("{person}找到 =", "{person}找到得最多的是什么?"),
        ("{person}送出 =", "{person}送出得最多的是什么?"),
    ),
}
_OFTEN = 6
_SELDOM = 1


def aggregation(draw: Random, language: Language, questions: int) -> Planted:
    """Each person does one thing to one object six times and to another once."""
    notes = []
    asked = []
    deeds = draw.sample(_NOTES[language], questions)
    for person, (note, ask) in zip(people(draw, language, questions), deeds, strict=True):
        often, *seldom = things(draw, language, 1 + _SELDOM)
        lead = note.format(person=person)
        notes += [f"{lead} {w}." if language == "en" else f"{lead} {w}。" for w in [often] * _OFTEN + seldom]
        asked.append(Question(ask.format(person=person), (often,), lead))
    draw.shuffle(notes)
    return Planted((tuple(notes),), tuple(asked))
