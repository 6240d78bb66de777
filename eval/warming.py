"""What reading early costs others, and how fast it is: the service's own loop, on a real engine.

Documents of random sentences lie in a catalogue of their own; `app.warmer` reads them as it does in the service, while
questions and answers go on beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from app.scope import Scope, prompt_of
from app.warmer import Warmer
from eval.errors import NotMeasured
from eval.results import Results
from eval.tasks.carrier import paragraph
from retrieval.catalogue import Catalogue, Document, StoredPage
from serving.engine import Engine, Message, Request, Sampling
from serving.errors import EngineUnavailable

_PAGE_TOKENS = 500
_SHORT = "Say in one word which of these is a colour: harbour, green, valve, meter, signal. Do not explain your choice."
_STORY = "Tell a long story about a lighthouse keeper, a lost boat and a storm."
_STORY_TOKENS = 96
# Between a question's answer and the next question there is time for some steps.
_PAUSE_STEPS = (0.3, 2.5)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of `n` values."""

    n: int
    p50: float
    p80: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        p50, p80, p95 = (float(value) for value in np.percentile(values, (50, 80, 95)))
        return cls(len(values), p50, p80, p95)


@dataclass(frozen=True, slots=True)
class Warming:
    """Seconds, but for shares.

    `throughput` is that of reading a document early, as a share of reading it in one go: the median of the pairs.
    `idle` and `beside` are times to the first token of short questions, alone and while documents are read early;
    `added_steps` is what the 95th percentile of the second has over the median of the first, in steps of `step`.
    `idle_gaps` and `beside_gaps` lie between the tokens of an answer. `estimate_errors` are shares of the true time.
    """

    tokens: int
    step: float
    throughput: float
    pairs: tuple[tuple[float, float], ...]
    idle: Spread
    beside: Spread
    added_steps: float
    idle_gaps: Spread
    beside_gaps: Spread
    estimate_errors: Spread


async def measure_warming(
    engine: Engine,
    folder: Path,
    *,
    length: int,
    repeats: int,
    questions: int,
    seed: int,
    results: Results,
    step: Callable[[], None],
) -> Warming:
    """Measure on an engine that has started.

    Args:
        folder: for the catalogue.
        length: of the documents in tokens.
        repeats: documents that are read in both ways.
        questions: of each kind, alone and beside the reading.
        step: called after each of `repeats + 3 * questions` measurements.

    Raises:
        NotMeasured: the engine cannot read such documents early.
    """
    run = _Run(engine, Catalogue(f"sqlite:///{folder / 'catalogue.sqlite3'}"), random.Random(seed), length, step)
    try:
        pairs = [await run.pair(early_first=number % 2 == 1) for number in range(repeats)]
        results.add("throughput", {"seconds_in_one_go_and_early": pairs})
        idle = [await run.first_token() for _ in range(questions)]
        idle_gaps = await run.gaps()
        async with run.reading():
            beside = [await run.first_token(pause=True) for _ in range(questions)]
            beside_gaps = await run.gaps()
        results.add("questions", {"idle": idle, "beside": beside, "idle_gaps": idle_gaps, "beside_gaps": beside_gaps})
        errors = [await run.estimate_error() for _ in range(questions)]
        results.add("estimates", {"errors": errors})
    finally:
        await run.close()
    seconds = engine.limits.background_s
    return Warming(
        tokens=length,
        step=seconds,
        throughput=median(whole / early for whole, early in pairs),
        pairs=tuple(pairs),
        idle=Spread.of(idle),
        beside=Spread.of(beside),
        added_steps=(Spread.of(beside).p95 - median(idle)) / seconds,
        idle_gaps=Spread.of(idle_gaps),
        beside_gaps=Spread.of(beside_gaps),
        estimate_errors=Spread.of(errors),
    )


