"""From an upload to an answer and its page, through the real service: what is found, what is said, what is cited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean, median

from app.answer import Mode
from app.services import Services
from eval.asking import Answered, ask, start_engine, stored_facts, upload
from eval.errors import NotMeasured
from eval.facts import Fact
from eval.findings import Asked, Rate
from eval.results import Results
from retrieval.catalogue import Document

WAYS: tuple[Mode, ...] = ("auto", "retrieve")
_MAX_TOKENS = 24
# Recall is counted among so many of the best passages.
_BEST = 5


async def measure_asked(
    services: Services,
    name: str,
    data: bytes,
    facts: Sequence[Fact],
    *,
    results: Results,
    step: Callable[[], None],
) -> tuple[Asked, ...]:
    """Take a document in, start the engine, and ask for each fact in each way.

    Args:
        services: of `asking.service`.
        name, data: of the file.
        step: called after each question.

    Raises:
        BadUsage: the file or a fact cannot be used.
        NotMeasured: there is nothing to ask.
        StartError: the engine does not start.
    """
    document = await upload(services, name, data)
    stored = await asyncio.to_thread(stored_facts, facts, document, services)
    if not stored:
        raise NotMeasured("no page holds the gold strings of its fact as it is stored, without personal data")
    ranks = [await asyncio.to_thread(rank, fact, document, services) for fact in stored]
    await start_engine(services)
    answered: dict[Mode, list[Answered]] = {way: [] for way in WAYS}
    for fact in stored:
        for way in WAYS:
            one = await ask(fact, document, services, mode=way, max_tokens=_MAX_TOKENS)
            answered[way].append(one)
            results.add("asked", {"way": way, "question": fact.question, "page": fact.page, **asdict(one)})
            step()
    return tuple(summarise(way, ones, ranks) for way, ones in answered.items())


def rank(fact: Fact, document: Document, services: Services) -> int | None:
    """The place, from 1, of the first passage of the fact's page among those that the service considers; blocks."""
    question = services.redact(fact.question).text
    vector = services.embedder.embed_query(question)
    hits = services.vectors.search(vector, [document.id], services.settings.retrieve_limit)
    order = {(hit.document, hit.number): place for place, hit in enumerate(hits, start=1)}
    chunks = services.catalogue.chunks(list(order))
    places = [order[chunk.document, chunk.number] for chunk in chunks if chunk.page == fact.page]
    return min(places, default=None)


def summarise(way: str, answered: Sequence[Answered], ranks: Sequence[int | None]) -> Asked:
    """The figures of one way of asking.

    Args:
        answered, ranks: of the same facts, in the same order.
    """
    n = len(answered)
    supported = [one.supported for one in answered if one.supported is not None]
    times = [one.ttft for one in answered if one.ttft is not None]
    return Asked(
        way=way,
        n=n,
        right=Rate.of("right", sum(one.right == 1 for one in answered), n),
        cited=Rate.of("cited", sum(one.cited for one in answered), n),
        recall=Rate.of(f"among the best {_BEST}", sum(place is not None and place <= _BEST for place in ranks), n),
        mrr=fmean(0 if place is None else 1 / place for place in ranks),
        supported=fmean(supported) if supported else None,
        ttft=median(times) if times else None,
    )
