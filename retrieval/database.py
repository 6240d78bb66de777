"""The database that the catalogue's tables lie in: opening it, transactions, and its errors in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

from retrieval.errors import StorageFailed


class Base(DeclarativeBase):
    """Of all tables."""


class Database:
    """A SQLAlchemy URL and the sessions on it."""

    def __init__(self, url: str) -> None:
        """Open the database and make its tables.

        Raises:
            StorageFailed: it cannot be opened, or the URL names none.
        """
        with _translated():
            # Errors would quote the values of a statement, which are text of documents.
            self._engine = create_engine(url, hide_parameters=True)
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine, "connect", _set_sqlite_pragmas)
            self._sessions = sessionmaker(self._engine)
            Base.metadata.create_all(self._engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A session that is committed at the end, or rolled back as a whole.

        Raises:
            StorageFailed: the database cannot be read or written.
        """
        with _translated(), self._sessions.begin() as session:
            yield session


def _set_sqlite_pragmas(connection: object, _: object) -> None:
    cursor = connection.cursor()  # type: ignore[attr-defined]
    # Deleted text is overwritten, readers do not block the writer, and a crash loses nothing committed.
    for pragma in ("foreign_keys=ON", "secure_delete=ON", "journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    # A URL may name a database whose driver is not installed.
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        cause = getattr(error, "orig", None) or error
        raise StorageFailed(f"the catalogue cannot be read or written: {cause}") from error
