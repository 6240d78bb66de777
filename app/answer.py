"""The path of a question: redact -> choose documents or passages -> prompt -> engine -> cited events.

The use case itself, free of HTTP, so that what is measured is exactly what users get.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from app.citations import Citation, Evidence, cite
from app.prompt import Excerpt, Source, build_messages, question_start
from app.scope import (
    Scope,
    answer_room,
    aside_room,
    in_order,
    may_fit,
    pages_of,
    salt_of,
    volume_source,
    volumes_of,
    whole_sources,
)
from app.services import Services
from app.volumes import Volume, best_within, choose, top_hits
from retrieval.catalogue import READABLE, Document, StoredPage
from retrieval.search import Section, search
from serving.engine import Delta, Plan, Prefill, Request, Sampling
from serving.errors import EngineUnavailable, Overloaded, PromptTooLong

Mode = Literal["auto", "whole", "retrieve"]

# Sparse prefill changes answers a little, so a prompt is read that way only for at least a tenth of the wait.
_WORTH = 0.9
# Of a shorter prompt most is read densely whatever is chosen, so that an estimate that says otherwise is noise.
_LEAST_SPARSE_TOKENS = 2048
# A token at the end of a volume takes about as long as so many of short passages (docs/log.md). Estimates may err by
# far more: what slowed the engine down while it read deep in a volume, they take for the price of depth.
_DEEP = 3
_PROGRESS_EVERY_S = 1.0


class AskError(Exception):
    """The question cannot be answered as asked; the message says why.

    AskError
    ├── NoDocuments   the scope holds no document
    └── NotReady      a document of the scope cannot be read yet, or never
    """


class NoDocuments(AskError):
    """The scope holds no document."""


class NotReady(AskError):
    """A document of the scope cannot be read yet, or never."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question and its scope: `documents` by id, or every ready document of `collection`, as the user typed it.

    `max_tokens` is the longest answer; None means 512, in a small window at most a quarter of it.
    """

    question: str
    documents: tuple[str, ...] = ()
    collection: str = "default"
    mode: Mode = "auto"
    acceleration: Literal["auto", "off"] = "auto"
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DocumentUsed:
    id: str
    name: str
    pages: int


@dataclass(frozen=True, slots=True)
class PassageUsed:
    document: str
    name: str
    page: int
    score: float
    tokens: int


@dataclass(frozen=True, slots=True)
class VolumeUsed:
    """Volume `number` (from 1) of `of` of a document."""

    document: str
    number: int
    of: int
    first_page: int
    last_page: int


@dataclass(frozen=True, slots=True)
class Context:
    """What the model is given, sent before it starts to read; `volume` when `mode` says so, with passages after it."""

    mode: Literal["whole", "volume", "retrieve"]
    documents: tuple[DocumentUsed, ...]
    passages: tuple[PassageUsed, ...]
    prompt_tokens: int
    plan: Plan
    volume: VolumeUsed | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How far the prompt has been read; `phase` is `queued` until its own reading has begun."""

    phase: Literal["queued", "prefill"]
    tokens_done: int
    tokens_total: int
    elapsed_s: float
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Token:
    text: str


