"""The nouns of retrieval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one page: characters [start, end) of its text. `number` counts from 0 through the document."""

    document: str
    number: int
    page: int
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that a search found; `score` is the cosine similarity to the question."""

    document: str
    number: int
    score: float
