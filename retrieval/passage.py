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


@dataclass(frozen=True, slots=True)
class Section:
    """Neighbouring chunks of one page, joined; `score` is the best of theirs."""

    document: str
    page: int
    start: int
    end: int
    text: str
    score: float
    tokens: int

    def holds(self, chunk: Chunk) -> bool:
        """Whether all of a chunk is in it."""
        same = (self.document, self.page) == (chunk.document, chunk.page)
        return same and self.start <= chunk.start and chunk.end <= self.end