@dataclass(frozen=True, slots=True)
class Citations:
    citations: tuple[Citation, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(slots=True)
class Timings:
    """Seconds; `ttft` runs from the request's arrival to the first non-empty text, `engine_ttft` from its sending."""

    queue: float | None = None
    redact: float = 0.0
    retrieve: float = 0.0
    assemble: float = 0.0
    engine_ttft: float | None = None
    ttft: float | None = None
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer; `evicted` are documents that were warm before a question with `acceleration=off`."""

    answer: str
    finish_reason: str | None
    usage: Usage
    timings: Timings
    prefill: Prefill
    evicted: tuple[str, ...] = ()


Event = Context | Reading | Token | Citations | Done


@dataclass(frozen=True, slots=True)
class Prepared:
    """A question whose prompt is ready to be sent; `alone` is one that waits for its turn.

    `scope` is what another question like it would be about, if that can be read early.
    """

    question: str
    request: Request
    context: Context
    evidence: tuple[Evidence, ...]
    scope: Scope | None
    received: float
    alone: bool
    timings: Timings = field(default_factory=Timings)


async def prepare_answer(ask: Ask, services: Services, received: float) -> Prepared:
    """Everything up to the engine: whatever is wrong with the question comes out here.

    Args:
        received: `time.perf_counter()` when the request arrived.

    Raises:
        NoDocuments, NotReady, UnknownDocument, UnusableCollection: the scope cannot be read.
        PromptTooLong: `mode=whole` and the documents do not fit.
        EngineUnavailable, Overloaded: the engine takes no requests now.
    """
    _require_free_engine(services)
    timings = Timings()
    window = services.engine.limits.window
    max_tokens = ask.max_tokens or answer_room(window)
    documents = await asyncio.to_thread(documents_of, ask.documents, ask.collection, services)

    started = time.perf_counter()
    question = (await asyncio.to_thread(services.redact, ask.question)).text
    timings.redact = time.perf_counter() - started

    fits = may_fit(documents, window, max_tokens)
    if ask.mode == "whole" and not fits:
        await asyncio.to_thread(_require_fit, documents, max_tokens, services)
    whole = ask.mode == "whole" or (ask.mode == "auto" and fits)
    prompt: list[int] = []
    sections: list[Section] = []
    pages: list[StoredPage] = []
    if whole:
        started = time.perf_counter()
        pages = await asyncio.to_thread(pages_of, documents, services.catalogue)
        prompt = await asyncio.to_thread(_render, whole_sources(documents, pages), question, services)
        timings.assemble = time.perf_counter() - started
        if _too_long(prompt, max_tokens, services):
            if ask.mode == "whole":
                raise PromptTooLong(len(prompt), max_tokens, window)
            whole = False
    if not whole:
        started = time.perf_counter()
        sections = await asyncio.to_thread(_retrieve, question, documents, services)
        timings.retrieve = time.perf_counter() - started
        started = time.perf_counter()
        sections, prompt = await asyncio.to_thread(_fit_sections, sections, documents, question, max_tokens, services)
        timings.assemble += time.perf_counter() - started

    request = Request(
        prompt=prompt,
        id=f"ask-{uuid.uuid4().hex}",
        # A namespace that nobody else has holds nothing to be read from the cache.
        salt=uuid.uuid4().hex,
        sampling=Sampling(max_tokens=max_tokens),
        dense_from=await asyncio.to_thread(
            question_start, prompt, build_messages([], question), services.engine.render_chat
        ),
    )
    alone = ask.acceleration == "off"
    scope = Scope.of(documents)
    request, plan = (request, services.engine.plan(request)) if alone else _soonest(request, scope, services)
    opened = None
    if ask.mode == "auto" and not (whole or alone):
        started = time.perf_counter()
        opened = await asyncio.to_thread(_open_volume, sections, documents, question, services)
        timings.assemble += time.perf_counter() - started
    taken = None
    if opened is not None and not _too_long(opened.prompt, max_tokens, services):
        of_volume = replace(
            request,
            prompt=opened.prompt,
            salt=salt_of(opened.scope, "exact", services.engine, services.key),
            prefill="exact",
            dense_from=None,
        )
        if _is_sooner(volume_plan := services.engine.plan(of_volume), plan):
            taken, request, plan = opened, of_volume, volume_plan
            sections, pages = opened.passages, opened.pages
    names = {document.id: document.name for document in documents}
    context = Context(
        mode="whole" if whole else "retrieve" if taken is None else "volume",
        documents=tuple(DocumentUsed(d.id, d.name, d.pages) for d in documents),
        passages=tuple(
            PassageUsed(s.document, names[s.document], s.page, round(s.score, 4), s.tokens) for s in sections
        ),
        prompt_tokens=len(request.prompt),
        plan=plan,
        volume=None if taken is None else taken.used,
    )
    evidence = [
        *_whole_evidence(documents, pages),
        *await asyncio.to_thread(_section_evidence, names, sections, services),
    ]
    early = scope if whole else None if opened is None else opened.scope
    return Prepared(question, request, context, tuple(evidence), early, received, alone, timings)


async def answer(prepared: Prepared, services: Services) -> AsyncGenerator[Event, None]:
    """Answer a prepared question. Closing the iterator aborts the request in the engine.

    Raises:
        ServingError: the engine failed.
    """
    timings = prepared.timings
    text = ""
    tokens = 0
    finish_reason = None
    prefill = Prefill(len(prepared.request.prompt))
    yield prepared.context
    sending = _Sending(asked=time.perf_counter())
    warm = services.warmer.warm_scopes() if prepared.alone else None
    # Left to itself, an abandoned iterator would be closed, and its request aborted, at some later time.
    async with contextlib.aclosing(_with_progress(prepared, sending, services)) as items:
        async for item in items:
            if isinstance(item, Reading):
                yield item
                continue
            tokens, finish_reason = item.tokens, item.finish_reason or finish_reason
            if item.prefill is not None:
                prefill = item.prefill
                timings.queue = None if item.queue is None else item.queue + sending.sent - sending.asked
            if item.text:
                if timings.ttft is None:
                    now = time.perf_counter()
                    timings.engine_ttft, timings.ttft = now - sending.sent, now - prepared.received
                text += item.text
                yield Token(item.text)
    yield Citations(tuple(await asyncio.to_thread(cite, text, prepared.question, prepared.evidence)))
    timings.total = time.perf_counter() - prepared.received
    usage = Usage(prefill.prompt_tokens, tokens, prefill.prompt_tokens + tokens)
    services.metrics.answered(prefill, timings.ttft, timings.total)
    if prepared.scope is not None and not prepared.alone:
        services.warmer.asked(prepared.scope)
    # Every scope is looked at for this, so nobody else waits for it.
    lost = frozenset() if warm is None else warm - services.warmer.warm_scopes()
    evicted = {id for scope in lost for id in scope.documents}
    yield Done(text, finish_reason, usage, timings, prefill, tuple(sorted(evicted)))


@dataclass(slots=True)
class _Sending:
    """When a request was ready to be sent, and when its turn came; before that, `sent` is 0."""

    asked: float
    sent: float = 0.0


async def _with_progress(
    prepared: Prepared, sending: _Sending, services: Services
) -> AsyncGenerator[Delta | Reading, None]:
    """The engine's deltas, and before the first one a report at most every second."""
    stream = _in_turn(prepared, sending, services)
    first = asyncio.ensure_future(anext(stream, None))
    try:
        while not (await asyncio.wait({first}, timeout=_PROGRESS_EVERY_S))[0]:
            if (reading := await _reading(prepared, sending, services)) is not None:
                yield reading
        if (delta := first.result()) is not None:
            yield delta
            async for delta in stream:
                yield delta
    finally:
        # Cancelling the pending step closes the stream at the engine, which aborts the request.
        first.cancel()
        await asyncio.wait({first})
        await stream.aclose()


async def _in_turn(prepared: Prepared, sending: _Sending, services: Services) -> AsyncGenerator[Delta, None]:
    """The engine's deltas, from when it is the request's turn."""
    _require_free_engine(services)
    async with services.turn(alone=prepared.alone):
        sending.sent = time.perf_counter()
        deltas = services.engine.generate(prepared.request)
        async with contextlib.aclosing(deltas):  # type: ignore[type-var]
            async for delta in deltas:
                yield delta


async def _reading(prepared: Prepared, sending: _Sending, services: Services) -> Reading | None:
    elapsed = round(time.perf_counter() - sending.asked, 2)
    if not sending.sent:
        return Reading("queued", 0, len(prepared.request.prompt), elapsed, eta_s=None)
    progress = await services.engine.progress(prepared.request.id)
    if progress is None:
        return None
    plan = prepared.context.plan
    left = (progress.total - progress.done) / max(1, plan.tokens_to_compute)
    return Reading(
        phase="prefill" if progress.started else "queued",
        tokens_done=progress.done,
        tokens_total=progress.total,
        elapsed_s=elapsed,
        eta_s=None if plan.eta_s is None else round(plan.eta_s * left, 2),
    )


def _require_free_engine(services: Services) -> None:
    engine = services.engine
    if not engine.state.ready:
        raise EngineUnavailable(f"the engine is {engine.state.phase}: {engine.state.reason}")
    if services.pending >= engine.limits.max_pending:
        raise Overloaded(f"{services.pending} questions wait already; try again in a moment")


def documents_of(ids: Sequence[str], collection: str, services: Services) -> list[Document]:
    """The documents that a question is about: those of these ids, or without any those of the collection; blocks.

    Raises:
        NoDocuments, NotReady, UnknownDocument, UnusableCollection: they cannot be read.
    """
    if ids:
        documents = [services.catalogue.get(id) for id in dict.fromkeys(ids)]
        for document in documents:
            if document.status not in READABLE:
                state = document.status if document.status in ("failed", "cancelled") else "still being read"
                why = f": {document.reason}" if document.reason else ""
                raise NotReady(f"document {document.id!r} is {state}{why}")
    else:
        stored = services.collection(collection)
        documents = services.catalogue.documents(stored, READABLE)
        if not documents:
            raise NoDocuments(f"collection {stored!r} has no document that can be read; upload one first")
    return in_order(documents)


def _require_fit(documents: Sequence[Document], max_tokens: int, services: Services) -> None:
    """Count pages until they cannot fit, however much comes after them: stored counts may be another model's.

    Raises:
        PromptTooLong: the pages alone leave no room.
    """
    window = services.engine.limits.window
    tokens = 0
    for document in documents:
        for page in services.catalogue.pages(document.id):
            tokens += services.engine.count_tokens(page.text.strip())
            if tokens + max_tokens > window:
                raise PromptTooLong(tokens, max_tokens, window, at_least=True)


def _render(sources: Sequence[Source], question: str, services: Services) -> list[int]:
    return services.engine.render_chat(build_messages(sources, question))


def _too_long(prompt: Sequence[int], max_tokens: int, services: Services) -> bool:
    return len(prompt) + max_tokens > services.engine.limits.window


def _retrieve(question: str, documents: Sequence[Document], services: Services) -> list[Section]:
    return search(
        question,
        [document.id for document in documents],
        embedder=services.embedder,
        vectors=services.vectors,
        catalogue=services.catalogue,
        count_tokens=services.engine.count_tokens,
        token_budget=int(services.engine.limits.window * services.settings.retrieve_share),
        limit=services.settings.retrieve_limit,
    )


def _fit_sections(
    sections: list[Section], documents: Sequence[Document], question: str, max_tokens: int, services: Services
) -> tuple[list[Section], list[int]]:
    """Drop the weakest sections until the prompt fits; with none left, the question itself is too long."""
    while True:
        prompt = _render(_section_sources(documents, sections), question, services)
        if not _too_long(prompt, max_tokens, services):
            return sections, prompt
        if not sections:
            raise PromptTooLong(len(prompt), max_tokens, services.engine.limits.window)
        weakest = min(sections, key=lambda section: section.score)
        sections = [section for section in sections if section is not weakest]


def _section_sources(documents: Sequence[Document], sections: Sequence[Section]) -> list[Source]:
    sources = []
    for document in documents:
        excerpts = tuple(Excerpt(s.page, s.text) for s in sections if s.document == document.id)
        if excerpts:
            sources.append(Source(document.name, excerpts))
    return sources


@dataclass(frozen=True, slots=True)
class _Opened:
    """The volume that a question is about, and the prompt that reads it with passages before the question."""

    document: Document
    volume: Volume
    pages: list[StoredPage]
    passages: list[Section]
    prompt: list[int]

    @property
    def scope(self) -> Scope:
        return Scope((self.document.id,), self.volume.number)

    @property
    def used(self) -> VolumeUsed:
        volume = self.volume
        return VolumeUsed(self.document.id, volume.number, volume.of, volume.first_page, volume.last_page)


def _open_volume(
    sections: Sequence[Section], documents: Sequence[Document], question: str, services: Services
) -> _Opened | None:
    """The volume in which the best sections lie, if the best one is of a long document and they are not spread wide."""
    engine = services.engine
    hits = top_hits(sections)
    document = next((document for document in documents if hits and document.id == hits[0].document), None)
    if document is None or may_fit([document], engine.limits.window):
        return None
    pages = services.catalogue.pages(document.id)
    volume = choose(hits, document.id, volumes_of(document, pages, engine))
    if volume is None:
        return None
    # Those of the volume itself are given once more: right before the question they are found more surely.
    passages = best_within([section for section in sections if section in hits], aside_room(engine.limits.window))
    sources = [volume_source(document, volume, pages, engine), *_section_sources(documents, passages)]
    return _Opened(document, volume, volume.pages(pages), passages, _render(sources, question, services))


def _is_sooner(volume: Plan, sections: Plan) -> bool:
    """Whether a volume is read no later than sections: by the estimates, or because so little of it is left."""
    if volume.tokens_to_compute * _DEEP <= sections.tokens_to_compute:
        return True
    if volume.eta_s is None or sections.eta_s is None:
        return volume.tokens_to_compute <= sections.tokens_to_compute
    return volume.eta_s <= sections.eta_s


def _whole_evidence(documents: Sequence[Document], pages: Sequence[StoredPage]) -> list[Evidence]:
    names = {document.id: document.name for document in documents}
    return [Evidence(p.document, names[p.document], p.number, p.label, p.text) for p in pages]


def _section_evidence(names: dict[str, str], sections: Sequence[Section], services: Services) -> list[Evidence]:
    labels = {(s.document, s.page): services.catalogue.page(s.document, s.page).label for s in sections}
    return [Evidence(s.document, names[s.document], s.page, labels[s.document, s.page], s.text) for s in sections]


def _soonest(request: Request, scope: Scope, services: Services) -> tuple[Request, Plan]:
    """The request as it is read sooner by the engine's own estimate; exact when that cannot tell or little is won."""
    engine = services.engine
    exact = replace(request, salt=salt_of(scope, "exact", engine, services.key))
    exact_plan = engine.plan(exact)
    if not engine.capabilities.sparse or exact_plan.tokens_to_compute < _LEAST_SPARSE_TOKENS:
        return exact, exact_plan
    how = f"sparse {engine.capabilities.selector}"
    sparse = replace(request, prefill="sparse", salt=salt_of(scope, how, engine, services.key))
    sparse_plan = engine.plan(sparse)
    if exact_plan.eta_s is None or sparse_plan.eta_s is None or sparse_plan.eta_s > _WORTH * exact_plan.eta_s:
        return exact, exact_plan
    return sparse, sparse_plan
