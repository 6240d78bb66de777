"""What the model is given for a question: documents whole, a volume of a long one, or the best sections. Blocking."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from app.citations import Evidence
from app.conversation import ConversationFixed, earlier_messages, section_sources
from app.prompt import Source, build_messages, question_tokens
from app.scope import Cut, Scope, aside_room, may_fit, pages_of, whole_sources
from app.services import Services
from app.volumes import Volume, best_within, choose, top_hits
from retrieval.catalogue import Document, StoredPage
from retrieval.conversations import Conversation, ReadAs, ToolResult, Turn
from retrieval.passage import Section
from retrieval.search import search
from serving.errors import PromptTooLong


@dataclass(frozen=True, slots=True)
class Draft:
    """A question, redacted, with the documents that it is about, and what was said before it.

    `max_tokens` is the longest answer.
    """

    documents: Sequence[Document]
    question: str
    max_tokens: int
    results: tuple[ToolResult, ...] = ()
    past: Conversation | None = None

    @property
    def turns(self) -> tuple[Turn, ...]:
        return () if self.past is None else self.past.turns

    @property
    def known(self) -> list[Section]:
        """The sections of earlier turns."""
        return [section for turn in self.turns for section in turn.sections]

    def render(self, first: Sequence[Source], new: Sequence[Section], services: Services) -> list[int]:
        """The prompt.

        Args:
            first: what stands before the first question.
            new: sections that stand before this one.
        """
        earlier = earlier_messages(self.turns, self.documents, first)
        sources = [*(() if self.turns else first), *section_sources(self.documents, new)]
        number = earlier.sources + 1
        return services.engine.render_chat(
            build_messages(sources, self.question, results=self.results, earlier=earlier.messages, number=number)
        )

    def question_tokens(self, services: Services) -> int:
        """`app.prompt.question_tokens` of whatever prompt is rendered."""
        return question_tokens(build_messages([], self.question), services.engine.render_chat)

    def excess(self, prompt: Sequence[int], services: Services) -> PromptTooLong | None:
        """That the prompt and its answer do not fit the window together, if so."""
        window = services.engine.limits.window
        return PromptTooLong(len(prompt), self.max_tokens, window) if len(prompt) + self.max_tokens > window else None


@dataclass(frozen=True, slots=True)
class Opened:
    """A volume of a document: its pages, and how it goes into the prompt."""

    document: str
    volume: Volume
    pages: list[StoredPage]
    source: Source

    @property
    def sections(self) -> list[Section]:
        """What need not be found again, for the volume holds it."""
        return [Section(self.document, part.page, part.start, part.end, "", 0.0, 0) for part in self.volume.parts]


@dataclass(frozen=True, slots=True)
class Material:
    """A prompt and what it is made of.

    The prompt belongs to the cache namespace of `scope`, and ends with `question_tokens`. `pages` are read whole,
    `sections` are those of this turn, and `retrieve` is how many seconds searching for them took.
    """

    mode: ReadAs
    prompt: list[int]
    question_tokens: int
    scope: Scope
    pages: list[StoredPage]
    sections: list[Section]
    volume: Opened | None = None
    retrieve: float = 0.0

    @property
    def dense_from(self) -> int:
        """The first token of the prompt's question part, or one a little before it."""
        return max(0, len(self.prompt) - self.question_tokens)


def gather(mode: str, draft: Draft, services: Services) -> Material:
    """The material of a question; in a conversation that of its first question, and new sections.

    Args:
        mode: `auto`, `whole` or `retrieve`.

    Raises:
        PromptTooLong: it does not fit the window.
        ConversationFixed: the conversation cannot go on as it began.
    """
    if draft.past is not None:
        return _whole(draft, services) if draft.past.mode == "whole" else _sections(draft, services)
    fits = may_fit(draft.documents, services.engine.limits.window, draft.max_tokens)
    if mode == "whole":
        if not fits:
            _require_fit(draft, services)
        return _whole(draft, services)
    if mode == "auto" and fits:
        try:
            return _whole(draft, services)
        except PromptTooLong:
            # The pages alone would fit.
            pass
    return _sections(draft, services)


