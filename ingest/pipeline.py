"""The path of a document, in one place: extract -> redact -> paginate -> chunk -> embed and store.

Raw text is only ever in memory, here and in the worker process, until it is redacted; what is kept is redacted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from ingest.chunk import chunk_pages, paginate
from ingest.extract import MediaType, Page, extract, reading_limit_s
from ingest.redact import Span, join_pages, load_key, pieces, presidio, replace_spans
from ingest.workers import Workers
from retrieval.catalogue import Catalogue, Status, StoredPage
from retrieval.embed import Embedder, TokenCounter
from retrieval.passage import Chunk
from retrieval.vectors import Vectors

P = ParamSpec("P")
T = TypeVar("T")

# A limit is to end what hangs, so it is far above what work of its size takes on a slow machine.
_BATCH_TIMEOUT_S = 120.0
_CHUNK_CHARACTERS_PER_S = 3000
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
    extracted = await pipeline.workers.run(reading_limit_s(data), extract, name, kind, data)
    pages, entities = await _redact(extracted.pages, pipeline, report)
    if kind != "application/pdf":
        # Only now, so that no page break of ours hides a value from the redaction.
        pages = await asyncio.to_thread(paginate, pages)
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
    """Search the whole text piece by piece, so that each call is short, and replace at once what they all found."""
    config = pipeline.config
    texts = [page.text for page in pages]
    whole = join_pages(texts)
    spans: list[Span] = []
    report("redacting", 0, len(whole), "characters")
    for start, end in pieces(whole):
        found = await pipeline.workers.run(_BATCH_TIMEOUT_S, find_in_worker, whole[start:end], config.ner_model)
        spans += [span.moved(start) for span in found]
        report("redacting", end, len(whole), "characters")
    clean, entities = await asyncio.to_thread(replace_spans, texts, spans, load_key(config.key_file))
    return [replace(page, text=text) for page, text in zip(pages, clean, strict=True)], entities


def find_in_worker(text: str, ner_model: str) -> list[Span]:
    """Personal data of a text; runs in the worker process."""
    return presidio(ner_model).find(text)


async def _chunk(id: str, pages: Sequence[Page], pipeline: Pipeline, report: Report) -> list[Chunk]:
    report("chunking", 0, len(pages), "pages")
    config = pipeline.config
    window = await asyncio.to_thread(lambda: pipeline.embedder.window)
    # Two places are taken by the model's own markers at both ends.
    size = min(config.chunk_tokens, window - 2)
    return await pipeline.workers.run(
        _BATCH_TIMEOUT_S + sum(len(page.text) for page in pages) / _CHUNK_CHARACTERS_PER_S,
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
