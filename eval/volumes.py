"""Questions about a document longer than the window, by its volumes and by passages alone, through the real service.

A question is asked three ways: `auto`, as users ask it; `retrieve`, with `mode=retrieve`; and `filled`, where that mode
may use as many tokens as the volume did, for the time that such a prompt takes without volumes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median

from app.answer import Ask, prepare_answer
from app.scope import scopes_of
from app.services import Services
from eval.asking import Answered, ask, start_engine, stored_facts, upload
from eval.errors import BadUsage, NotMeasured
from eval.facts import Fact
from eval.results import Results
from eval.statistics import Difference, Interval, Pair, paired_difference, ratio_of_geometric_means
from retrieval.catalogue import Document

# An answer that names one fact is short.
_MAX_TOKENS = 64
# The filled prompts drive volumes out, which are read again before the next question, or for so many seconds at most.
_SETTLE_S = 90.0
# Of chunks that are searched for, so many times as many as would fill a prompt: some are far shorter than others.
_MORE_CHUNKS = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its answers; `filled` only where `auto` was answered from a warm volume."""

    fact: Fact
    auto: Answered
    retrieve: Answered
    filled: Answered | None


@dataclass(frozen=True, slots=True)
class Way:
    """One way to ask.

    `held`, `right` and `cited` are shares of the `n` questions asked so, `paths` counts them. Tokens and seconds are
    medians over those that `auto` answered from a warm volume, whatever the way; None where nobody knows any.
    """

    name: str
    n: int
    held: float
    right: float
    cited: float
    prompt_tokens: float | None
    computed_tokens: float | None
    ttft: float | None
    paths: dict[str, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `asked` questions have shown, of which `served` were answered from a warm volume.

    `right` and `cited` are auto - retrieve, `ttft` is the ratio of auto to filled.
    """

    asked: int
    served: int
    ways: tuple[Way, ...]
    right: Difference
    cited: Difference
    ttft: Interval | None


@dataclass(frozen=True, slots=True)
class Volumes:
    """A document, and what was asked about it.

    `read_s` seconds after it could be asked about, `warm` of its `volumes` were in memory. `left_out` facts were not
    asked, for their pages do not hold the answer as they are stored.
    """

    pages: int
    tokens: int
    volumes: int
    warm: int
    read_s: float
    left_out: int
    comparison: Comparison


async def measure_volumes(
    services: Services,
    name: str,
    data: bytes,
    facts: Sequence[Fact],
    *,
    wait: float,
    seed: int,
    results: Results,
    say: Callable[[str], None],
    step: Callable[[], None],
) -> Volumes:
    """Take the document in, start the engine, wait until it has read what it can, and ask.

    Args:
        services: of `asking.service`.
        name, data: of the file.
        wait: most seconds to wait until the document is warm.
        step: called after each question.

    Raises:
        BadUsage: the file or a fact cannot be used, or the document has no volumes in this window.
        NotMeasured: there is nothing to ask.
        StartError: the engine does not start.
    """
    say("taking the document in")
    document = await upload(services, name, data)
    stored = await asyncio.to_thread(stored_facts, facts, document, services)
    if not stored:
        raise NotMeasured("no page holds the gold strings of its fact as it is stored, without personal data")
    say("starting the engine, about a minute")
    await start_engine(services)
    scopes = await asyncio.to_thread(scopes_of, [document], services.catalogue, services.engine)
    if not scopes or scopes[0].volume is None:
        window = services.engine.limits.window
        raise BadUsage(
            f"{name!r} has {document.tokens:,} tokens and no volumes in the window of {window:,}; give a longer one"
        )
    read_s = await _until_warm(document, services, wait, say)
    warm = len(services.warmer.warm_scopes() & set(scopes))
    say(f"{warm} of {len(scopes)} volumes are warm after {read_s:,.0f} s")
    # What is slow only once is not measured.
    await ask(Fact("What is this about?", ("-",), 1), document, services, mode="retrieve", max_tokens=1)
    before = services.warmer.warmth_of(document.id).tokens
    asked = []
    for fact in stored:
        await _until_read_again(document, services, before)
        asked.append(await _ask_all_ways(fact, document, services))
        results.add("question", asdict(asked[-1]))
        step()
    return Volumes(
        pages=document.pages,
        tokens=document.tokens or 0,
        volumes=len(scopes),
        warm=warm,
        read_s=read_s,
        left_out=len(facts) - len(stored),
        comparison=compare(asked, seed),
    )


def compare(asked: Sequence[Asked], seed: int) -> Comparison:
    """What the answers show. Questions about one page succeed and fail together."""
    served = [one for one in asked if one.filled is not None]
    times = [
        (one.auto.ttft, one.filled.ttft)
        for one in served
        if one.filled is not None and one.auto.ttft is not None and one.filled.ttft is not None
    ]
    return Comparison(
        asked=len(asked),
        served=len(served),
        ways=(
            _way("auto", [one.auto for one in asked], [one.auto for one in served]),
            _way("retrieve", [one.retrieve for one in asked], [one.retrieve for one in served]),
            *([_way("filled", filled, filled)] if (filled := [one.filled for one in served if one.filled]) else []),
        ),
        right=paired_difference([Pair(str(o.fact.page), o.auto.right, o.retrieve.right) for o in asked], seed),
        cited=paired_difference([Pair(str(o.fact.page), o.auto.cited, o.retrieve.cited) for o in asked], seed),
        ttft=ratio_of_geometric_means([a for a, _ in times], [b for _, b in times], seed) if times else None,
    )


def _way(name: str, answers: Sequence[Answered], served: Sequence[Answered]) -> Way:
    return Way(
        name=name,
        n=len(answers),
        held=fmean(one.held for one in answers),
        right=fmean(one.right for one in answers),
        cited=fmean(one.cited for one in answers),
        prompt_tokens=_median([one.prompt_tokens for one in served]),
        computed_tokens=_median([one.computed_tokens for one in served]),
        ttft=_median([one.ttft for one in served]),
        paths=dict(sorted(Counter(one.path for one in answers).items())),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


async def _until_warm(document: Document, services: Services, wait: float, say: Callable[[str], None]) -> float:
    """Seconds until nothing more of the document is being read, `wait` at most."""
    started = time.perf_counter()
    told = 0
    while (warmth := services.warmer.warmth_of(document.id)).state == "warming":
        if (seconds := time.perf_counter() - started) >= wait:
            return seconds
        if warmth.total and warmth.tokens * 10 // warmth.total > told:
            told = warmth.tokens * 10 // warmth.total
            say(f"{warmth.tokens:,} of about {warmth.total:,} tokens are warm after {seconds:,.0f} s")
        await services.warmer.changes()
    return time.perf_counter() - started


async def _until_read_again(document: Document, services: Services, tokens: int) -> None:
    deadline = time.perf_counter() + _SETTLE_S
    while services.warmer.warmth_of(document.id).tokens < tokens and time.perf_counter() < deadline:
        await services.warmer.changes()


async def _ask_all_ways(fact: Fact, document: Document, services: Services) -> Asked:
    """`auto` comes first, for it would find what the others have read, and `filled` right after it."""
    auto = await ask(fact, document, services, mode="auto", max_tokens=_MAX_TOKENS)
    filled = None
    if auto.volume is not None and auto.path == "warm":
        large = await _filled(services, fact, document, auto.prompt_tokens)
        filled = await ask(fact, document, large, mode="retrieve", max_tokens=_MAX_TOKENS)
    retrieve = await ask(fact, document, services, mode="retrieve", max_tokens=_MAX_TOKENS)
    return Asked(fact, auto, retrieve, filled)


async def _filled(services: Services, fact: Fact, document: Document, tokens: int) -> Services:
    """The same services, but for passages that make a prompt of about so many tokens of this question."""
    share = tokens / services.engine.limits.window
    chunk_tokens = max(1, (document.tokens or 0) // max(1, document.chunks))
    limit = _MORE_CHUNKS * tokens // chunk_tokens

    def allowing(share: float) -> Services:
        settings = services.settings.model_copy(update={"retrieve_share": share, "retrieve_limit": limit})
        return replace(services, settings=settings)

    question = Ask(fact.question, (document.id,), mode="retrieve", max_tokens=_MAX_TOKENS)
    prepared = await prepare_answer(question, allowing(share), time.perf_counter())
    prepared.release()
    # Besides the passages a prompt has their marks and the instructions.
    return allowing(share * tokens / prepared.context.prompt_tokens)
