"""Questions about a document through the real service, in this process: from the upload to the answer and its page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from app.answer import Ask, Citations, Context, Done, Mode, answer, prepare_answer
from app.main import create_app
from app.services import Services, build_services
from app.settings import Settings
from eval.errors import BadUsage
from eval.facts import Fact
from eval.faithfulness import faithfulness
from eval.measures import contains
from retrieval.catalogue import READABLE, Document
from serving.supervisor import SupervisedEngine
from serving.vllm_engine import VllmEngine


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a question.

    `right` is the share of the gold strings in the answer; `cited` whether a citation points to the fact's page; `held`
    whether the prompt has that page, or a part of it, so that what was not found is told from what was not read well.
    `supported` is the share of the answer's sentences that what the model was given bears out; None without a claim.
    `volume` is the one that the prompt held, if it did. `ttft` is the service's own, in seconds from the question to
    the first text; None when the answer is empty.
    """

    text: str
    right: float
    cited: bool
    held: bool
    mode: str
    volume: int | None
    path: str
    prompt_tokens: int
    computed_tokens: int | None
    ttft: float | None
    supported: float | None = None


@contextlib.asynccontextmanager
async def service(settings: Settings, folder: Path) -> AsyncIterator[Services]:
    """A service as configured, with its data in an empty folder, that takes documents in; its engine is not started.

    Raises:
        IngestError, RetrievalError: one of the small models cannot be used.
    """
    engine = None
    if settings.engine == "vllm":
        # Models are where they were prepared.
        config = replace(settings.engine_config, kv_disk=folder / "kv")
        engine = SupervisedEngine(lambda: VllmEngine(config))
    services = build_services(settings.model_copy(update={"data_dir": folder, "database_url": None}), engine)
    try:
        await services.start(with_engine=False)
        yield services
    finally:
        await services.stop()


async def start_engine(services: Services) -> None:
    """Start the engine, and reading early with it, unless they run.

    Raises:
        StartError: the engine cannot start as configured.
    """
    if not services.engine.state.ready:
        await services.warmer.start()
        await services.engine.start()


async def upload(services: Services, name: str, data: bytes) -> Document:
    """Take a file in through the API, and wait until it can be asked about.

    Raises:
        BadUsage: it cannot be ingested.
    """
    transport = httpx.ASGITransport(create_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://foreword") as http:
        response = await http.post("/v1/documents", files={"files": (name, data)})
    if response.is_error:
        raise BadUsage(f"the file was not taken: {response.json()['error']['message']}")
    id: str = response.json()["documents"][0]["id"]
    document = [document async for document in services.jobs.watch(id)][-1]
    if document.status not in READABLE:
        raise BadUsage(f"the file was not ingested: {document.reason}")
    return document


def stored_facts(facts: Sequence[Fact], document: Document, services: Services) -> list[Fact]:
    """The facts that their pages hold as they are stored, where placeholders stand for personal data; blocks.

    Raises:
        BadUsage: the document has no such page.
    """
    texts = {page.number: page.text for page in services.catalogue.pages(document.id)}
    for fact in facts:
        if fact.page not in texts:
            raise BadUsage(
                f"the fact {fact.question!r} is to be on page {fact.page}, and {document.name!r} has {len(texts)} pages"
            )
    return [fact for fact in facts if contains(texts[fact.page], fact.gold) == 1]


async def ask(fact: Fact, document: Document, services: Services, *, mode: Mode, max_tokens: int) -> Answered:
    """One question, as the service answers it.

    Raises:
        AskError, ServingError: it cannot be answered.
    """
    received = time.perf_counter()
    question = Ask(fact.question, (document.id,), mode=mode, max_tokens=max_tokens)
    prepared = await prepare_answer(question, services, received)
    try:
        events = [event async for event in answer(prepared, services)]
    finally:
        prepared.release()
    context = prepared.context
    done = next(event for event in events if isinstance(event, Done))
    citations = next(event.citations for event in events if isinstance(event, Citations))
    cached = done.prefill.cached_tokens
    given = "\n".join(evidence.text for evidence in prepared.evidence)
    return Answered(
        text=done.answer,
        right=contains(done.answer, fact.gold),
        cited=any(citation.page == fact.page for citation in citations),
        held=_holds(context, fact.page),
        mode=context.mode,
        volume=None if context.volume is None else context.volume.number,
        path=done.prefill.path,
        prompt_tokens=done.prefill.prompt_tokens,
        computed_tokens=None if cached is None else done.prefill.prompt_tokens - cached,
        ttft=done.timings.ttft,
        supported=faithfulness(done.answer, given, question=fact.question).share,
    )


def _holds(context: Context, page: int) -> bool:
    volume = context.volume
    in_volume = volume is not None and volume.first_page <= page <= volume.last_page
    return in_volume or any(passage.page == page for passage in context.passages)
