"""The path of a question: redact -> choose documents or passages -> prompt -> engine -> cited events.

The use case itself, free of HTTP, so that what is measured is exactly what users get.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from app.citations import Citation, Evidence, cite
from app.conversation import (
    NEW,
    Claim,
    ConversationFixed,
    ConversationFull,
    Earlier,
    earlier_messages,
    section_sources,
)
from app.prompt import Source, build_messages, question_start
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
from retrieval.conversations import Conversation, ReadAs, ToolResult, Turn
from retrieval.passage import Section
from retrieval.search import search
from serving.engine import Delta, Message, Plan, Prefill, Request, Sampling
from serving.errors import EngineUnavailable, Overloaded, PromptTooLong

Mode = Literal["auto", "whole", "retrieve"]
# Sources in, messages out: the rest of a question is settled.
Draft = Callable[[Sequence[Source]], list[Message]]

# Sparse prefill changes answers a little, so a prompt is read that way only for at least a tenth of the wait.
_WORTH = 0.9
# Of a shorter prompt most is read densely whatever is chosen, so that an estimate that says otherwise is noise.
_LEAST_SPARSE_TOKENS = 2048
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

    `max_tokens` is the longest answer; None means 512, in a small window at most a quarter of it. `conversation` is
    `NEW`, or the id of one to go on with, which has its own scope. `results` are data for this question.
    """

    question: str
    documents: tuple[str, ...] = ()
    collection: str = "default"
    mode: Mode = "auto"
    acceleration: Literal["auto", "off"] = "auto"
    max_tokens: int | None = None
    conversation: str | None = None
    results: tuple[ToolResult, ...] = ()


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
    """What the model is given, sent before it starts to read.

    `volume` is there when `mode` says so, and the passages come after it. In a conversation they are
    those of this turn.
    """

    mode: ReadAs
    documents: tuple[DocumentUsed, ...]
    passages: tuple[PassageUsed, ...]
    prompt_tokens: int
    plan: Plan
    volume: VolumeUsed | None = None
    conversation: str | None = None
    turn: int | None = None


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

    `scope` is what another question like it would be about, if that can be read early. Within a conversation,
    `conversation` and `turn` are what is stored once there is an answer. Whoever has it calls `release` when the answer
    has ended or is not wanted any more.
    """

    question: str
    request: Request
    context: Context
    evidence: tuple[Evidence, ...]
    scope: Scope | None
    received: float
    alone: bool
    timings: Timings = field(default_factory=Timings)
    claim: Claim | None = None
    conversation: Conversation | None = None
    turn: Turn | None = None

    def release(self) -> None:
        """Let the next question into the conversation, if there is one."""
        if self.claim is not None:
            self.claim.release()


async def prepare_answer(ask: Ask, services: Services, received: float) -> Prepared:
    """Everything up to the engine: whatever is wrong with the question comes out here.

    Args:
        received: `time.perf_counter()` when the request arrived.

    Raises:
        NoDocuments, NotReady, UnknownDocument, UnusableCollection: the scope cannot be read.
        UnknownConversation, ConversationFixed: it cannot go on, or not in this way.
        ConversationBusy: it is answering another question.
        ConversationFull: it does not fit the window together with this question.
        PromptTooLong: `mode=whole` and the documents do not fit.
        EngineUnavailable, Overloaded: the engine takes no requests now.
    """
    _require_free_engine(services)
    if ask.conversation is None:
        return await _prepare(ask, None, services, received)
    claim = services.claims.take(ask.conversation)
    try:
        return await _prepare(ask, claim, services, received)
    except PromptTooLong as error:
        claim.release()
        if ask.conversation == NEW:
            raise
        raise ConversationFull(claim.id, error) from error
    except BaseException:
        claim.release()
        raise


async def _prepare(ask: Ask, claim: Claim | None, services: Services, received: float) -> Prepared:
    timings = Timings()
    window = services.engine.limits.window
    max_tokens = ask.max_tokens or answer_room(window)
    past = await asyncio.to_thread(_past, ask, services)
    ids = ask.documents if past is None else past.documents
    documents = await asyncio.to_thread(documents_of, ids, ask.collection, services)

    started = time.perf_counter()
    question, results = await asyncio.to_thread(_redact, ask, services)
    timings.redact = time.perf_counter() - started

    if past is None:
        fits = may_fit(documents, window, max_tokens)
        if ask.mode == "whole" and not fits:
            await asyncio.to_thread(_require_fit, documents, max_tokens, services)
        whole = ask.mode == "whole" or (ask.mode == "auto" and fits)
    else:
        whole = past.mode == "whole"
    turns = () if past is None else past.turns
    known = [section for turn in turns for section in turn.sections]
    opened = None if past is None else await asyncio.to_thread(_reopen, past, documents, services)
    prompt: list[int] = []
    sections: list[Section] = []
    pages: list[StoredPage] = [] if opened is None else opened.pages
    if whole:
        started = time.perf_counter()
        pages = await asyncio.to_thread(pages_of, documents, services.catalogue)
        sources = whole_sources(documents, pages)
        draft = _draft(earlier_messages(turns, documents, sources), question, results)
        prompt = await asyncio.to_thread(_render, draft, [] if turns else sources, services)
        timings.assemble = time.perf_counter() - started
        if _too_long(prompt, max_tokens, services):
            if ask.mode == "whole" or past is not None:
                raise PromptTooLong(len(prompt), max_tokens, window)
            whole = False
    if not whole:
        first = () if opened is None else (opened.source,)
        draft = _draft(earlier_messages(turns, documents, first), question, results)
        started = time.perf_counter()
        room = window if past is None else await asyncio.to_thread(_room, draft, max_tokens, services)
        given = known if opened is None else [*known, *opened.sections]
        sections = await asyncio.to_thread(_retrieve, question, documents, given, room, services)
        timings.retrieve = time.perf_counter() - started
        started = time.perf_counter()
        sections, prompt = await asyncio.to_thread(_fit_sections, sections, documents, draft, max_tokens, services)
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
    scope = Scope.of(documents) if opened is None else opened.scope
    exact = past is not None and past.exact
    if alone:
        plan = services.engine.plan(request)
    else:
        request, plan = _soonest(request, scope, services, settled=exact)
    mode: ReadAs = "whole" if whole else "retrieve" if opened is None else "volume"
    if past is None and ask.mode == "auto" and not (whole or alone):
        started = time.perf_counter()
        opened = await asyncio.to_thread(_open_volume, sections, documents, services)
        if opened is not None:
            aside = _aside(sections, window)
            sources = [opened.source, *section_sources(documents, aside)]
            prompt = await asyncio.to_thread(_render, draft, sources, services)
            exactly = salt_of(opened.scope, "exact", services.engine, services.key)
            of_volume = replace(request, prompt=prompt, salt=exactly, prefill="exact", dense_from=None)
            volume_plan = services.engine.plan(of_volume)
            if not _too_long(prompt, max_tokens, services) and _is_sooner(volume_plan, plan):
                request, plan, mode = of_volume, volume_plan, "volume"
                sections, pages = aside, opened.pages
        timings.assemble += time.perf_counter() - started
    exact = exact if alone else request.prefill == "exact"
    names = {document.id: document.name for document in documents}
    number = None if claim is None else len(turns) + 1
    context = Context(
        mode=mode,
        documents=tuple(DocumentUsed(d.id, d.name, d.pages) for d in documents),
        passages=tuple(
            PassageUsed(s.document, names[s.document], s.page, round(s.score, 4), s.tokens) for s in sections
        ),
        prompt_tokens=len(request.prompt),
        plan=plan,
        volume=opened.used if opened is not None and mode == "volume" else None,
        conversation=None if claim is None else claim.id,
        turn=number,
    )
    evidence = [
        *_whole_evidence(documents, pages),
        *await asyncio.to_thread(_section_evidence, names, [*known, *sections], services),
    ]
    early = scope if whole else None if opened is None else opened.scope
    prepared = Prepared(question, request, context, tuple(evidence), early, received, alone, timings)
    if claim is None or number is None:
        return prepared
    now = datetime.now(UTC)
    ids = tuple(document.id for document in documents)
    volume = None if context.volume is None else (context.volume.document, context.volume.number)
    conversation = past or Conversation(claim.id, ids, mode, now, volume=volume)
    return replace(
        prepared,
        claim=claim,
        conversation=replace(conversation, exact=exact),
        turn=Turn(number, question, "", now, tuple(sections), results),
    )


def _past(ask: Ask, services: Services) -> Conversation | None:
    """The conversation to go on with, if there is one; blocks."""
    if ask.conversation is None or ask.conversation == NEW:
        return None
    past = services.conversations.get(ask.conversation)
    if ask.mode not in ("auto", past.mode):
        raise ConversationFixed(
            f"conversation {past.id!r} goes on as it began, in mode {past.mode!r}; leave out 'mode', or start a new "
            "conversation"
        )
    return past


def _redact(ask: Ask, services: Services) -> tuple[str, tuple[ToolResult, ...]]:
    results = (ToolResult(*(services.redact(text).text for text in (r.name, r.text))) for r in ask.results)
    return services.redact(ask.question).text, tuple(results)


async def answer(prepared: Prepared, services: Services) -> AsyncGenerator[Event, None]:
    """Answer a prepared question. Closing the iterator aborts the request in the engine.

    A turn of a conversation is stored once the model has ended its answer, whoever leaves after that, and before that
    not at all.

    Raises:
        ServingError: the engine failed.
        UnknownConversation: the conversation, or a document that it is about, was deleted meanwhile.
    """
    timings = prepared.timings
    text = ""
    tokens = 0
    finish_reason = None
    prefill = Prefill(len(prepared.request.prompt))
    ending: asyncio.Task[tuple[Citation, ...]] | None = None
    try:
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
                text += item.text
                if finish_reason is not None and ending is None:
                    ending = asyncio.create_task(_end(text, prepared, services))
                if item.text:
                    if timings.ttft is None:
                        now = time.perf_counter()
                        timings.engine_ttft, timings.ttft = now - sending.sent, now - prepared.received
                    yield Token(item.text)
        ending = ending or asyncio.create_task(_end(text, prepared, services))
        yield Citations(await asyncio.shield(ending))
    finally:
        if ending is None:
            prepared.release()
        else:
            await asyncio.wait({ending})
    timings.total = time.perf_counter() - prepared.received
    usage = Usage(prefill.prompt_tokens, tokens, prefill.prompt_tokens + tokens)
    services.metrics.answered(prefill, timings.ttft, timings.total)
    if prepared.scope is not None and not prepared.alone:
        services.warmer.asked(prepared.scope)
    # Every scope is looked at for this, so nobody else waits for it.
    lost = frozenset() if warm is None else warm - services.warmer.warm_scopes()
    evicted = {id for scope in lost for id in scope.documents}
    yield Done(text, finish_reason, usage, timings, prefill, tuple(sorted(evicted)))


async def _end(text: str, prepared: Prepared, services: Services) -> tuple[Citation, ...]:
    """Cite, and store a turn of a conversation; after that the next question may come."""
    try:
        citations = tuple(await asyncio.to_thread(cite, text, prepared.question, prepared.evidence))
        if prepared.conversation is not None and prepared.turn is not None:
            turn = replace(prepared.turn, answer=text, citations=[asdict(citation) for citation in citations])
            await asyncio.to_thread(services.conversations.add, prepared.conversation, turn)
        return citations
    finally:
        prepared.release()


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


def _draft(earlier: Earlier, question: str, results: tuple[ToolResult, ...]) -> Draft:
    return partial(
        build_messages, question=question, results=results, earlier=earlier.messages, number=earlier.sources + 1
    )


def _render(draft: Draft, sources: Sequence[Source], services: Services) -> list[int]:
    return services.engine.render_chat(draft(sources))


def _room(draft: Draft, max_tokens: int, services: Services) -> int:
    """What is left of the window after a conversation with its new question, and the answer to come."""
    return max(0, services.engine.limits.window - len(_render(draft, (), services)) - max_tokens)


def _too_long(prompt: Sequence[int], max_tokens: int, services: Services) -> bool:
    return len(prompt) + max_tokens > services.engine.limits.window


def _retrieve(
    question: str, documents: Sequence[Document], known: Sequence[Section], room: int, services: Services
) -> list[Section]:
    return search(
        question,
        [document.id for document in documents],
        embedder=services.embedder,
        vectors=services.vectors,
        catalogue=services.catalogue,
        count_tokens=services.engine.count_tokens,
        token_budget=int(room * services.settings.retrieve_share),
        limit=services.settings.retrieve_limit,
        known=known,
    )


def _fit_sections(
    sections: list[Section], documents: Sequence[Document], draft: Draft, max_tokens: int, services: Services
) -> tuple[list[Section], list[int]]:
    """Drop the weakest sections until the prompt fits; with none left, the question itself is too long."""
    while True:
        prompt = _render(draft, section_sources(documents, sections), services)
        if not _too_long(prompt, max_tokens, services):
            return sections, prompt
        if not sections:
            raise PromptTooLong(len(prompt), max_tokens, services.engine.limits.window)
        weakest = min(sections, key=lambda section: section.score)
        sections = [section for section in sections if section is not weakest]


@dataclass(frozen=True, slots=True)
class _Opened:
    """The volume that a question is about: its pages, and how it goes into the prompt."""

    document: str
    volume: Volume
    pages: list[StoredPage]
    source: Source

    @property
    def scope(self) -> Scope:
        return Scope((self.document,), self.volume.number)

    @property
    def used(self) -> VolumeUsed:
        volume = self.volume
        return VolumeUsed(self.document, volume.number, volume.of, volume.first_page, volume.last_page)

    @property
    def sections(self) -> list[Section]:
        """What need not be found again, for the volume holds it."""
        return [Section(self.document, part.page, part.start, part.end, "", 0.0, 0) for part in self.volume.parts]


def _open_volume(sections: Sequence[Section], documents: Sequence[Document], services: Services) -> _Opened | None:
    """The volume in which the best sections lie, if the best one is of a long document and they are not spread wide."""
    hits = top_hits(sections)
    document = next((document for document in documents if hits and document.id == hits[0].document), None)
    if document is None or may_fit([document], services.engine.limits.window):
        return None
    pages = services.catalogue.pages(document.id)
    volume = choose(hits, document.id, volumes_of(document, pages, services.engine))
    return None if volume is None else _opened(document, volume, pages, services)


def _reopen(past: Conversation, documents: Sequence[Document], services: Services) -> _Opened | None:
    """The volume that a conversation began with, if it did."""
    if past.volume is None:
        return None
    id, number = past.volume
    document = next(document for document in documents if document.id == id)
    pages = services.catalogue.pages(id)
    volumes = volumes_of(document, pages, services.engine)
    if number > len(volumes):
        raise ConversationFixed(
            f"conversation {past.id!r} began with volume {number} of document {id!r}, which has {len(volumes)} in the "
            "model's window of today; start a new conversation"
        )
    return _opened(document, volumes[number - 1], pages, services)


def _opened(document: Document, volume: Volume, pages: list[StoredPage], services: Services) -> _Opened:
    source = volume_source(document, volume, pages, services.engine)
    return _Opened(document.id, volume, volume.pages(pages), source)


def _aside(sections: Sequence[Section], window: int) -> list[Section]:
    """The sections that stand between a volume and the question.

    Those of the volume itself are given once more: right before the question they are found more surely.
    """
    hits = top_hits(sections)
    return best_within([section for section in sections if section in hits], aside_room(window))


def _is_sooner(volume: Plan, sections: Plan) -> bool:
    """Whether a volume is read no later than sections: by the engine's estimates, else by what is left to compute."""
    if volume.eta_s is None or sections.eta_s is None:
        return volume.tokens_to_compute <= sections.tokens_to_compute
    return volume.eta_s <= sections.eta_s