def in_volume(draft: Draft, found: Material, services: Services) -> Material | None:
    """The same question to the volume in which the best of the found sections lie.

    None if the best one is not of a long document, if they are spread over too many places, or if there is no room.
    """
    hits = top_hits(found.sections)
    document = next((document for document in draft.documents if hits and document.id == hits[0].document), None)
    window = services.engine.limits.window
    if document is None or may_fit([document], window):
        return None
    cut = services.cuts.of(document.id)
    volume = choose(hits, document.id, cut.volumes)
    if volume is None:
        return None
    opened = _open(cut, volume, services)
    # Sections of the volume itself are given once more: right before the question they are found more surely.
    aside = best_within([section for section in found.sections if section in hits], aside_room(window))
    prompt = draft.render([opened.source], aside, services)
    if draft.excess(prompt, services):
        return None
    tokens = found.question_tokens
    return Material("volume", prompt, tokens, _scope(opened), opened.pages, aside, opened, found.retrieve)


def evidence_of(material: Material, draft: Draft, services: Services) -> list[Evidence]:
    """What an answer may cite: the pages, and the sections of all turns."""
    names = {document.id: document.name for document in draft.documents}
    sections = [*draft.known, *material.sections]
    labels = {(s.document, s.page): services.catalogue.page(s.document, s.page).label for s in sections}
    return [
        *(Evidence(p.document, names[p.document], p.number, p.label, p.text) for p in material.pages),
        *(Evidence(s.document, names[s.document], s.page, labels[s.document, s.page], s.text) for s in sections),
    ]


def _whole(draft: Draft, services: Services) -> Material:
    pages = pages_of(draft.documents, services.catalogue)
    prompt = draft.render(whole_sources(draft.documents, pages), (), services)
    if error := draft.excess(prompt, services):
        raise error
    return Material("whole", prompt, draft.question_tokens(services), Scope.of(draft.documents), pages, [])


def _sections(draft: Draft, services: Services) -> Material:
    """Sections, after the volume that a conversation began with if it did."""
    opened = _reopened(draft, services)
    first = [] if opened is None else [opened.source]
    started = time.perf_counter()
    room = services.engine.limits.window
    if draft.turns:
        room = max(0, room - len(draft.render(first, (), services)) - draft.max_tokens)
    sections = search(
        draft.question,
        [document.id for document in draft.documents],
        embedder=services.embedder,
        vectors=services.vectors,
        catalogue=services.catalogue,
        count_tokens=services.engine.count_tokens,
        token_budget=int(room * services.settings.retrieve_share),
        limit=services.settings.retrieve_limit,
        known=[*draft.known, *([] if opened is None else opened.sections)],
        before=[turn.question for turn in draft.turns],
    )
    retrieve = time.perf_counter() - started
    # The weakest ones go until the prompt fits; with none left, the question itself is too long.
    while error := draft.excess(prompt := draft.render(first, sections, services), services):
        if not sections:
            raise error
        weakest = min(sections, key=lambda section: section.score)
        sections = [section for section in sections if section is not weakest]
    tokens = draft.question_tokens(services)
    if opened is None:
        return Material("retrieve", prompt, tokens, Scope.of(draft.documents), [], sections, retrieve=retrieve)
    return Material("volume", prompt, tokens, _scope(opened), opened.pages, sections, opened, retrieve)


def _reopened(draft: Draft, services: Services) -> Opened | None:
    """The volume that a conversation began with, if it did."""
    if draft.past is None or draft.past.volume is None:
        return None
    id, number = draft.past.volume
    cut = services.cuts.of(id)
    if number > len(cut.volumes):
        raise ConversationFixed(
            f"conversation {draft.past.id!r} began with volume {number} of document {id!r}, which has "
            f"{len(cut.volumes)} in the model's window of today; start a new conversation"
        )
    return _open(cut, cut.volumes[number - 1], services)


def _open(cut: Cut, volume: Volume, services: Services) -> Opened:
    pages = services.catalogue.pages(cut.document.id, volume.first_page, volume.last_page)
    return Opened(cut.document.id, volume, volume.pages(pages), cut.source(volume, pages))


def _scope(opened: Opened) -> Scope:
    return Scope((opened.document,), opened.volume.number)


def _require_fit(draft: Draft, services: Services) -> None:
    """Count pages until they cannot fit, however much comes after them: stored counts may be another model's.

    Raises:
        PromptTooLong: the pages alone leave no room.
    """
    window = services.engine.limits.window
    tokens = 0
    for document in draft.documents:
        for page in services.catalogue.pages(document.id):
            tokens += services.engine.count_tokens(page.text.strip())
            if tokens + draft.max_tokens > window:
                raise PromptTooLong(tokens, draft.max_tokens, window, at_least=True)
