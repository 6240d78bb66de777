"""The catalogue on real SQLite: what goes in comes out, in order; what is deleted is gone from the file."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from retrieval import catalogue as catalogue_module
from retrieval.catalogue import FINAL, READABLE, STATUSES, Catalogue, Document, Status, StoredPage
from retrieval.errors import StorageFailed, UnknownDocument, UnknownPage
from retrieval.passage import Chunk

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TEXTS = ("The mast is red. The sail is white.", "The anchor is heavy.")


def document(id: str = "d", **changes: Any) -> Document:
    return replace(Document(id, "a.txt", "default", "text/plain", 7, f"digest of {id}", NOON), **changes)


def add_stored(catalogue: Catalogue, id: str = "d") -> list[Chunk]:
    """Enter a document of two pages and three chunks."""
    catalogue.add(document(id))
    pages = [StoredPage(id, 1, "i", TEXTS[0], 9), StoredPage(id, 2, "ii", TEXTS[1], 5)]
    places = [(1, 0, 16), (1, 17, 35), (2, 0, 20)]
    chunks = [
        Chunk(id, number, page, start, end, TEXTS[page - 1][start:end])
        for number, (page, start, end) in enumerate(places)
    ]
    catalogue.store(id, pages, chunks, {"PERSON": 2, "EMAIL_ADDRESS": 1})
    return chunks


def test_a_new_document_comes_back_as_it_was(catalogue: Catalogue) -> None:
    new = document(created_at=datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC))
    catalogue.add(new)
    assert catalogue.get("d") == replace(new, entities={})


def test_times_are_utc(catalogue: Catalogue) -> None:
    catalogue.add(document(created_at=NOON.astimezone(timezone(timedelta(hours=8)))))
    created = catalogue.get("d").created_at
    assert created == NOON
    assert created.tzinfo is UTC


def test_unknown_document(catalogue: Catalogue) -> None:
    for act in (catalogue.get, catalogue.delete, lambda id: catalogue.page(id, 1)):
        with pytest.raises(UnknownDocument, match="there is no document 'd_none'; list the documents"):
            act("d_none")
    with pytest.raises(UnknownDocument):
        catalogue.store("d_none", [], [], {})
    assert catalogue.pages("d_none") == []


def test_an_id_is_given_once(catalogue: Catalogue) -> None:
    catalogue.add(document())
    with pytest.raises(StorageFailed):
        catalogue.add(document(name="b.txt"))
    assert catalogue.get("d").name == "a.txt"


def test_documents_newest_first(catalogue: Catalogue) -> None:
    ages = {"b": 2.0, "a": 0.0, "d": 1.0, "c": 0.000001}
    for id, seconds in ages.items():
        catalogue.add(document(id, created_at=NOON - timedelta(seconds=seconds)))
    assert [d.id for d in catalogue.documents()] == ["a", "c", "d", "b"]
    assert catalogue.count() == 4


def test_documents_of_a_collection_and_a_status(catalogue: Catalogue) -> None:
    for number, status in enumerate(STATUSES):
        catalogue.add(document(status, status=status, created_at=NOON - timedelta(seconds=number)))
    catalogue.add(document("other", collection="other", status="ready"))
    assert [d.id for d in catalogue.documents("default")] == list(STATUSES)
    assert [d.id for d in catalogue.documents("other")] == ["other"]
    assert {d.id for d in catalogue.documents(statuses=READABLE)} == {"ready", "partial", "other"}
    assert [d.id for d in catalogue.documents("default", FINAL)] == list(FINAL)
    assert catalogue.documents("none") == []


@pytest.mark.parametrize("status", STATUSES)
def test_find_same(catalogue: Catalogue, status: Status) -> None:
    catalogue.add(document(digest="x", status=status))
    found = catalogue.find_same("default", "x")
    # What failed or was cancelled may be uploaded again.
    assert (found is None) == (status in ("failed", "cancelled"))
    assert catalogue.find_same("other", "x") is None
    assert catalogue.find_same("default", "y") is None


def test_find_same_takes_the_oldest(catalogue: Catalogue) -> None:
    catalogue.add(document("new", digest="x"))
    catalogue.add(document("old", digest="x", created_at=NOON - timedelta(days=1)))
    found = catalogue.find_same("default", "x")
    assert found is not None
    assert found.id == "old"


@pytest.mark.parametrize("status", STATUSES)
def test_find_newest(catalogue: Catalogue, status: Status) -> None:
    catalogue.add(document("old", created_at=NOON - timedelta(days=1)))
    catalogue.add(document("new", status=status))
    catalogue.add(document("other", name="b.txt", created_at=NOON + timedelta(days=1)))
    catalogue.add(document("elsewhere", collection="other", created_at=NOON + timedelta(days=1)))
    found = catalogue.find_newest("default", "a.txt")
    assert found is not None
    assert found.id == ("old" if status in ("failed", "cancelled") else "new")
    assert catalogue.find_newest("default", "none.txt") is None


def test_several_are_entered_all_or_none(catalogue: Catalogue) -> None:
    catalogue.add(document("a"), document("b"))
    with pytest.raises(StorageFailed):
        catalogue.add(document("c"), document("a"))
    assert {d.id for d in catalogue.documents()} == {"a", "b"}
    catalogue.add()


def test_status_and_reason(catalogue: Catalogue) -> None:
    catalogue.add(document())
    catalogue.set_status("d", "failed", "it is broken")
    assert (catalogue.get("d").status, catalogue.get("d").reason) == ("failed", "it is broken")
    catalogue.set_status("d", "ready")
    assert (catalogue.get("d").status, catalogue.get("d").reason) == ("ready", None)
    catalogue.set_status("d_none", "ready")


def test_stored_pages_and_counts(catalogue: Catalogue) -> None:
    add_stored(catalogue)
    stored = catalogue.get("d")
    assert (stored.pages, stored.chunks, stored.tokens) == (2, 3, 14)
    assert stored.entities == {"EMAIL_ADDRESS": 1, "PERSON": 2}
    assert [(p.number, p.label, p.text, p.tokens) for p in catalogue.pages("d")] == [
        (1, "i", TEXTS[0], 9),
        (2, "ii", TEXTS[1], 5),
    ]
    assert [[p.number for p in catalogue.pages("d", *some)] for some in ((2,), (1, 1), (2, 9), (3, 3))] == [
        [2],
        [1],
        [2],
        [],
    ]
    assert catalogue.page("d", 2) == StoredPage("d", 2, "ii", TEXTS[1], 5)


@pytest.mark.parametrize("number", [0, 3, -1])
def test_unknown_page(catalogue: Catalogue, number: int) -> None:
    add_stored(catalogue)
    with pytest.raises(UnknownPage, match=f"document 'd' has 2 pages, not a page {number}"):
        catalogue.page("d", number)


def test_chunks_in_the_order_asked_for(catalogue: Catalogue) -> None:
    first, second = add_stored(catalogue, "a"), add_stored(catalogue, "b")
    keys = [("b", 2), ("a", 1), ("b", 0), ("a", 0)]
    assert catalogue.chunks(keys) == [second[2], first[1], second[0], first[0]]
    # Those that are gone are left out: a search may be older than a deletion.
    assert catalogue.chunks([("a", 9), ("none", 0), ("a", 2)]) == [first[2]]
    assert catalogue.chunks([]) == []


def test_more_chunks_than_a_statement_takes_values(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = add_stored(catalogue)
    # SQLite is built with other limits here and there, so the batches are watched instead.
    monkeypatch.setattr(catalogue_module, "_VALUES_AT_ONCE", 2)
    assert [len(numbers) for _, numbers in catalogue_module._batches({"d": range(5), "e": [1]})] == [2, 2, 1, 1]
    assert catalogue.chunks([("d", number) for number in (2, 0, 7, 1)]) == [chunks[2], chunks[0], chunks[1]]


def test_delete_takes_pages_and_chunks_along(catalogue: Catalogue) -> None:
    gone, kept = add_stored(catalogue, "a"), add_stored(catalogue, "b")
    catalogue.delete("a")
    assert [d.id for d in catalogue.documents()] == ["b"]
    assert catalogue.pages("a") == []
    # An entry of the same id does not bring them back.
    catalogue.add(document("a"))
    assert catalogue.chunks([(c.document, c.number) for c in gone + kept]) == kept


def test_clear_keeps_the_entry_only(catalogue: Catalogue) -> None:
    chunks = add_stored(catalogue)
    catalogue.clear("d")
    assert catalogue.pages("d") == []
    assert catalogue.chunks([(c.document, c.number) for c in chunks]) == []
    assert catalogue.get("d") == document(entities={})


def test_a_failed_store_leaves_nothing(catalogue: Catalogue) -> None:
    catalogue.add(document())
    page = StoredPage("d", 1, "1", "text", 1)
    with pytest.raises(StorageFailed):
        catalogue.store("d", [page, page], [], {})
    assert catalogue.pages("d") == []
    assert catalogue.get("d") == document(entities={})


def test_another_run_finds_everything(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'c.sqlite3'}"
    first = Catalogue(url)
    chunks = add_stored(first)
    first.close()
    second = Catalogue(url)
    assert second.chunks([("d", 0), ("d", 1), ("d", 2)]) == chunks
    assert second.get("d").pages == 2
    second.close()


def test_deleted_text_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "c.sqlite3"

    def holds(text: str) -> bool:
        return any(text.encode() in path.read_bytes() for path in tmp_path.iterdir())

    catalogue = Catalogue(f"sqlite:///{file}")
    add_stored(catalogue)
    catalogue.add(document("long", name="a planted name.txt"))
    # Long enough to spill into pages of its own.
    catalogue.store("long", [StoredPage("long", 1, "1", "a planted text. " * 2000, 1)], [], {})
    assert holds("a planted text")
    catalogue.delete("long")
    catalogue.close()
    assert file.exists()
    assert not holds("a planted text")
    assert not holds("a planted name")
    assert holds("The mast is red")


@pytest.mark.parametrize(
    "content", [pytest.param(None, id="no folder"), pytest.param(b"no database " * 100, id="another kind of file")]
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "missing" / "c.sqlite3"
    if content is not None:
        file.parent.mkdir()
        file.write_bytes(content)
    with pytest.raises(StorageFailed, match="the catalogue cannot be read or written: "):
        Catalogue(f"sqlite:///{file}")


def test_a_file_that_may_only_be_read(tmp_path: Path) -> None:
    file = tmp_path / "c.sqlite3"
    Catalogue(f"sqlite:///{file}").close()
    # Asked of SQLite itself: to the superuser, permissions of files are no hindrance.
    catalogue = Catalogue(f"sqlite:///file:{file}?mode=ro&uri=true")
    assert catalogue.documents() == []
    with pytest.raises(StorageFailed, match="readonly"):
        catalogue.add(document())
    catalogue.close()