def _whole_evidence(documents: Sequence[Document], pages: Sequence[StoredPage]) -> list[Evidence]:
    names = {document.id: document.name for document in documents}
    return [Evidence(p.document, names[p.document], p.number, p.label, p.text) for p in pages]


def _section_evidence(names: dict[str, str], sections: Sequence[Section], services: Services) -> list[Evidence]:
    labels = {(s.document, s.page): services.catalogue.page(s.document, s.page).label for s in sections}
    return [Evidence(s.document, names[s.document], s.page, labels[s.document, s.page], s.text) for s in sections]


def _soonest(request: Request, scope: Scope, services: Services, *, settled: bool) -> tuple[Request, Plan]:
    """The request as it is read sooner by the engine's own estimate; exact when that cannot tell or little is won.

    A conversation that was `settled` on exact goes back only when nothing of it is in memory any more.
    """
    engine = services.engine
    exact = replace(request, salt=salt_of(scope, "exact", engine, services.key))
    exact_plan = engine.plan(exact)
    settled = settled and exact_plan.tokens_to_compute < len(request.prompt)
    if settled or not engine.capabilities.sparse or exact_plan.tokens_to_compute < _LEAST_SPARSE_TOKENS:
        return exact, exact_plan
    how = f"sparse {engine.capabilities.selector}"
    sparse = replace(request, prefill="sparse", salt=salt_of(scope, how, engine, services.key))
    sparse_plan = engine.plan(sparse)
    if exact_plan.eta_s is None or sparse_plan.eta_s is None or sparse_plan.eta_s > _WORTH * exact_plan.eta_s:
        return exact, exact_plan
    return sparse, sparse_plan
