"""What a prompt that was read early costs to bring back from slower memory, against computing it anew.

Each prompt is computed, read early, asked about while it is in memory, and then again from each tier below: from the
host's memory (on a GPU) after the device's cache was cleared, from files after the engine was started anew and the
system's own cache of those files was dropped. A source counts only when it is the one that was read from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from app.scope import shared_tokens
from eval.errors import BadUsage, NotMeasured
from eval.results import Results
from eval.serve import EngineServer, messages_of
from eval.served import without_question
from eval.tasks import TASKS
from eval.tasks.task import build_context
from serving.config import EngineConfig
from serving.engine import Request, Sampling
from serving.kv.files import KvFiles, namespace
from serving.vllm_engine import VllmEngine

Source = Literal["computed", "warm", "host memory", "files"]

_TASK = "facts-single"
_POLL_S = 0.1
# So long nothing new has appeared on disk when everything is there that will be.
_SETTLED_S = 3.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """One prompt asked once. `ttft` in seconds; `cached_tokens` of `prompt_tokens` were not computed."""

    length: int
    number: int
    source: Source
    prompt_tokens: int
    cached_tokens: int
    ttft: float


@dataclass(frozen=True, slots=True)
class Tier:
    """One length from one source: medians over `n` prompts, and the share of the time that computing takes."""

    length: int
    source: Source
    n: int
    cached_tokens: int
    ttft: float
    of_computed: float


def require_files(config: EngineConfig) -> Path:
    """The folder that keeps what is read early.

    Raises:
        BadUsage: there is none.
    """
    if config.kv_disk is None or not config.kv_disk_gib:
        raise BadUsage("nothing is kept on disk; set FOREWORD_KV_DISK_GIB to what all of the prompts take")
    return config.kv_disk


async def measure_tiers(
    config: EngineConfig,
    lengths: Sequence[int],
    repeats: int,
    *,
    seed: int,
    results: Results,
    say: Callable[[str], None],
    step: Callable[[], None],
) -> tuple[Tier, ...]:
    """Measure on two engines, one after another.

    Args:
        config: with a folder for files that nobody else uses, which `require_files` accepts.
        lengths: of the prompts in tokens.
        step: called after each of `len(lengths) * repeats` prompts, on each engine.

    Raises:
        BadUsage: nothing is kept as configured, or a prompt does not fit the window.
        NotMeasured: a prompt was not found where it should be.
    """
    folder = require_files(config)
    files = KvFiles(folder, config.kv_disk_gib * 2**30)
    fetched: list[Fetched] = []

    def record(one: Fetched) -> None:
        fetched.append(one)
        results.add("request", asdict(one))

    async with _started(config, say) as engine:
        asked = [
            _Asked.of(engine, length, number, seed) for length in sorted(set(lengths)) for number in range(repeats)
        ]
        for one in asked:
            for served in [served async for served in _before_restart(one, engine, files)]:
                record(served)
            step()
    async with _started(config, say) as engine:
        for one in asked:
            _drop_system_cache(folder, namespace(one.salt))
            record(await _fetch(one, "files", engine))
            step()
    return tuple(_tiers(fetched))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt, and how much of it is read early."""

    length: int
    number: int
    prompt: tuple[int, ...]
    early: int
    salt: str

    @classmethod
    def of(cls, engine: VllmEngine, length: int, number: int, seed: int) -> _Asked:
        server = EngineServer(engine)
        try:
            context = build_context(
                _TASK,
                TASKS[_TASK],
                language="en",
                length=length,
                number=number,
                seed=seed,
                questions=1,
                count_prompt=server.count_prompt,
            )
        except ValueError as error:
            raise BadUsage(str(error)) from error
        messages = messages_of(context.sources, context.questions[0])
        prompt = engine.render_chat(messages)
        if len(prompt) >= engine.limits.window:
            raise BadUsage(f"a prompt of {len(prompt):,} tokens does not fit the window of {engine.limits.window:,}")
        early = shared_tokens(engine.render_chat(without_question(messages)), prompt)
        return cls(length, number, tuple(prompt), early, uuid.uuid4().hex)

    def request(self, salt: str) -> Request:
        return Request(self.prompt, uuid.uuid4().hex, salt, Sampling(max_tokens=1))


async def _before_restart(asked: _Asked, engine: VllmEngine, files: KvFiles) -> AsyncIterator[Fetched]:
    yield await _fetch(replace(asked, salt=uuid.uuid4().hex), "computed", engine)
    early = replace(asked.request(asked.salt), prompt=asked.prompt[: asked.early], keep=True)
    await engine.prefill(early)
    # Whatever is still on its way down would make the next one slower.
    await _settle(files, namespace(asked.salt))
    yield await _fetch(asked, "warm", engine)
    if engine.keeps_in_host_memory:
        await engine.clear_memory()
        yield await _fetch(asked, "host memory", engine)


async def _fetch(asked: _Asked, source: Source, engine: VllmEngine) -> Fetched:
    started = time.perf_counter()
    prefill = await engine.prefill(asked.request(asked.salt))
    seconds = time.perf_counter() - started
    cached = prefill.cached_tokens or 0
    found = cached > len(asked.prompt) // 2
    if found != (source != "computed"):
        raise NotMeasured(f"of {len(asked.prompt):,} tokens {cached:,} were cached when they were to be {source}")
    return Fetched(asked.length, asked.number, source, len(asked.prompt), cached, seconds)


async def _settle(files: KvFiles, name: str) -> None:
    count, since = 0, time.monotonic()
    while time.monotonic() - since < _SETTLED_S:
        await asyncio.sleep(_POLL_S)
        now = await asyncio.to_thread(files.count, name)
        if now != count:
            count, since = now, time.monotonic()
    if not count:
        raise NotMeasured("nothing of a prompt that was read early came to disk; see that there is room")


def _drop_system_cache(root: Path, name: str) -> None:
    """Have the files of a namespace read from the disk itself, as after a restart of the machine."""
    for path in root.glob(f"*/{name}/*"):
        file = os.open(path, os.O_RDONLY)
        try:
            # Only what is on the disk already can be dropped.
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


@contextlib.asynccontextmanager
async def _started(config: EngineConfig, say: Callable[[str], None]) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(config)
    say("starting the engine, about a minute")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def _tiers(fetched: Sequence[Fetched]) -> Iterator[Tier]:
    groups: dict[tuple[int, Source], list[Fetched]] = {}
    for one in sorted(fetched, key=lambda one: one.length):
        groups.setdefault((one.length, one.source), []).append(one)
    for (length, source), ones in groups.items():
        ttft = median(one.ttft for one in ones)
        computed = median(one.ttft for one in groups[length, "computed"])
        yield Tier(length, source, len(ones), min(one.cached_tokens for one in ones), ttft, ttft / computed)


def tier_lines(tiers: Sequence[Tier]) -> list[str]:
    """What was measured, a line a length and source, for a terminal."""
    return [
        f"{'tokens':>8}  {'source':<12}{'n':>3}{'cached':>9}{'TTFT ms':>10}  of computing",
        *(
            f"{tier.length:>8,}  {tier.source:<12}{tier.n:>3}{tier.cached_tokens:>9,}{1000 * tier.ttft:>10,.1f}  "
            f"{tier.of_computed:.3f}"
            for tier in tiers
        ),
    ]
