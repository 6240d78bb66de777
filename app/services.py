"""Settings become parts: the only file that picks implementations, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import unicodedata
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO

import structlog
from prometheus_client import CollectorRegistry

from app.conversation import Claims
from app.metrics import Metrics
from app.scope import Cuts
from app.settings import Settings
from app.warmer import Warmer
from ingest.jobs import Jobs
from ingest.pipeline import IngestConfig, Pipeline
from ingest.redact import PLACEHOLDER, Redacted, Redactor, load_key, presidio
from ingest.workers import Workers
from retrieval.catalogue import Catalogue
from retrieval.conversations import Conversations
from retrieval.embed import Embedder
from retrieval.errors import StorageFailed
from retrieval.vectors import Vectors
from serving.engine import Engine
from serving.scripted_engine import Script, ScriptedEngine
from serving.supervisor import SupervisedEngine
from serving.vllm_engine import VllmEngine

log = structlog.get_logger(__name__)

_MAX_COLLECTION = 100


class UnusableCollection(Exception):
    """What was typed is no name of a collection; the message says what is."""


class Turns:
    """Lets one request through at a time, and knows how many wait."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.waiting = 0

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Entered when everyone before has left."""
        self.waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._lock.release()


@dataclass(frozen=True)
class Services:
    """Every part of a running service."""

    settings: Settings
    key: bytes
    catalogue: Catalogue
    vectors: Vectors
    embedder: Embedder
    checks: Workers
    workers: Workers
    jobs: Jobs
    engine: Engine
    warmer: Warmer
    cuts: Cuts
    metrics: Metrics
    registry: CollectorRegistry
    lock: IO[str]
    claims: Claims = field(default_factory=Claims)
    _alone: Turns = field(default_factory=Turns)

    async def start(self, *, with_engine: bool = True) -> None:
        """Load the small models, then begin to work on uploads and load the engine.

        Raises:
            StartError: the engine cannot start as configured.
        """
        # Both load torch and its kin; one after the other keeps the peak of memory and of start-up time low.
        await asyncio.to_thread(lambda: self.embedder.window)
        await asyncio.to_thread(self.redact, "warm-up")
        await self.jobs.start()
        if with_engine:
            await self.warmer.start()
            await self.engine.start()

    async def stop(self) -> None:
        """Stop in the opposite order; safe after a failed start."""
        await self.jobs.stop()
        await self.warmer.stop()
        self.checks.close()
        self.workers.close()
        await self.engine.stop()
        self.vectors.close()
        self.catalogue.close()
        self.lock.close()

    def redact(self, text: str) -> Redacted:
        """A question or a file name without personal data; blocks."""
        return self._redactor.redact(text)

    def collection(self, typed: str) -> str:
        """The stored name of the collection that a user names; blocks.

        Raises:
            UnusableCollection: it is blank or too long.
        """
        return self._stored_collection(typed)

    def turn(self, *, alone: bool) -> contextlib.AbstractAsyncContextManager[None]:
        """Questions that are to be answered alone come one after another; the others at once."""
        return self._alone.one() if alone else contextlib.nullcontext()

    @property
    def pending(self) -> int:
        """Questions that the engine works on, and those that wait for their turn before it."""
        return self.engine.stats.pending + self._alone.waiting

    @cached_property
    def conversations(self) -> Conversations:
        """What was asked and answered in conversations."""
        return Conversations(self.catalogue.database)

    @cached_property
    def _redactor(self) -> Redactor:
        return Redactor(presidio(self.settings.ner_model), self.key)

    @cached_property
    def _stored_collection(self) -> Callable[[str], str]:
        # Looking for personal data takes some ms, and the same few names come with every question.
        return lru_cache(maxsize=1024)(lambda typed: collection_name(typed, self.redact))


def collection_name(typed: str, redact: Callable[[str], Redacted]) -> str:
    """What a user typed as a collection, as it is stored: one line without blanks around it and without personal data.

    The result stays as it is when it is typed again, so a name can be taken from a list of documents.

    Raises:
        UnusableCollection: it is blank or too long.
    """
    name = visible(typed)
    if not 0 < len(name) <= _MAX_COLLECTION:
        raise UnusableCollection(f"collection: give a name of 1 to {_MAX_COLLECTION} characters")
    # What stays may look like a name once its neighbours are gone, so the end is where nothing more is found.
    while (redacted := _redact_around_placeholders(name, redact)) != name:
        name = redacted
    if len(name) > _MAX_COLLECTION:
        raise UnusableCollection(
            f"collection: the name is longer than {_MAX_COLLECTION} characters once placeholders stand for the "
            "personal data in it; leave that out"
        )
    return name


def _redact_around_placeholders(name: str, redact: Callable[[str], Redacted]) -> str:
    parts = re.split(f"({PLACEHOLDER.pattern})", name)
    for place in range(0, len(parts), 2):
        # Underscores between words hide names from the recognizers.
        redacted = redact(parts[place].replace("_", " "))
        if redacted.entities:
            parts[place] = redacted.text
    return "".join(parts)


def visible(text: str) -> str:
    """A label as people see it: composed, without control and direction marks, without blanks around it."""
    return "".join(c for c in unicodedata.normalize("NFC", text) if unicodedata.category(c)[0] != "C").strip()


def build_services(settings: Settings, engine: Engine | None = None) -> Services:
    """Open the data folder and make every part; nothing heavy is loaded yet.

    Args:
        engine: used instead of the one that the settings name.

    Raises:
        StorageFailed: the data folder cannot be used, or another process owns it.
        ReindexNeeded: the stored vectors were made by another embedding model.
    """
    folder = settings.folder
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(_own(folder))
        key_file = folder / "redaction.key"
        key = load_key(key_file)
        catalogue = Catalogue(settings.catalogue_url)
        undo.callback(catalogue.close)
        embedder = Embedder(settings.embedding_model)
        vectors = Vectors(folder / "vectors", embedder)
        undo.callback(vectors.close)
        # Uploads are checked in a process of their own, so that a slow ingest does not hold them up.
        checks, workers = Workers(), Workers()
        engine = engine or _engine(settings)
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        pipeline = Pipeline(
            config=IngestConfig(key_file, settings.ner_model, settings.chunk_tokens),
            workers=workers,
            embedder=embedder,
            vectors=vectors,
            catalogue=catalogue,
            count_tokens=engine.count_tokens,
        )
        warmer = Warmer(engine, catalogue, key, enabled=settings.warm, on_read=metrics.warmed)
        cuts = Cuts(catalogue, engine)

        async def forget(id: str) -> None:
            cuts.clear()
            await warmer.forget(id)

        jobs = Jobs(
            pipeline,
            on_end=metrics.ingested,
            on_ready=lambda id, last: warmer.arrived(id, last=last),
            on_delete=forget,
        )
        undo.pop_all()
    parts = (settings, key, catalogue, vectors, embedder, checks, workers, jobs, engine, warmer, cuts, metrics)
    return Services(*parts, registry, lock)


def _engine(settings: Settings) -> Engine:
    if settings.engine == "scripted":
        script = Script(first_token_s=settings.scripted_first_token_s, gap_s=settings.scripted_gap_s)
        return ScriptedEngine(script)
    return SupervisedEngine(lambda: VllmEngine(settings.engine_config))


def _own(folder: Path) -> IO[str]:
    """Lock the data folder for this process; the lock ends with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("a+")
    except OSError as error:
        raise StorageFailed(
            f"the data folder {str(folder)!r} cannot be written ({error.strerror}); set FOREWORD_DATA_DIR"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise StorageFailed(
            f"the data folder {str(folder)!r} is in use by process {owner}; stop it, use its address, "
            "or set another FOREWORD_DATA_DIR"
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
