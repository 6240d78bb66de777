"""The nouns of a task, and how its planted sentences become a context of a given length.

A task plants sentences that carry the answers; the carrier text around them is generated too (`carrier`). Several
questions share one context, because contexts are the independent samples and cost most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from app.prompt import Excerpt, Source
from eval.tasks.carrier import paragraph
from eval.tasks.words import WORDS, Language

# About what a printed page holds.
_PARAGRAPHS_A_PAGE = 6
# In tokens; by any tokenizer, so many paragraphs fill a context.
_SHORTEST_PARAGRAPH = 15


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the strings that a right answer contains, all of them.

    `lead` is how the answer begins; the model is given it and continues, so that small models, too, answer in form.
    `at_once`: the next sentence must hold the gold; what a model rambles on to say after it does not count. `others`
    are gold strings that will do in the place of `gold`. `judged` by its words, by the letter that it chooses, or right
    when it refuses to answer.
    """

    text: str
    gold: tuple[str, ...]
    lead: str
    max_tokens: int = 16
    at_once: bool = True
    others: tuple[tuple[str, ...], ...] = ()
    judged: Literal["words", "letter", "refusal"] = "words"


@dataclass(frozen=True, slots=True)
class Planted:
    """What a task puts into a context: the sentences of each document, in the order they must have, and questions."""

    documents: tuple[tuple[str, ...], ...]
    questions: tuple[Question, ...]


class Task(Protocol):
    """Draws planted sentences and at most `questions` questions about them."""

    def __call__(self, draw: Random, language: Language, questions: int) -> Planted: ...


@dataclass(frozen=True, slots=True)
class Context:
    """One context and the questions that share it; `id` names task, language, length and number."""

    id: str
    task: str
    language: Language
    length: int
    sources: tuple[Source, ...]
    questions: tuple[Question, ...]


def build_context(
    name: str,
    task: Task,
    *,
    language: Language,
    length: int,
    number: int,
    seed: int,
    questions: int,
    count_prompt: Callable[[Sequence[Source], Question], int],
) -> Context:
    """A context whose longest prompt has at most `length` tokens, and nearly as many.

    Args:
        count_prompt: tokens of the whole prompt (template, documents, question, lead), as the engine counts them.

    Raises:
        ValueError: the planted sentences alone are longer than that.
    """
    id = f"{name}-{language}-{length}-{number}"
    draw = Random(f"{seed}/{id}")
    planted = task(draw, language, questions)
    titles = draw.sample(WORDS[language]["titles"], len(planted.documents))
    # Every document has a share of the filler; the planted sentences have fixed places relative to its size.
    places = [[draw.random() for _ in document] for document in planted.documents]
    filler = [paragraph(draw, language) for _ in range(length // _SHORTEST_PARAGRAPH)]

    def sources(paragraphs: int) -> tuple[Source, ...]:
        texts = zip(planted.documents, places, _shares(filler[:paragraphs], len(planted.documents)), strict=True)
        return tuple(
            Source(title, _pages(_mix(document, place, share)))
            for title, (document, place, share) in zip(titles, texts, strict=True)
        )

    def prompt_tokens(paragraphs: int) -> int:
        made = sources(paragraphs)
        return max(count_prompt(made, question) for question in planted.questions)

    if prompt_tokens(0) > length:
        raise ValueError(f"task {name!r} does not fit {length:,} tokens; ask for fewer questions or a longer context")
    made = sources(_largest(prompt_tokens, length, len(filler)))
    return Context(id, name, language, length, made, planted.questions)


def _largest(size: Callable[[int], int], limit: int, most: int) -> int:
    """The largest number from 0 to `most` whose size is within the limit; sizes grow nearly evenly, so interpolate."""
    low, high = 0, most
    size_low, size_high = size(low), size(high)
    if size_high <= limit:
        return most
    while high - low > 1:
        guess = low + (limit - size_low) * (high - low) // (size_high - size_low)
        guess = min(max(guess, low + 1), high - 1)
        if (found := size(guess)) <= limit:
            low, size_low = guess, found
        else:
            high, size_high = guess, found
    return low


def _shares(filler: Sequence[str], count: int) -> list[Sequence[str]]:
    return [filler[number::count] for number in range(count)]


def _mix(planted: Sequence[str], places: Sequence[float], filler: Sequence[str]) -> list[str]:
    """Planted sentences between paragraphs of filler, in order, each in a paragraph of its own."""
    mixed: list[str] = []
    done = 0
    for sentence, place in zip(planted, sorted(places), strict=True):
        until = round(place * len(filler))
        mixed += [*filler[done:until], sentence]
        done = until
    return [*mixed, *filler[done:]]


def _pages(paragraphs: Sequence[str]) -> tuple[Excerpt, ...]:
    return tuple(
        Excerpt(number, "\n\n".join(paragraphs[start : start + _PARAGRAPHS_A_PAGE]))
        for number, start in enumerate(range(0, len(paragraphs), _PARAGRAPHS_A_PAGE), start=1)
    )
