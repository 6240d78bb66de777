"""Questions over several documents, each of which tells one fact."""

from __future__ import annotations

from random import Random

from eval.tasks.task import Planted, Question
from eval.tasks.words import Language, cities, people

_FACTS = {
    "en": (
        ("Branch register, {city}: manager =", "Who is the manager of the {city} branch?"),
        ("Branch register, {city}: founder =", "Who is the founder of the {city} branch?"),
        ("Branch register, {city}: auditor =", "Who is the auditor of the {city} branch?"),
        ("Branch register, {city}: landlord =", "Who is the landlord of the {city} branch?"),
        ("Branch register, {city}: adviser =", "Who is the adviser of the {city} branch?"),
        ("Branch register, {city}: night guard =", "Who is the night guard of the {city} branch?"),
    ),
    "zh": (
        ("分公司名册,{city}:负责人 =", "{city}分公司的负责人是谁?"),
        ("分公司名册,{city}:创办人 =", "{city}分公司的创办人是谁?"),
        ("分公司名册,{city}:审计员 =", "{city}分公司的审计员是谁?"),
        ("分公司名册,{city}:房东 =", "{city}分公司的房东是谁?"),
        ("分公司名册,{city}:顾问 =", "{city}分公司的顾问是谁?"),
        ("分公司名册,{city}:夜间保安 =", "{city}分公司的夜间保安是谁?"),
    ),
}


def documents(draw: Random, language: Language, questions: int) -> Planted:
    """One document a question; each tells its fact twice, as reports do."""
    places, persons = cities(draw, language, questions), people(draw, language, questions)
    parts = []
    asked = []
    facts = draw.sample(_FACTS[language], questions)
    for city, person, (told, ask) in zip(places, persons, facts, strict=True):
        lead = told.format(city=city)
        sentence = f"{lead} {person}." if language == "en" else f"{lead} {person}。"
        parts.append((sentence, sentence))
        asked.append(Question(ask.format(city=city), (person,), lead))
    return Planted(tuple(parts), tuple(asked))
