"""Two facts that only together answer: who works where, and what that place is called."""

from __future__ import annotations

from random import Random

from eval.tasks.task import Planted, Question
from eval.tasks.words import Language, cities, codes, people

_WHERE = {"en": "{person} works in the {city} office.", "zh": "{person}在{city}办事处工作。"}
_CODE = {"en": "The door code of the {city} office is {value}.", "zh": "{city}办事处的门锁密码是{value}。"}
_ASK = {
    "en": "What is the door code of the office in which {person} works?",
    "zh": "{person}工作的办事处的门锁密码是多少?",
}
_LEAD = {"en": "{person} works in the", "zh": "{person}在"}


def hops(draw: Random, language: Language, questions: int) -> Planted:
    """The answer names the place first, so that the second fact can be found by it."""
    persons, places = people(draw, language, questions), cities(draw, language, questions)
    numbers = codes(draw, language, questions)
    sentences = [_WHERE[language].format(person=p, city=c) for p, c in zip(persons, places, strict=True)]
    sentences += [_CODE[language].format(city=c, value=n) for c, n in zip(places, numbers, strict=True)]
    draw.shuffle(sentences)
    asked = [
        Question(_ASK[language].format(person=p), (n,), _LEAD[language].format(person=p), max_tokens=40, at_once=False)
        for p, n in zip(persons, numbers, strict=True)
    ]
    return Planted((tuple(sentences),), tuple(asked))
