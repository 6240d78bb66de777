"""The catalogue: documents, their redacted pages, their chunks and their status, in SQL.

Blocking calls; the callers run them in threads. Only redacted text is ever given to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

from sqlalchemy import ForeignKey, Index, Select, String, Text, delete, func, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from retrieval.conversations import delete_about
from retrieval.database import Base, Database
from retrieval.errors import UnknownDocument, UnknownPage
from retrieval.passage import Chunk

Status = Literal[
    "queued", "extracting", "redacting", "chunking", "embedding", "storing", "ready", "partial", "failed", "cancelled"
]
READABLE: tuple[Status, ...] = ("ready", "partial")
_LOST: tuple[Status, ...] = ("failed", "cancelled")
FINAL: tuple[Status, ...] = (*READABLE, *_LOST)
STATUSES: tuple[Status, ...] = get_args(Status)
# SQLite takes no more than 32,766 values in a statement.
_VALUES_AT_ONCE = 10_000
_MOST_SCOPES = 1000


@dataclass(frozen=True, slots=True)
class Document:
    """A document as the catalogue knows it. `digest` is a keyed digest of the uploaded bytes."""

    id: str
    name: str
    collection: str
    media_type: str
    bytes: int
    digest: str
    created_at: datetime
    status: Status = "queued"
    reason: str | None = None
    pages: int = 0
    chunks: int = 0
    tokens: int | None = None
    entities: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class StoredPage:
    """One page of redacted text; `tokens` as the language model counts them."""

    document: str
    number: int
    label: str
    text: str
    tokens: int


class _DocumentRow(Base):
    __tablename__ = "documents"
    __table_args__ = (Index("documents_by_digest", "collection", "digest"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str]
    collection: Mapped[str] = mapped_column(String(200))
    media_type: Mapped[str] = mapped_column(String(40))
    bytes: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[str] = mapped_column(String(40))
    status: Mapped[str] = mapped_column(String(20))
    reason: Mapped[str | None]
    pages: Mapped[int] = mapped_column(default=0)
    chunks: Mapped[int] = mapped_column(default=0)
    tokens: Mapped[int | None]
    entities: Mapped[str] = mapped_column(default="{}")


class _PageRow(Base):
    __tablename__ = "pages"

    document: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str]
    text: Mapped[str]
    tokens: Mapped[int]


class _ChunkRow(Base):
    """The text of a chunk is a slice of its page, so it is not stored again."""

    __tablename__ = "chunks"

    document: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    page: Mapped[int]
    start: Mapped[int]
    end: Mapped[int]


class _ScopeRow(Base):
    """Documents that were read together, as a JSON list of their ids; `used` grows with each use.

    Of a document that is read in volumes, the id is followed by the number of one: `["d_3f9c", 3]`.
    """

    __tablename__ = "scopes"

    documents: Mapped[str] = mapped_column(Text, primary_key=True)
    used: Mapped[int]


class Catalogue:
    """Documents, pages and chunks behind a SQLAlchemy URL."""

    def __init__(self, url: str) -> None:
        """Open the database and make its tables.

        Raises:
            StorageFailed: it cannot be opened, or the URL names none.
        """
        self.database = Database(url)

    def close(self) -> None:
        """Close all connections."""
        self.database.close()

    def add(self, *documents: Document) -> None:
        """Enter new documents, all or none."""
        with self._transaction() as session:
            session.add_all(
                _DocumentRow(
                    id=document.id,
                    name=document.name,
                    collection=document.collection,
                    media_type=document.media_type,
                    bytes=document.bytes,
                    digest=document.digest,
                    created_at=document.created_at.isoformat(),
                    status=document.status,
                )
                for document in documents
            )

    def get(self, id: str) -> Document:
        """One document.

        Raises:
            UnknownDocument: there is none of this id.
        """
        with self._transaction() as session:
            return _document(_row(session, id))

    def documents(self, collection: str | None = None, statuses: Sequence[Status] = STATUSES) -> list[Document]:
        """Documents, newest first."""
        query = select(_DocumentRow).where(_DocumentRow.status.in_(statuses))
        if collection is not None:
            query = query.where(_DocumentRow.collection == collection)
        with self._transaction() as session:
            rows = session.scalars(query.order_by(_DocumentRow.created_at.desc(), _DocumentRow.id))
            return [_document(row) for row in rows]

    def find_same(self, collection: str, digest: str) -> Document | None:
        """The oldest document of the same bytes that is there or on its way, or None."""
        query = select(_DocumentRow).where(
            _DocumentRow.collection == collection,
            _DocumentRow.digest == digest,
            _DocumentRow.status.not_in(_LOST),
        )
        return self._first(query.order_by(_DocumentRow.created_at))

    def find_newest(self, collection: str, name: str) -> Document | None:
        """The newest document of a name that is there or on its way, or None."""
        query = select(_DocumentRow).where(
            _DocumentRow.collection == collection, _DocumentRow.name == name, _DocumentRow.status.not_in(_LOST)
        )
        return self._first(query.order_by(_DocumentRow.created_at.desc()))

    def set_status(self, id: str, status: Status, reason: str | None = None) -> None:
        """Move a document to another status."""
        with self._transaction() as session:
            session.execute(update(_DocumentRow).where(_DocumentRow.id == id).values(status=status, reason=reason))

    def store(self, id: str, pages: Sequence[StoredPage], chunks: Sequence[Chunk], entities: Mapping[str, int]) -> None:
        """Store everything a finished ingest produced, in one transaction.

        Raises:
            UnknownDocument: the document was deleted meanwhile.
        """
        with self._transaction() as session:
            row = _row(session, id)
            row.pages, row.chunks = len(pages), len(chunks)
            row.tokens = sum(page.tokens for page in pages)
            row.entities = json.dumps(dict(sorted(entities.items())))
            session.add_all(
                _PageRow(document=id, number=p.number, label=p.label, text=p.text, tokens=p.tokens) for p in pages
            )
            session.add_all(
                _ChunkRow(document=id, number=c.number, page=c.page, start=c.start, end=c.end) for c in chunks
            )

    def pages(self, id: str, first: int = 1, last: int | None = None) -> list[StoredPage]:
        """Pages of a document in order, all of them or those from `first` to `last`."""
        query = select(_PageRow).where(_PageRow.document == id, _PageRow.number >= first).order_by(_PageRow.number)
        with self._transaction() as session:
            rows = session.scalars(query if last is None else query.where(_PageRow.number <= last))
            return [_page(row) for row in rows]

    def page(self, id: str, number: int) -> StoredPage:
        """One page of a document.

        Raises:
            UnknownDocument: there is no such document.
            UnknownPage: it has no such page.
        """
        with self._transaction() as session:
            document = _row(session, id)
            row = session.get(_PageRow, (id, number))
            if row is None:
                raise UnknownPage(f"document {id!r} has {document.pages} pages, not a page {number}")
            return _page(row)

    def chunks(self, keys: Sequence[tuple[str, int]]) -> list[Chunk]:
        """The chunks named by (document, number), in the given order; those that are gone are left out."""
        wanted: dict[str, list[int]] = {}
        for id, number in keys:
            wanted.setdefault(id, []).append(number)
        found: dict[tuple[str, int], Chunk] = {}
        with self._transaction() as session:
            for id, numbers in _batches(wanted):
                query = (
                    select(_ChunkRow, _PageRow.text)
                    .join(_PageRow, (_PageRow.document == _ChunkRow.document) & (_PageRow.number == _ChunkRow.page))
                    .where(_ChunkRow.document == id, _ChunkRow.number.in_(numbers))
                )
                for row, text in session.execute(query):
                    chunk = Chunk(id, row.number, row.page, row.start, row.end, text[row.start : row.end])
                    found[id, row.number] = chunk
        return [found[key] for key in keys if key in found]

    def delete(self, id: str) -> None:
        """Remove a document with its pages and chunks, and the conversations about it.

        Raises:
            UnknownDocument: there is none of this id.
        """
        with self._transaction() as session:
            delete_about(session, id)
            session.delete(_row(session, id))
            session.execute(delete(_ScopeRow).where(_ScopeRow.documents.contains(json.dumps(id), autoescape=True)))

    def clear(self, id: str) -> None:
        """Remove what an unfinished ingest has stored, but keep the entry."""
        with self._transaction() as session:
            session.execute(delete(_ChunkRow).where(_ChunkRow.document == id))
            session.execute(delete(_PageRow).where(_PageRow.document == id))
            nothing = {"pages": 0, "chunks": 0, "tokens": None, "entities": "{}"}
            session.execute(update(_DocumentRow).where(_DocumentRow.id == id).values(nothing))

    def use_scope(self, documents: Sequence[str], *volumes: int) -> None:
        """Remember that these documents were just read together; of many such sets only the latest are kept.

        Args:
            volumes: of the one document, when not all of it was read; the last one was read last.
        """
        keys = [json.dumps([*documents, volume]) for volume in volumes] or [json.dumps(list(documents))]
        with self._transaction() as session:
            known = session.scalars(select(_DocumentRow.id).where(_DocumentRow.id.in_(documents))).all()
            # Deleted meanwhile: such a set is of no use, and nobody would remove it again.
            if len(known) < len(set(documents)):
                return
            last = session.scalar(select(func.max(_ScopeRow.used))) or 0
            for used, key in enumerate(keys, start=last + 1):
                session.merge(_ScopeRow(documents=key, used=used))
            session.execute(delete(_ScopeRow).where(_ScopeRow.used <= last + len(keys) - _MOST_SCOPES))

    def scopes(self) -> list[tuple[tuple[str, ...], int | None]]:
        """Documents that were read together, and the volume where it was one, the latest use first."""
        with self._transaction() as session:
            rows = session.scalars(select(_ScopeRow).order_by(_ScopeRow.used.desc()))
            return [_scope(json.loads(row.documents)) for row in rows]

    def count(self) -> int:
        """How many documents there are."""
        with self._transaction() as session:
            return session.scalar(select(func.count()).select_from(_DocumentRow)) or 0

    def _first(self, query: Select[_DocumentRow]) -> Document | None:
        with self._transaction() as session:
            row = session.scalars(query.limit(1)).first()
            return _document(row) if row is not None else None

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        with self.database.transaction() as session:
            yield session


def _batches(wanted: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Sequence[int]]]:
    for id, numbers in wanted.items():
        for start in range(0, len(numbers), _VALUES_AT_ONCE):
            yield id, numbers[start : start + _VALUES_AT_ONCE]


def _row(session: Session, id: str) -> _DocumentRow:
    row = session.get(_DocumentRow, id)
    if row is None:
        raise UnknownDocument(id)
    return row


def _document(row: _DocumentRow) -> Document:
    return Document(
        id=row.id,
        name=row.name,
        collection=row.collection,
        media_type=row.media_type,
        bytes=row.bytes,
        digest=row.digest,
        created_at=datetime.fromisoformat(row.created_at).astimezone(UTC),
        status=row.status,  # type: ignore[arg-type]
        reason=row.reason,
        pages=row.pages,
        chunks=row.chunks,
        tokens=row.tokens,
        entities=json.loads(row.entities),
    )


def _scope(key: list[str | int]) -> tuple[tuple[str, ...], int | None]:
    volume = key[-1] if isinstance(key[-1], int) else None
    return tuple(part for part in key if isinstance(part, str)), volume


def _page(row: _PageRow) -> StoredPage:
    return StoredPage(row.document, row.number, row.label, row.text, row.tokens)
