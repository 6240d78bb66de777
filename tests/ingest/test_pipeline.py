"""A document passes all stages, in order; what is stored is redacted and fits together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from io import BytesIO
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfWriter
from pypdf.constants import PageLabelStyle

from ingest import redact as redact_module
from ingest.errors import DamagedFile, IngestError
from ingest.extract import MediaType, extract
from ingest.pipeline import Outcome, Pipeline, ingest_document
from ingest.redact import load_key, placeholder
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
    characters = 6 * len("The pump number 0 runs.") + 5
    assert [step[1:] for step in steps if step[0] == "redacting"] == [
        (0, characters, "characters"),
        (characters, characters, "characters"),
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


async def test_redaction_reports_every_piece(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact_module, "_PIECE", 500)
    enter(pipeline)
    text = "The pump runs. " * 100
    _, steps = await ingest(pipeline, text.encode(), "text/plain")
    done = [step[1] for step in steps if step[0] == "redacting"]
    assert done[0] == 0
    assert done[-1] == len(text)
    assert all(0 < after - before <= 500 for before, after in pairwise(done))


NAME = "Robert Callahan"


@pytest.mark.parametrize("separator", [" ", "\n", "\f"], ids=["blank", "line break", "form feed"])
async def test_a_value_is_found_wherever_a_page_or_a_piece_ends(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    """Names stand on all places, so some of them lie where the text is cut for whatever reason."""
    monkeypatch.setattr(redact_module, "_PIECE", 1000)
    enter(pipeline)
    sentence = f"Please contact {NAME.replace(' ', separator)} at the service desk. "
    await ingest(pipeline, (sentence * 200).encode(), "text/plain")
    pages = pipeline.catalogue.pages("d")
    assert len(pages) > 3
    text = "".join(page.text for page in pages)
    assert "Robert" not in text
    assert "Callahan" not in text
    assert pipeline.catalogue.get("d").entities == {"PERSON": 200}
    assert text.count(placeholder(load_key(pipeline.config.key_file), "PERSON", NAME)) == 200


async def test_a_name_that_two_pages_of_a_pdf_share(pipeline: Pipeline) -> None:
    enter(pipeline)
    await ingest(pipeline, as_pdf(["Please contact Robert", "Callahan at the service desk."]))
    first, second = (page.text for page in pipeline.catalogue.pages("d"))
    assert first == f"Please contact {placeholder(load_key(pipeline.config.key_file), 'PERSON', NAME)}"
    assert second.strip() == "at the service desk."


async def test_no_value_of_a_long_list_is_cut(pipeline: Pipeline) -> None:
    """Half an address on each page would pass the redaction unseen."""
    enter(pipeline)
    values = [f"someone{n}@example.com" for n in range(400)]
    await ingest(pipeline, ";".join(values).encode(), "text/plain")
    pages = pipeline.catalogue.pages("d")
    assert len(pages) > 1
    assert pipeline.catalogue.get("d").entities == {"EMAIL_ADDRESS": 400}
    assert not [page.number for page in pages if "someone" in page.text or "example" in page.text]


async def test_limits_grow_with_the_work(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, list[float]] = {}
    run = pipeline.workers.run

    async def spy(limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
        limits.setdefault(function.__name__, []).append(limit_s)
        return await run(limit_s, function, *args)

    monkeypatch.setattr(pipeline.workers, "run", spy)
    for id, repeats in (("d", 1), ("e", 400)):
        enter(pipeline, id)
        data = b"The pump runs in November. " * repeats
        await ingest_document(id, "a.txt", "text/plain", data, pipeline=pipeline, report=lambda *_: None)
    for function in ("extract", "chunk_in_worker"):
        small, large = limits[function]
        assert 120 <= small < large, function
    # A piece is of bounded size, and so is its time.
    assert set(limits["find_in_worker"]) == {120.0}
