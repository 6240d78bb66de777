"""A store that cannot be used says so with one error of its own, which quotes no document."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from retrieval.catalogue import Catalogue, Document, StoredPage
from retrieval.embed import Embedder
from retrieval.errors import StorageFailed
from retrieval.passage import Chunk
from retrieval.vectors import Vectors

GARBAGE = b"garbage" * 1000
CHUNK = Chunk("d", 0, 1, 0, 24, "The ferry sails at noon.")


def document(id: str, name: str = "a.txt") -> Document:
    return Document(id, name, "default", "text/plain", 1, "digest", datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        pytest.param("sqlite:///{folder}/missing/catalogue.sqlite3", "unable to open", id="no such folder"),
        pytest.param("sqlite:///{folder}", "unable to open", id="a folder"),
        pytest.param("sqlite:///{folder}/garbage", "not a database", id="no database"),
        pytest.param("me:sesame@host", "Could not parse", id="no url"),
        pytest.param("oracel://me:sesame@host", "oracel", id="unknown kind of database"),
        pytest.param("mssql+pymssql://me:sesame@host", "pymssql", id="driver not installed"),
    ],
)
def test_unusable_url(tmp_path: Path, url: str, cause: str) -> None:
    (tmp_path / "garbage").write_bytes(GARBAGE)
    with pytest.raises(StorageFailed, match=f"the catalogue cannot be read or written: .*{cause}") as caught:
        Catalogue(url.format(folder=tmp_path))
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda c: c.add(document("d")), id="add"),
        pytest.param(lambda c: c.get("d"), id="get"),
        pytest.param(lambda c: c.documents(), id="documents"),
        pytest.param(lambda c: c.find_same("default", "digest"), id="find_same"),
        pytest.param(lambda c: c.find_newest("default", "a.txt"), id="find_newest"),
        pytest.param(lambda c: c.set_status("d", "ready"), id="set_status"),
        pytest.param(lambda c: c.store("d", [], [], {}), id="store"),
        pytest.param(lambda c: c.pages("d"), id="pages"),
        pytest.param(lambda c: c.page("d", 1), id="page"),
        pytest.param(lambda c: c.chunks([("d", 0)]), id="chunks"),
        pytest.param(lambda c: c.delete("d"), id="delete"),
        pytest.param(lambda c: c.clear("d"), id="clear"),
        pytest.param(lambda c: c.count(), id="count"),
    ],
)
def test_catalogue_that_breaks(tmp_path: Path, call: Callable[[Catalogue], object]) -> None:
    file = tmp_path / "catalogue.sqlite3"
    catalogue = Catalogue(f"sqlite:///{file}")
    # Its connections are closed, so the next call opens what lies there now.
    catalogue.close()
    file.write_bytes(GARBAGE)
    with pytest.raises(StorageFailed, match="the catalogue cannot be read or written: file is not a database"):
        call(catalogue)
    catalogue.close()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda v, e: v.add([CHUNK]), id="add"),
        pytest.param(lambda v, e: v.search(e.embed_query("ferry"), ["d"], 3), id="search"),
        pytest.param(lambda v, e: v.delete("d"), id="delete"),
        pytest.param(lambda v, e: v.count(), id="count"),
        pytest.param(lambda v, e: v.count("d"), id="count of one"),
    ],
)
def test_vectors_that_break(tmp_path: Path, embedder: Embedder, call: Callable[[Vectors, Embedder], object]) -> None:
    vectors = Vectors(tmp_path / "vectors", embedder)
    vectors.add([CHUNK])
    (tmp_path / "vectors" / "chroma.sqlite3").write_bytes(GARBAGE)
    with pytest.raises(StorageFailed, match=r"the vector store cannot be read or written: .*not a database") as caught:
        call(vectors, embedder)
    assert "ferry" not in str(caught.value)
    vectors.close()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda c, entry, page: c.add(entry), id="name"),
        pytest.param(lambda c, entry, page: c.store("d", [page, page], [], {}), id="text"),
    ],
)
def test_errors_quote_no_document(tmp_path: Path, call: Callable[[Catalogue, Document, StoredPage], object]) -> None:
    """Neither in the message nor in a logged traceback, which holds the database's own error too."""
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'catalogue.sqlite3'}")
    entry, page = document("d", "quixotic.txt"), StoredPage("d", 1, "1", "a quixotic text", 3)
    catalogue.add(entry)
    with pytest.raises(StorageFailed, match="UNIQUE") as caught:
        call(catalogue, entry, page)
    catalogue.close()
    assert "quixotic" not in "".join(traceback.format_exception(caught.value))


def test_threads_do_not_lock_each_other_out(tmp_path: Path) -> None:
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'catalogue.sqlite3'}")
    ids = [f"d{number:02}" for number in range(24)]

    def store(id: str) -> list[StoredPage]:
        catalogue.add(document(id))
        catalogue.store(id, [StoredPage(id, 1, "1", f"text of {id}", 3)], [], {})
        return catalogue.pages(id)

    with ThreadPoolExecutor(8) as pool:
        stored = list(pool.map(store, ids))
    assert stored == [[StoredPage(id, 1, "1", f"text of {id}", 3)] for id in ids]
    assert catalogue.count() == len(ids)
    catalogue.close()
