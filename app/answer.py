"""The path of a question: redact -> choose documents or passages -> prompt -> engine -> cited events.

The use case itself, free of HTTP, so that what is measured is exactly what users get.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from app.citations import Citation, Evidence, cite
from app.conversation import NEW, Claim, ConversationFixed, ConversationFull
from app.material import Draft, Material, evidence_of, gather, in_volume
from app.scope import Scope, answer_room, in_order, salt_of
from app.services import Services
from retrieval.catalogue import READABLE, Document
from retrieval.conversations import Conversation, ReadAs, ToolResult, Turn
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
    past = await asyncio.to_thread(_past, ask, services)
    ids = ask.documents if past is None else past.documents
    documents = await asyncio.to_thread(documents_of, ids, ask.collection, services)

    started = time.perf_counter()
    question, results = await asyncio.to_thread(_redact, ask, services)
    timings.redact = time.perf_counter() - started

    started = time.perf_counter()
    max_tokens = ask.max_tokens or answer_room(services.engine.limits.window)
    draft = Draft(documents, question, max_tokens, results, past)
    material = await asyncio.to_thread(gather, ask.mode, draft, services)
    alone = ask.acceleration == "off"
    exact = past is not None and past.exact
    request, plan = _request(material, draft, services, alone=alone, settled=exact)
    early = None if material.mode == "retrieve" else material.scope
    if ask.mode == "auto" and material.mode == "retrieve" and past is None and not alone:
        volume = await asyncio.to_thread(in_volume, draft, material, services)
        if volume is not None:
            # Read early, it is there for the next question even if this one has its answer sooner without it.
            early = volume.scope
            of_volume, volume_plan = _request(volume, draft, services, alone=False, settled=True)
            if _is_sooner(volume_plan, plan):
                material, request, plan = volume, of_volume, volume_plan
    timings.retrieve = material.retrieve
    timings.assemble = time.perf_counter() - started - material.retrieve

    number = None if claim is None else len(draft.turns) + 1
    context = _context(material, draft, plan, conversation=None if claim is None else claim.id, turn=number)
    evidence = await asyncio.to_thread(evidence_of, material, draft, services)
    prepared = Prepared(question, request, context, tuple(evidence), early, received, alone, timings)
    if claim is None or number is None:
        return prepared
    now = datetime.now(UTC)
    volume_used = None if context.volume is None else (context.volume.document, context.volume.number)
    ids = tuple(document.id for document in documents)
    conversation = past or Conversation(claim.id, ids, material.mode, now, volume=volume_used)
    return replace(
        prepared,
        claim=claim,
        conversation=replace(conversation, exact=exact if alone else request.prefill == "exact"),
        turn=Turn(number, question, "", now, tuple(material.sections), results),
    )


def _context(material: Material, draft: Draft, plan: Plan, *, conversation: str | None, turn: int | None) -> Context:
    names = {document.id: document.name for document in draft.documents}
    volume = None
    if material.volume is not None:
        cut = material.volume.volume
        volume = VolumeUsed(material.volume.document, cut.number, cut.of, cut.first_page, cut.last_page)
    return Context(
        mode=material.mode,
        documents=tuple(DocumentUsed(d.id, d.name, d.pages) for d in draft.documents),
        passages=tuple(
            PassageUsed(s.document, names[s.document], s.page, round(s.score, 4), s.tokens) for s in material.sections
        ),
        prompt_tokens=len(material.prompt),
        plan=plan,
        volume=volume,
        conversation=conversation,
        turn=turn,
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


def _is_sooner(volume: Plan, sections: Plan) -> bool:
    """Whether a volume is read no later than sections: by the estimates, or because so little of it is left."""
    if volume.tokens_to_compute * _DEEP <= sections.tokens_to_compute:
        return True
    if volume.eta_s is None or sections.eta_s is None:
        return volume.tokens_to_compute <= sections.tokens_to_compute
    return volume.eta_s <= sections.eta_s


def _request(
    material: Material, draft: Draft, services: Services, *, alone: bool, settled: bool
) -> tuple[Request, Plan]:
    """The request for a prompt, and how it will be read."""
    request = Request(
        prompt=material.prompt,
        id=f"ask-{uuid.uuid4().hex}",
        # A namespace that nobody else has holds nothing to be read from the cache.
        salt=uuid.uuid4().hex,
        sampling=Sampling(max_tokens=draft.max_tokens),
        dense_from=material.dense_from,
    )
    if alone:
        return request, services.engine.plan(request)
    return _soonest(request, material.scope, services, settled=settled)


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
