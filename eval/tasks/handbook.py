"""A handbook of any number of pages with a numbered outline, and single facts on known pages. Pure.

Each fact is a sentence of a paragraph about a subject of its own, as in real handbooks; nothing else is told of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from eval.facts import Fact
from eval.tasks.carrier import paragraph, sentence
from eval.tasks.words import WORDS, Language, cities, codes, things

# The number of pages of a chapter and of a section.
_CHAPTER = (8, 14)
_SECTION = (2, 4)
# Characters of its paragraphs at least: a printed page has about as many. What is far longer, ingest would cut in two.
_PAGE = {"en": 1800, "zh": 600}
# A page of a long document that holds one fact is seldom beside another one.
_MOST_FACTS_A_PAGE = 0.5

Words = Callable[[Random, Language, int], list[str]]


def _amounts(draw: Random, _language: Language, count: int) -> list[str]:
    return [str(number) for number in draw.sample(range(13, 980), count)]


# What is told of a thing, what is asked, and which kind of word answers.
_RELATIONS: dict[Language, tuple[tuple[str, str, Words], ...]] = {
    "en": (
        ("The {key} is opened with the code {value}.", "Which code opens the {key}?", codes),
        ("The {key} was shipped here from {value}.", "From where was the {key} shipped?", cities),
        ("Whoever locks the {key} hangs a {value} on its handle.", "What is hung on the handle of the {key}?", things),
        ("The oil in the {key} is changed every {value} days.", "How often is the oil in the {key} changed?", _amounts),
        ("The roof of the {key} carries {value} kilograms.", "How much does the roof of the {key} carry?", _amounts),
        ("The maker of the {key} sits in {value}.", "Where does the maker of the {key} sit?", cities),
        ("The insurance of the {key} has the number {value}.", "Which number has the insurance of the {key}?", codes),
        ("A {value} is painted on the {key}.", "What is painted on the {key}?", things),
        ("The {key} holds {value} litres of water.", "How much water does the {key} hold?", _amounts),
        ("Spare keys for the {key} are kept in {value}.", "Where are the spare keys for the {key} kept?", cities),
        ("The {key} is entered in the inventory as {value}.", "As what is the {key} entered in the inventory?", codes),
        ("Under the floor of the {key} lies a {value}.", "What lies under the floor of the {key}?", things),
        ("The {key} must be aired for {value} minutes.", "How long must the {key} be aired?", _amounts),
        ("The drawings of the {key} are archived in {value}.", "Where are the drawings of the {key} archived?", cities),
        (
            "Repairs of the {key} are booked on account {value}.",
            "On which account are repairs of the {key} booked?",
            codes,
        ),
        ("The draught in the {key} is stopped with a {value}.", "What stops the draught in the {key}?", things),
    ),
    "zh": (
        ("打开{key}要用密码{value}。", "打开{key}要用什么密码?", codes),
        ("{key}是从{value}运来的。", "{key}是从哪里运来的?", cities),
        ("锁上{key}的人要在把手上挂一个{value}。", "{key}的把手上要挂什么?", things),
        ("{key}每{value}天换一次油。", "{key}多少天换一次油?", _amounts),
        ("{key}的顶棚能承重{value}公斤。", "{key}的顶棚能承重多少公斤?", _amounts),
        ("{key}的制造商设在{value}。", "{key}的制造商设在哪里?", cities),
        ("{key}的保险单号是{value}。", "{key}的保险单号是多少?", codes),
        ("{key}上面画着一个{value}。", "{key}上面画着什么?", things),
        ("{key}能装{value}升水。", "{key}能装多少升水?", _amounts),
        ("{key}的备用钥匙放在{value}。", "{key}的备用钥匙放在哪里?", cities),
        ("{key}在清单上的编号是{value}。", "{key}在清单上的编号是多少?", codes),
        ("{key}的地板下面有一个{value}。", "{key}的地板下面有什么?", things),
        ("{key}必须通风{value}分钟。", "{key}必须通风多少分钟?", _amounts),
        ("{key}的图纸存放在{value}。", "{key}的图纸存放在哪里?", cities),
        ("修理{key}的费用记在账户{value}上。", "修理{key}的费用记在哪个账户上?", codes),
        ("{key}里的穿堂风用一个{value}挡住。", "{key}里的穿堂风用什么挡住?", things),
    ),
}


@dataclass(frozen=True, slots=True)
class Handbook:
    """The texts of its pages, the first one is page 1, and what can be asked about them, in random order."""

    pages: tuple[str, ...]
    facts: tuple[Fact, ...]


def most_facts(pages: int) -> int:
    """The largest number of facts that a handbook has room for."""
    return min(int(_MOST_FACTS_A_PAGE * pages), *(len(WORDS[language]["handbook"]["subjects"]) for language in WORDS))


def handbook(draw: Random, language: Language, *, pages: int, facts: int) -> Handbook:
    """A handbook with at most `most_facts(pages)` facts, each on a page of its own."""
    told = _facts(draw, language, facts)
    places = draw.sample(range(pages), facts)
    planted = {place: text for place, (text, _, _) in zip(places, told, strict=True)}
    headings = _outline(draw, language, pages)
    texts = tuple(_page(draw, language, headings[place], planted.get(place)) for place in range(pages))
    asked = (Fact(ask, (value,), place + 1) for place, (_, ask, value) in zip(places, told, strict=True))
    return Handbook(texts, tuple(asked))


def _facts(draw: Random, language: Language, count: int) -> list[tuple[str, str, str]]:
    """So many paragraphs with their questions and answers; relations take turns."""
    relations = draw.sample(_RELATIONS[language], len(_RELATIONS[language]))
    glue, article = (" ", "the ") if language == "en" else ("", "")
    facts = []
    for number, key in enumerate(draw.sample(WORDS[language]["handbook"]["subjects"], count)):
        line, ask, words = relations[number % len(relations)]
        (value,) = words(draw, language, 1)
        before, after = (sentence(draw, language, article + key) for _ in range(2))
        facts.append((glue.join((before, line.format(key=key, value=value), after)), ask.format(key=key), value))
    return facts


def _outline(draw: Random, language: Language, pages: int) -> list[list[str]]:
    """The headings that each page begins with."""
    lists = WORDS[language]["handbook"]
    chapters = draw.sample(lists["chapters"], len(lists["chapters"]))
    headings: list[list[str]] = []
    chapter = 0
    while len(headings) < pages:
        # A handbook with more chapters than there are words for tells of the same ones again, as second parts do.
        title = chapters[chapter % len(chapters)]
        chapter += 1
        length = draw.randint(*_CHAPTER)
        sections = draw.sample(lists["sections"], len(lists["sections"]))
        begun: list[list[str]] = []
        for number, section in enumerate(sections, start=1):
            if len(begun) >= length:
                break
            begun.append([f"{chapter}.{number} {section}"])
            begun += [[] for _ in range(draw.randint(*_SECTION) - 1)]
        begun[0].insert(0, f"{chapter} {title}")
        headings += begun
    return headings[:pages]


def _page(draw: Random, language: Language, headings: list[str], planted: str | None) -> str:
    paragraphs: list[str] = []
    while sum(map(len, paragraphs)) < _PAGE[language]:
        paragraphs.append(paragraph(draw, language))
    if planted is not None:
        paragraphs.insert(draw.randint(0, len(paragraphs)), planted)
    return "\n\n".join([*headings, *paragraphs])
