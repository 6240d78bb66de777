"""Which page supports which sentence of an answer, found by matching, not by asking the model. Pure.

Each sentence of the answer is compared with the sentences of the context. Words count by how rare they are in the
context, and numbers count double, because an answer stands or falls with them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_SENTENCE = re.compile(r"[^.!?。！？；\n]+(?:[.!?](?!\s|$)[^.!?。！？；\n]+)*[.!?。！？；]*")
_WORD = re.compile(r"[^\W_]+(?:[.,'’-][^\W_]+)*")
_CJK = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
_MIN_SCORE = 0.5
_STOP_WORDS = frozenset(
    "a an and are as at be been but by can did do does for from had has have he her his how i if in is it its "
    "may no not of on or our she so such that the their them then there these they this to us was we were what "
    "when where which who will with would you your document documents page says say answer question".split()
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Text that the model was given, and where it comes from."""

    document: str
    name: str
    page: int
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Citation:
    """`quote` on that page supports characters [start, end) of the answer; `score` from 0 to 1."""

    document: str
    name: str
    page: int
    label: str
    quote: str
    score: float
    start: int
    end: int


def cite(answer: str, question: str, evidence: Sequence[Evidence]) -> list[Citation]:
    """The best supporting sentence for each sentence of the answer that has one.

    A short answer ("47.") holds few words of its own, so the question's words help to choose between places; they
    never make a match without the answer's own words.
    """
    places = [(item, quote, Counter(_words(quote))) for item in evidence for quote, _, _ in _sentences(item.text)]
    if not places:
        return []
    frequency = Counter(word for _, _, words in places for word in words)
    weight = {word: _weight(word, count, len(places)) for word, count in frequency.items()}
    asked = set(_words(question))
    citations = []
    for sentence, start, end in _sentences(answer):
        best = _best_place(set(_words(sentence)), asked, places, weight, unknown=_weight("", 0, len(places)))
        if best is not None:
            (item, quote, _), score = best
            citations.append(
                Citation(item.document, item.name, item.page, item.label, quote, round(score, 3), start, end)
            )
    return citations


def _best_place(
    said: set[str],
    asked: set[str],
    places: Sequence[tuple[Evidence, str, Counter[str]]],
    weight: dict[str, float],
    unknown: float,
) -> tuple[tuple[Evidence, str, Counter[str]], float] | None:
    total = sum(weight.get(word, unknown) for word in said)
    # Repeating the question supports nothing: there must be something new to support, unless all of it was asked.
    own = said - asked or said
    if not total:
        return None
    best, best_rank = None, (0.0, 0.0)
    for place in places:
        words = place[2]
        score = sum(weight[word] for word in said if word in words) / total
        if score < _MIN_SCORE or not any(word in words for word in own):
            continue
        rank = (round(score, 6), sum(weight[word] for word in asked if word in words))
        if rank > best_rank:
            best, best_rank = place, rank
    return (best, best_rank[0]) if best is not None else None


def _weight(word: str, count: int, places: int) -> float:
    rarity = math.log((places + 1) / (count + 1)) + 1.0
    return 2 * rarity if word[:1].isdigit() else rarity


def _words(text: str) -> list[str]:
    """Words in lower case without the commonest ones; Chinese text, which has no spaces, as pairs of characters."""
    words = []
    for match in _WORD.finditer(text):
        word = match.group().casefold()
        if _CJK.search(word):
            words += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        elif word not in _STOP_WORDS:
            words.append(word)
    return words


def _sentences(text: str) -> Iterator[tuple[str, int, int]]:
    """Sentences with their spans. Lines that a PDF has broken are joined; headings without words are skipped."""
    joined = _join_lines(text)
    for match in _SENTENCE.finditer(joined):
        start, end = match.span()
        start += len(match.group()) - len(match.group().lstrip())
        sentence = joined[start:end].rstrip()
        if sentence and _words(sentence):
            yield sentence, start, start + len(sentence)


def _join_lines(text: str) -> str:
    """Single line breaks become spaces, so offsets stay; blank lines still end a sentence."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)
