"""Parts that take seconds to load, loaded once; and a pipeline of real parts in an empty folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import settings
from pypdf import PdfReader, PdfWriter
from pypdf.generic import NameObject, StreamObject

from ingest.pipeline import IngestConfig, Pipeline
from ingest.redact import PACKAGED_NER, Analyzer, load_key, presidio
from ingest.workers import Workers
from retrieval.catalogue import Catalogue
from retrieval.embed import Embedder
from retrieval.vectors import Vectors
from tests.documents import as_pdf

# The same examples in every run, and no failures on a machine that is merely slow.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def analyzer() -> Analyzer:
    """The real Presidio."""
    return presidio()


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    """The real MiniLM."""
    return Embedder()


@pytest.fixture(scope="session")
async def workers() -> AsyncIterator[Workers]:
    """One process for all ingests, because Presidio is loaded in it."""
    workers = Workers(idle_s=600)
    yield workers
    workers.close()


@pytest.fixture
def pipeline(tmp_path: Path, embedder: Embedder, workers: Workers) -> Iterator[Pipeline]:
    """Real parts in a folder of their own; tokens of the language model are counted as words."""
    key_file = tmp_path / "redaction.key"
    load_key(key_file)
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'catalogue.sqlite3'}")
    vectors = Vectors(tmp_path / "vectors", embedder)
    yield Pipeline(
        config=IngestConfig(key_file, PACKAGED_NER),
        workers=workers,
        embedder=embedder,
        vectors=vectors,
        catalogue=catalogue,
        count_tokens=lambda text: len(text.split()),
    )
    vectors.close()
    catalogue.close()


@pytest.fixture(scope="session")
def half_broken_pdf() -> bytes:
    """Three pages; the second one's content is packed in a way that nobody knows."""
    pages = ("The first page is whole.", "The second page is lost.", "The third page is whole.")
    writer = PdfWriter(clone_from=PdfReader(BytesIO(as_pdf(pages))))
    stream = StreamObject()
    stream.set_data(b"?")
    stream[NameObject("/Filter")] = NameObject("/Unheard")
    writer.pages[1][NameObject("/Contents")] = writer._add_object(stream)
    buffer = BytesIO()
    writer.write(buffer)
    return buffer.getvalue()
