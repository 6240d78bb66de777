"""What is read together, and always begins in the same way: documents in their order, or a volume of a long one.

Everything up to the question depends on the documents alone, so it can be read before there is a question, and lies in
a cache namespace of its own.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256

from app.prompt import VERSION, Excerpt, Source, build_messages
from app.volumes import Volume, card, cut, headings, table_of_contents
from retrieval.catalogue import Catalogue, Document, StoredPage
from retrieval.errors import RetrievalError
from serving.engine import Engine

# Two questions with nothing in common: what their prompts share, the prompt of every question has.
_QUESTIONS = ("a", "1?")
_ANSWER_TOKENS = 512
_ANSWER_SHARE = 0.25
# What a volume leaves free beside the answer, and what its table of contents may take, each.
_ASIDE_TOKENS = 256
_ASIDE_SHARE = 1 / 32
# The two lines of a card around the table of contents.
_CARD_TOKENS = 48
# Where instructions leave less of a small window, volumes would be mere passages.
_LEAST_ROOM_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Scope:
    """Documents by id, oldest first; `volume` (from 1) of the only one when it is too long to be read whole."""

    documents: tuple[str, ...]
    volume: int | None = None

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


def aside_room(window: int) -> int:
    """Tokens of passages that may stand between a volume and the question, and of a question that is sure to fit."""
    return min(_ASIDE_TOKENS, int(window * _ASIDE_SHARE))


@dataclass(frozen=True, slots=True)
class Cut:
    """A document in volumes, none where the window is too small for any, and its table of contents, line by line."""

    document: Document
    volumes: tuple[Volume, ...]
    contents: tuple[str, ...]

    def source(self, volume: Volume, pages: Sequence[StoredPage]) -> Source:
        """A volume as it goes into the prompt.

        Args:
            pages: those of the volume at least.
        """
        (source,) = whole_sources([self.document], volume.pages(pages))
        return replace(source, card=card(volume, self.document.pages, self.contents))


class Cuts:
    """How the documents asked about last are cut: to find that out, all of a document is read."""

    def __init__(self, catalogue: Catalogue, engine: Engine) -> None:
        self._engine = engine
        self._cut = lru_cache(maxsize=64)(lambda id, _: cut_of(catalogue.get(id), catalogue.pages(id), engine))

    def of(self, document: str) -> Cut:
        """How a document is cut; blocks.

        Raises:
            UnknownDocument: there is none of this id.
        """
        return self._cut(document, self._engine.limits.window)

    def clear(self) -> None:
        """Nothing of any document is kept."""
        self._cut.cache_clear()


def cut_of(document: Document, pages: Sequence[StoredPage], engine: Engine) -> Cut:
    """Cut a document that the window does not hold. Blocks.

    Args:
        pages: all of it.
    """
    window = engine.limits.window
    around = len(engine.render_chat(build_messages([Source(document.name, ())], "")))
    # Passages, the question, and the table of contents.
    room = window - answer_room(window) - around - _CARD_TOKENS - 3 * aside_room(window)
    if room < window * _LEAST_ROOM_SHARE:
        return Cut(document, (), ())
    contents = table_of_contents(headings(pages), aside_room(window), engine.count_tokens)
    return Cut(document, cut(pages, room, engine.count_tokens), tuple(contents))


def scopes_of(documents: Sequence[Document], catalogue: Catalogue, engine: Engine) -> list[Scope]:
    """What can be read early of documents: all together if they fit, else the volumes of a single one; blocks."""
    if may_fit(documents, engine.limits.window):
        return [Scope.of(documents)]
    if len(documents) > 1:
        return []
    (document,) = documents
    volumes = cut_of(document, catalogue.pages(document.id), engine).volumes
    return [Scope((document.id,), volume.number) for volume in volumes]


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
        RetrievalError: the document has no such volume in this window.
    """
    documents = [catalogue.get(id) for id in scope.documents]
    pages = pages_of(documents, catalogue)
    if scope.volume is None:
        return common_prompt(whole_sources(documents, pages), engine)
    (document,) = documents
    known = cut_of(document, pages, engine)
    volumes = known.volumes
    if scope.volume > len(volumes):
        raise RetrievalError(f"document {document.id!r} has {len(volumes)} volumes now, not a volume {scope.volume}")
    return common_prompt([known.source(volumes[scope.volume - 1], pages)], engine)


def salt_of(scope: Scope, how: str, engine: Engine, key: bytes) -> str:
    """The cache namespace of a scope that is read in this way: keyed, so that nobody can guess it.

    It changes with everything that keys and values depend on: the model with its settings and precision, the layout of
    the prompt, and how it is read.
    """
    about = engine.capabilities
    # The window decides where volumes begin.
    volume = [] if scope.volume is None else [f"volume {scope.volume} in {engine.limits.window}"]
    parts = "\n".join([VERSION, about.model, about.fingerprint, how, *scope.documents, *volume])
    return hmac.new(key, parts.encode(), sha256).hexdigest()
