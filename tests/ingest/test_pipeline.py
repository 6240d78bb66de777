"""A document passes all stages, in order; what is stored is redacted and fits together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from io import BytesIO
from itertools import groupby
from pathlib import Path

import pytest
from pypdf import PdfWriter
from pypdf.constants import PageLabelStyle

from ingest.errors import DamagedFile, IngestError
from ingest.extract import MediaType, extract
from ingest.pipeline import Outcome, Pipeline, ingest_document
from retrieval.catalogue import Document, Status
from retrieval.errors import UnknownDocument
from tests.documents import as_pdf, as_text, report, truncated_pdf

STAGES: Sequence[Status] = ("extracting", "redacting", "chunking", "embedding", "storing")
Step = tuple[Status, int, int, str]


def enter(pipeline: Pipeline, id: str = "d") -> None:
    pipeline.catalogue.add(Document(id, "a.pdf", "default", "application/pdf", 1, "digest", datetime.now(UTC)))


def bytes_below(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


async def ingest(pipeline: Pipeline, data: bytes, kind: MediaType = "application/pdf") -> tuple[Outcome, list[Step]]:
    steps: list[Step] = []
    outcome = await ingest_document(
        "d", "a.pdf", kind, data, pipeline=pipeline, report=lambda *step: steps.append(step)
    )
    return outcome, steps


async def test_stages_are_reported_in_order(pipeline: Pipeline) -> None:
    enter(pipeline)
    outcome, steps = await ingest(pipeline, as_pdf([f"The pump number {number} runs." for number in range(6)]))
    assert outcome == Outcome("ready")
    assert [stage for stage, _ in groupby(step[0] for step in steps)] == list(STAGES)
    for stage, group in groupby(steps, key=lambda step: step[0]):
        done = [step[1] for step in group]
        assert done == sorted(done), stage
        assert done[0] == 0, stage
    assert [step[1:] for step in steps if step[0] == "redacting"] == [
        (0, 6, "pages"),
        (4, 6, "pages"),
        (6, 6, "pages"),
    ]
    assert [step[1:] for step in steps if step[0] == "embedding"] == [(0, 6, "chunks"), (6, 6, "chunks")]


async def test_what_is_stored(pipeline: Pipeline, tmp_path: Path) -> None:
    enter(pipeline)
    planted_report = report(2)
    await ingest(pipeline, as_text(planted_report.pages), "text/plain")
    document = pipeline.catalogue.get("d")
    pages = pipeline.catalogue.pages("d")
    assert document.pages == len(pages) == 2
    assert [page.number for page in pages] == [1, 2]
    assert document.tokens == sum(page.tokens for page in pages) == sum(len(page.text.split()) for page in pages)
    assert document.entities is not None
    assert sum(document.entities.values()) == len(planted_report.planted)

    chunks = pipeline.catalogue.chunks([("d", number) for number in range(document.chunks)])
    assert len(chunks) == document.chunks == pipeline.vectors.count("d") > 5
    assert all(pages[chunk.page - 1].text[chunk.start : chunk.end] == chunk.text for chunk in chunks)

    # The values are in no file of the data folder, neither in the catalogue nor beside the vectors.
    stored = bytes_below(tmp_path)
    assert not [entry.value for entry in planted_report.planted if entry.value.encode() in stored]
    assert b"<PERSON_" in stored


async def test_unreadable_pages_make_it_partial(pipeline: Pipeline, half_broken_pdf: bytes) -> None:
    enter(pipeline)
    outcome, _ = await ingest(pipeline, half_broken_pdf)
    assert outcome == Outcome("partial", "1 pages could not be read: 2")
    assert [page.number for page in pipeline.catalogue.pages("d")] == [1, 3]


async def test_errors_of_the_worker_come_through(pipeline: Pipeline) -> None:
    enter(pipeline)
    with pytest.raises(DamagedFile, match="'a.pdf'"):  # noqa: RUF043  a dot is a dot here
        await ingest(pipeline, truncated_pdf())
    assert issubclass(DamagedFile, IngestError)


async def test_a_document_deleted_meanwhile_is_not_stored(pipeline: Pipeline) -> None:
    with pytest.raises(UnknownDocument):
        await ingest(pipeline, b"A short text.", "text/plain")
    assert pipeline.catalogue.pages("d") == []


async def test_chunks_fit_the_embedding_model(pipeline: Pipeline) -> None:
    enter(pipeline)
    await ingest(pipeline, ("word " * 300).encode(), "text/plain")
    chunks = pipeline.catalogue.chunks([("d", n) for n in range(pipeline.catalogue.get("d").chunks)])
    assert max(len(chunk.text.split()) for chunk in chunks) == pipeline.config.chunk_tokens
    assert pipeline.config.chunk_tokens <= pipeline.embedder.window - 2


def test_a_page_label_keeps_nothing_but_a_page_number() -> None:
    """A label's prefix is free text of the file, and labels are shown and stored as they are."""
    writer = PdfWriter(clone_from=BytesIO(as_pdf(["The first page.", "The second page."])))
    writer.set_page_label(0, 0, style=PageLabelStyle.DECIMAL, prefix="Patient John Smith ")
    writer.set_page_label(1, 1, style=PageLabelStyle.LOWERCASE_ROMAN, start=4)
    stream = BytesIO()
    writer.write(stream)
    pages = extract("x.pdf", "application/pdf", stream.getvalue()).pages
    assert [page.label for page in pages] == ["1", "iv"]


def test_a_page_ends_between_values_of_a_list() -> None:
    """Half an address on each page would pass the redaction unseen."""
    values = [f"someone{n}@example.com" for n in range(400)]
    pages = extract("x.txt", "text/plain", ";".join(values).encode()).pages
    assert len(pages) > 1
    assert [value for page in pages for value in page.text.split(";") if value] == values