class _Run:
    """Documents, and the loop that reads them."""

    def __init__(
        self, engine: Engine, catalogue: Catalogue, draw: random.Random, length: int, step: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._catalogue = catalogue
        self._draw = draw
        self._length = length
        self._step = step
        self._warmer = Warmer(engine, catalogue, draw.randbytes(32), enabled=False)
        self._started = False

    async def close(self) -> None:
        await self._warmer.stop()
        self._catalogue.close()

    async def pair(self, *, early_first: bool) -> tuple[float, float]:
        """Seconds for a document in one go, and for one of the same length early."""
        if early_first:
            early = await self._read_early()
            return await self._read_in_one_go(), early
        return await self._read_in_one_go(), await self._read_early()

    async def first_token(self, *, pause: bool = False) -> float:
        """Seconds to the first token of a short question that nobody has asked before."""
        if pause:
            await asyncio.sleep(self._draw.uniform(*_PAUSE_STEPS) * self._engine.limits.background_s)
        request = self._request([Message("user", _SHORT)], max_tokens=1)
        started = time.perf_counter()
        await self._engine.prefill(request)
        self._step()
        return time.perf_counter() - started

    async def gaps(self) -> list[float]:
        """Seconds between the tokens of an answer."""
        answer = self._engine.generate(self._request([Message("user", _STORY)], max_tokens=_STORY_TOKENS))
        times = [time.perf_counter() async for _ in answer]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        if not gaps:
            raise NotMeasured("the engine answered in one piece, so there is nothing between its tokens")
        return gaps

    async def estimate_error(self) -> float:
        """How far the engine's estimate for a prompt is off, as a share of the time that it takes."""
        salt = uuid.uuid4().hex
        whole = self._engine.render_chat([Message("user", self._text(self._draw.randint(200, self._length)))])
        # Some of it may have been read before.
        read = self._draw.choice((0, 0, len(whole) // 2, len(whole) * 9 // 10))
        if read:
            await self._engine.prefill(Request(prompt=whole[:read], id=uuid.uuid4().hex, salt=salt))
            # The engine tells of its blocks a moment later.
            await asyncio.sleep(0.1)
        request = Request(prompt=whole, id=uuid.uuid4().hex, salt=salt, sampling=Sampling(max_tokens=1))
        estimate = self._engine.plan(request).eta_s
        if estimate is None:
            raise NotMeasured("the engine makes no estimates")
        started = time.perf_counter()
        await self._engine.prefill(request)
        seconds = time.perf_counter() - started
        self._step()
        return abs(estimate - seconds) / seconds

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """While this is open, there is always a document that is being read early."""

        async def read() -> None:
            while True:
                await self._read_early()

        task = asyncio.create_task(read())
        try:
            yield
        finally:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(outcome, asyncio.CancelledError):
            raise NotMeasured(f"documents stopped being read early: {outcome}")

    async def _read_in_one_go(self) -> float:
        prompt = await asyncio.to_thread(prompt_of, self._document(), self._catalogue, self._engine)
        one = Sampling(max_tokens=1)
        request = Request(prompt=prompt, id=uuid.uuid4().hex, salt=uuid.uuid4().hex, sampling=one)
        started = time.perf_counter()
        await self._engine.prefill(request)
        self._step()
        return time.perf_counter() - started

    async def _read_early(self) -> float:
        if not self._started:
            await self._warmer.start()
            self._started = True
        scope = self._document()
        started = time.perf_counter()
        await self._warmer.warm(scope)
        while (warmth := self._warmer.warmth(scope)).state != "warm":
            if warmth.reason is not None:
                raise NotMeasured(f"a document of {self._length:,} tokens is not read early: {warmth.reason}")
            if not self._engine.state.ready:
                raise EngineUnavailable(f"the engine is {self._engine.state.phase}: {self._engine.state.reason}")
            await self._warmer.changes()
        seconds = time.perf_counter() - started
        # Its place in the cache is the next one's.
        await self._warmer.release(scope)
        return seconds

    def _document(self) -> Scope:
        """A new document."""
        id = f"doc-{uuid.uuid4().hex}"
        pages: list[StoredPage] = []
        left = self._length
        while left > 0:
            text = self._text(min(left, _PAGE_TOKENS))
            tokens = self._engine.count_tokens(text)
            pages.append(StoredPage(id, len(pages) + 1, str(len(pages) + 1), text, tokens))
            left -= tokens
        entry = Document(id, "report.txt", "default", "text/plain", 0, id, datetime.now(UTC), "ready")
        self._catalogue.add(entry)
        self._catalogue.store(id, pages, [], {})
        return Scope.of([entry])

    def _text(self, tokens: int) -> str:
        """Sentences of at least so many tokens, and not many more."""
        parts: list[str] = []
        while (missing := tokens - self._engine.count_tokens(" ".join(parts))) > 0:
            # A paragraph has about a hundred.
            parts += [paragraph(self._draw, "en") for _ in range(max(1, missing // 150))]
        return " ".join(parts)

    def _request(self, messages: Sequence[Message], max_tokens: int) -> Request:
        return Request(
            prompt=self._engine.render_chat(messages),
            id=uuid.uuid4().hex,
            salt=uuid.uuid4().hex,
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
        )


def warming_lines(warming: Warming) -> list[tuple[str, str]]:
    """What was measured, as names and values for a terminal."""
    step_ms = 1000 * warming.step
    return [
        ("documents", f"{warming.tokens:,} tokens"),
        ("throughput of reading early", f"{warming.throughput:.0%} of reading in one go (n {len(warming.pairs)})"),
        ("short question alone", _ms(warming.idle)),
        ("beside the reading", _ms(warming.beside)),
        ("p95 of the second over the median of the first", f"{warming.added_steps:.2f} steps of {step_ms:.0f} ms"),
        ("between tokens alone", _ms(warming.idle_gaps)),
        ("beside the reading", _ms(warming.beside_gaps)),
        ("error of estimates", _shares(warming.estimate_errors)),
    ]


def _ms(spread: Spread) -> str:
    return f"p50 {1000 * spread.p50:.1f} ms, p95 {1000 * spread.p95:.1f} ms (n {spread.n})"


def _shares(spread: Spread) -> str:
    return f"p50 {spread.p50:.0%}, p80 {spread.p80:.0%}, p95 {spread.p95:.0%} (n {spread.n})"
