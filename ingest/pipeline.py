"""The path of a document, in one place: extract -> redact -> chunk -> embed and store.

Raw text exists only in the worker process and in the messages to and from it; what this process keeps is redacted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from ingest.chunk import chunk_pages
from ingest.extract import MediaType, Page, extract
from ingest.redact import Redactor, load_key, presidio
from ingest.workers import Workers
from retrieval.catalogue import Catalogue, Status, StoredPage
from retrieval.embed import Embedder, TokenCounter
from retrieval.passage import Chunk
from retrieval.vectors import Vectors

P = ParamSpec("P")
T = TypeVar("T")

_EXTRACT_TIMEOUT_S = 120.0
_BATCH_TIMEOUT_S = 120.0
_PAGES_A_BATCH = 4
_CHUNKS_A_BATCH = 32

Report = Callable[[Status, int, int, str], None]


@dataclass(frozen=True, slots=True)
class IngestConfig:
    """Sizes in tokens of the embedding model; a chunk is never longer than its window."""

    key_file: Path
    ner_model: str
    chunk_tokens: int = 128
    overlap_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an ingest ended: `ready`, or `partial` with the pages that could not be read."""

    status: Status
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The parts a document passes through."""

    config: IngestConfig
    workers: Workers
    embedder: Embedder
    vectors: Vectors
    catalogue: Catalogue
    count_tokens: Callable[[str], int]


async def ingest_document(
    id: str, name: str, kind: MediaType, data: bytes, *, pipeline: Pipeline, report: Report
) -> Outcome:
    """Take a file in.

    Args:
        name: what errors call the file; redacted.
        report: called with stage, done, total and unit as the work goes on.

    Raises:
        IngestError: the file cannot be taken in.
        RetrievalError: it cannot be stored.
    """
    report("extracting", 0, 1, "files")
    extracted = await pipeline.workers.run(_EXTRACT_TIMEOUT_S, extract, name, kind, data)
    pages, entities = await _redact(extracted.pages, pipeline, report)
    chunks = await _chunk(id, pages, pipeline, report)
    await _embed(chunks, pipeline, report)
    report("storing", 0, len(pages), "pages")
    await _to_its_end(_store, id, pages, chunks, entities, pipeline)
    return _outcome(extracted.unreadable)


def _outcome(unreadable: Sequence[int]) -> Outcome:
    if not unreadable:
        return Outcome("ready")
    numbers = ", ".join(map(str, unreadable[:20])) + (", ..." if len(unreadable) > 20 else "")
    return Outcome("partial", f"{len(unreadable)} pages could not be read: {numbers}")


async def _redact(pages: Sequence[Page], pipeline: Pipeline, report: Report) -> tuple[list[Page], Counter[str]]:
    redacted: list[Page] = []
    entities: Counter[str] = Counter()
    report("redacting", 0, len(pages), "pages")
    for batch in _batches(pages):
        config = pipeline.config
        clean, found = await pipeline.workers.run(
            _BATCH_TIMEOUT_S, redact_pages, batch, config.key_file, config.ner_model
        )
        redacted += clean
        entities += found
        report("redacting", len(redacted), len(pages), "pages")
    return redacted, entities


def redact_pages(pages: Sequence[Page], key_file: Path, ner_model: str) -> tuple[list[Page], Counter[str]]:
    """Pages without personal data and what was replaced; runs in the worker process."""
    redactor = Redactor(presidio(ner_model), load_key(key_file))
    results = [redactor.redact(page.text) for page in pages]
    entities = sum((result.entities for result in results), Counter[str]())
    return [replace(page, text=result.text) for page, result in zip(pages, results, strict=True)], entities


async def _chunk(id: str, pages: Sequence[Page], pipeline: Pipeline, report: Report) -> list[Chunk]:
    report("chunking", 0, len(pages), "pages")
    config = pipeline.config
    window = await asyncio.to_thread(lambda: pipeline.embedder.window)
    # Two places are taken by the model's own markers at both ends.
    size = min(config.chunk_tokens, window - 2)
    return await pipeline.workers.run(
        _BATCH_TIMEOUT_S + len(pages),
        chunk_in_worker,
        id,
        pages,
        pipeline.embedder.tokenizer_json,
        size,
        min(config.overlap_tokens, size // 4),
    )


def chunk_in_worker(id: str, pages: Sequence[Page], tokenizer_json: str, size: int, overlap: int) -> list[Chunk]:
    """Chunks of redacted pages; runs in the worker process, because counting tokens over and over takes its time."""
    return chunk_pages(id, pages, count_tokens=TokenCounter(tokenizer_json), chunk_tokens=size, overlap_tokens=overlap)


async def _embed(chunks: Sequence[Chunk], pipeline: Pipeline, report: Report) -> None:
    report("embedding", 0, len(chunks), "chunks")
    for start in range(0, len(chunks), _CHUNKS_A_BATCH):
        batch = chunks[start : start + _CHUNKS_A_BATCH]
        await _to_its_end(pipeline.vectors.add, batch)
        report("embedding", start + len(batch), len(chunks), "chunks")


def _store(id: str, pages: Sequence[Page], chunks: Sequence[Chunk], entities: Counter[str], pipeline: Pipeline) -> None:
    stored = [StoredPage(id, p.number, p.label, p.text, pipeline.count_tokens(p.text)) for p in pages]
    pipeline.catalogue.store(id, stored, chunks, entities)


async def _to_its_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread, and wait for it even when cancelled: what it writes after the clean-up would stay for ever."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _batches(pages: Sequence[Page]) -> Iterator[Sequence[Page]]:
    for start in range(0, len(pages), _PAGES_A_BATCH):
        yield pages[start : start + _PAGES_A_BATCH]
