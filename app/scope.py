"""What is read together, and always begins in the same way: documents in their order, before any question.

Everything up to the question depends on the documents alone, so it can be read before there is a question, and lies in
a cache namespace of its own.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from app.prompt import VERSION, Excerpt, Source, build_messages
from retrieval.catalogue import Catalogue, Document, StoredPage
from serving.engine import Engine

# Two questions with nothing in common: what their prompts share, the prompt of every question has.
_QUESTIONS = ("a", "1?")
_ANSWER_TOKENS = 512
_ANSWER_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Scope:
    """Documents by id, oldest first."""

    documents: tuple[str, ...]

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Scope:
        """The scope of documents that are in order."""
        return cls(tuple(document.id for document in documents))


def in_order(documents: Sequence[Document]) -> list[Document]:
    """Oldest first, so that the same documents always make the same prompt."""
    return sorted(documents, key=lambda document: (document.created_at, document.id))


def answer_room(window: int) -> int:
    """The longest answer in tokens, where nobody says another."""
    return min(_ANSWER_TOKENS, int(window * _ANSWER_SHARE))


def may_fit(documents: Sequence[Document], window: int, room: int | None = None) -> bool:
    """Whether the pages alone leave room for an answer, by the stored counts, before anything is read or rendered.

    Args:
        room: of the answer in tokens, by default `answer_room`.
    """
    return sum(document.tokens or 0 for document in documents) + (room or answer_room(window)) < window


def pages_of(documents: Sequence[Document], catalogue: Catalogue) -> list[StoredPage]:
    """All pages of documents, in their order; blocks."""
    return [page for document in documents for page in catalogue.pages(document.id)]


def whole_sources(documents: Sequence[Document], pages: Sequence[StoredPage]) -> list[Source]:
    """Documents as they go into the prompt when they are read whole."""
    return [
        Source(document.name, tuple(Excerpt(p.number, p.text) for p in pages if p.document == document.id))
        for document in documents
    ]


def common_prompt(sources: Sequence[Source], engine: Engine) -> list[int]:
    """The tokens with which the prompt of every question about these sources begins."""
    one, other = (engine.render_chat(build_messages(sources, question)) for question in _QUESTIONS)
    return one[: shared_tokens(one, other)]


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many tokens both begin."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def prompt_of(scope: Scope, catalogue: Catalogue, engine: Engine) -> list[int]:
    """`common_prompt` of a scope; blocks.

    Raises:
        UnknownDocument: one of its documents was deleted.
    """
    documents = [catalogue.get(id) for id in scope.documents]
    return common_prompt(whole_sources(documents, pages_of(documents, catalogue)), engine)


def salt_of(scope: Scope, how: str, engine: Engine, key: bytes) -> str:
    """The cache namespace of a scope that is read in this way: keyed, so that nobody can guess it.

    It changes with everything that keys and values depend on: the model with its settings and precision, the layout of
    the prompt, and how it is read.
    """
    about = engine.capabilities
    parts = "\n".join([VERSION, about.model, about.fingerprint, how, *scope.documents])
    return hmac.new(key, parts.encode(), sha256).hexdigest()
