"""Planted facts: single, several at once, several values of one key, and among facts that look alike.

After "needle in a haystack" and its variants in RULER (Hsieh et al., 2024, arXiv:2404.06654, section 3.1).
"""

from __future__ import annotations

from random import Random

from eval.tasks.task import Planted, Question
from eval.tasks.words import Language, alike_objects, cities, codes, objects, people, things

# What is told of a thing, what is asked, and which kind of word answers.
_RELATIONS = {
    "en": (
        ("Register entry, {key}: designer =", "Who is the designer of the {key}?", people),
        ("Register entry, {key}: shipped to =", "Where was the {key} shipped to?", cities),
        ("Register entry, {key}: access code =", "What is the access code of the {key}?", codes),
        ("Register entry, {key}: decoration =", "What is the decoration of the {key}?", things),
        ("Register entry, {key}: insured by =", "By whom is the {key} insured?", people),
        ("Register entry, {key}: former place =", "What is the former place of the {key}?", cities),
        ("Register entry, {key}: price =", "What is the price of the {key}?", codes),
        ("Register entry, {key}: lost there =", "What was lost in the {key}?", things),
    ),
    "zh": (
        ("登记簿,{key}:设计者 =", "{key}的设计者是谁?", people),
        ("登记簿,{key}:运往 =", "{key}被运往哪里?", cities),
        ("登记簿,{key}:门禁密码 =", "{key}的门禁密码是多少?", codes),
        ("登记簿,{key}:装饰 =", "{key}的装饰是什么?", things),
        ("登记簿,{key}:承保人 =", "{key}的承保人是谁?", people),
        ("登记簿,{key}:旧址 =", "{key}的旧址在哪里?", cities),
        ("登记簿,{key}:价格 =", "{key}的价格是多少?", codes),
        ("登记簿,{key}:失物 =", "{key}里丢了什么?", things),
    ),
}
_FACT = {"en": "The access code of the {key} is {value}.", "zh": "{key}的门禁密码是{value}。"}
_ASK = {"en": "What is the access code of the {key}?", "zh": "{key}的门禁密码是多少?"}
_LEAD = {"en": "The access code of the {key} is", "zh": "{key}的门禁密码是"}
_ASK_ALL = {"en": "What are the access codes of the {keys}?", "zh": "{keys}的门禁密码分别是多少?"}
_TICKET = {"en": "One ticket number of the {key} is {value}.", "zh": "{key}的一个工单号是{value}。"}
_ASK_TICKETS = {"en": "Name all {count} ticket numbers of the {key}.", "zh": "请列出{key}的全部{count}个工单号。"}
_LEAD_TICKETS = {"en": "One ticket number of the {key} is", "zh": "{key}的一个工单号是"}
_TOGETHER = 2


def single(draw: Random, language: Language, questions: int) -> Planted:
    """One fact a question; the facts share neither a thing nor what is told of it."""
    relations = draw.sample(_RELATIONS[language], questions)
    sentences = []
    asked = []
    for key, (told, ask, words) in zip(objects(draw, language, questions), relations, strict=True):
        (value,) = words(draw, language, 1)
        lead = told.format(key=key)
        sentences.append(f"{lead} {value}." if language == "en" else f"{lead} {value}。")
        asked.append(Question(ask.format(key=key), (value,), lead))
    draw.shuffle(sentences)
    return Planted((tuple(sentences),), tuple(asked))


def distractors(draw: Random, language: Language, questions: int) -> Planted:
    """One fact a question, among as many facts about things of the same name and another colour."""
    keys = alike_objects(draw, language, 2 * questions)
    return _one_each(draw, language, keys, questions)


def several(draw: Random, language: Language, questions: int) -> Planted:
    """Each question asks for two facts that lie apart."""
    keys = objects(draw, language, _TOGETHER * questions)
    facts = dict(zip(keys, codes(draw, language, len(keys)), strict=True))
    asked = []
    glue = " and of the " if language == "en" else "和"
    for start in range(0, len(keys), _TOGETHER):
        group = keys[start : start + _TOGETHER]
        asked.append(
            Question(
                _ASK_ALL[language].format(keys=glue.join(group)),
                tuple(facts[key] for key in group),
                _LEAD[language].format(key=group[0]),
                max_tokens=48,
                at_once=False,
            )
        )
    return Planted((_sentences(draw, language, facts),), tuple(asked))


def values(draw: Random, language: Language, questions: int) -> Planted:
    """One key has two values, planted apart; all of them are asked for."""
    keys = objects(draw, language, questions)
    numbers = codes(draw, language, _TOGETHER * len(keys))
    owned = {key: numbers[i * _TOGETHER : (i + 1) * _TOGETHER] for i, key in enumerate(keys)}
    sentences = [_TICKET[language].format(key=key, value=value) for key in keys for value in owned[key]]
    draw.shuffle(sentences)
    asked = [
        Question(
            _ASK_TICKETS[language].format(key=key, count=_TOGETHER),
            tuple(owned[key]),
            _LEAD_TICKETS[language].format(key=key),
            max_tokens=48,
            at_once=False,
        )
        for key in keys
    ]
    return Planted((tuple(sentences),), tuple(asked))


def _one_each(draw: Random, language: Language, keys: list[str], questions: int) -> Planted:
    facts = dict(zip(keys, codes(draw, language, len(keys)), strict=True))
    asked = [
        Question(_ASK[language].format(key=key), (facts[key],), _LEAD[language].format(key=key))
        for key in keys[:questions]
    ]
    return Planted((_sentences(draw, language, facts),), tuple(asked))


def _sentences(draw: Random, language: Language, facts: dict[str, str]) -> tuple[str, ...]:
    sentences = [_FACT[language].format(key=key, value=value) for key, value in facts.items()]
    draw.shuffle(sentences)
    return tuple(sentences)
