"""Conversations: questions with their answers about fixed documents, in SQL. Turns are added, never changed.

Blocking calls; the callers run them in threads. Only redacted text is ever given to them. What is kept quotes
documents, so a conversation ends with the first of its documents that is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import ForeignKey, String, Text, delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, Session, mapped_column

from retrieval.database import Base, Database
from retrieval.errors import StorageFailed, UnknownConversation
from retrieval.passage import Section

ReadAs = Literal["whole", "volume", "retrieve"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool has found, given to the model as data."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer; `sections` and `results` were put before the question, `citations` are plain JSON."""

    number: int
    question: str
    answer: str
    created_at: datetime
    sections: tuple[Section, ...] = ()
    results: tuple[ToolResult, ...] = ()
    citations: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """`documents` by id in the order of the prompt; `exact` once a turn was read exactly from the common cache.

    `volume` is the document and the number of the volume that the conversation began with, in mode `volume`.
    """

    id: str
    documents: tuple[str, ...]
    mode: ReadAs
    created_at: datetime
    exact: bool = False
    turns: tuple[Turn, ...] = ()
    volume: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """A conversation in a list: its first question and how many turns it has."""

    id: str
    documents: tuple[str, ...]
    mode: ReadAs
    created_at: datetime
    question: str
    turns: int


class _ConversationRow(Base):
    __tablename__ = "conversations"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    mode: Mapped[str] = mapped_column(String(20))
    created_at: Mapped[str] = mapped_column(String(40))
    exact: Mapped[bool]
    volume_of: Mapped[str | None] = mapped_column(String(40))
    volume: Mapped[int | None]


class _AboutRow(Base):
    """A document of a conversation. There is no row for a document that is not there, so none can be stored late."""

    __tablename__ = "conversation_documents"

    conversation: Mapped[str] = mapped_column(ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True)
    document: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), primary_key=True, index=True)
    place: Mapped[int]


class _TurnRow(Base):
    """`sections`, `results` and `citations` are JSON lists."""

    __tablename__ = "turns"

    conversation: Mapped[str] = mapped_column(ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    question: Mapped[str] = mapped_column(Text)
    answer: Mapped[str] = mapped_column(Text)
    created_at: Mapped[str] = mapped_column(String(40))
    sections: Mapped[str] = mapped_column(Text)
    results: Mapped[str] = mapped_column(Text)
    citations: Mapped[str] = mapped_column(Text)


class Conversations:
    """The conversations of a database; one that is there has at least one turn."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, conversation: Conversation, turn: Turn) -> None:
        """Store a finished turn; the first one also stores its conversation.

        Raises:
            UnknownConversation: it was deleted meanwhile, or a document that it is about.
        """
        try:
            with self._database.transaction() as session:
                if turn.number == 1:
                    _begin(session, conversation)
                else:
                    change = update(_ConversationRow).where(_ConversationRow.id == conversation.id)
                    session.execute(change.values(exact=conversation.exact))
                session.add(_turn_row(conversation.id, turn))
        except StorageFailed as error:
            if isinstance(error.__cause__, IntegrityError):
                raise UnknownConversation(conversation.id) from error
            raise

    def get(self, id: str) -> Conversation:
        """One conversation with all its turns.

        Raises:
            UnknownConversation: there is none of this id.
        """
        with self._database.transaction() as session:
            row, documents = session.get(_ConversationRow, id), _documents(session, id)
            # It may be deleted between the two statements.
            if row is None or not documents:
                raise UnknownConversation(id)
            turns = session.scalars(select(_TurnRow).where(_TurnRow.conversation == id).order_by(_TurnRow.number))
            return Conversation(
                id=row.id,
                documents=documents[id],
                mode=row.mode,  # type: ignore[arg-type]
                created_at=_time(row.created_at),
                exact=row.exact,
                turns=tuple(_turn(turn) for turn in turns),
                volume=None if row.volume_of is None or row.volume is None else (row.volume_of, row.volume),
            )

    def all(self) -> list[Summary]:
        """All conversations, newest first."""
        first = select(_TurnRow.conversation, _TurnRow.question).where(_TurnRow.number == 1).subquery()
        turns = select(_TurnRow.conversation, func.count().label("turns")).group_by(_TurnRow.conversation).subquery()
        query = (
            select(_ConversationRow, first.c.question, turns.c.turns)
            .join(first, first.c.conversation == _ConversationRow.id)
            .join(turns, turns.c.conversation == _ConversationRow.id)
            .order_by(_ConversationRow.created_at.desc(), _ConversationRow.id)
        )
        with self._database.transaction() as session:
            documents = _documents(session)
            return [
                Summary(row.id, documents[row.id], row.mode, _time(row.created_at), question, number)
                for row, question, number in session.execute(query)
                if row.id in documents
            ]

    def delete(self, id: str) -> None:
        """Remove a conversation with its turns.

        Raises:
            UnknownConversation: there is none of this id.
        """
        with self._database.transaction() as session:
            row = session.get(_ConversationRow, id)
            if row is None:
                raise UnknownConversation(id)
            session.delete(row)


def delete_about(session: Session, document: str) -> None:
    """Remove every conversation about a document, in the transaction that removes the document."""
    about = select(_AboutRow.conversation).where(_AboutRow.document == document)
    session.execute(delete(_ConversationRow).where(_ConversationRow.id.in_(about)))


def _begin(session: Session, conversation: Conversation) -> None:
    volume_of, volume = conversation.volume or (None, None)
    session.add(
        _ConversationRow(
            id=conversation.id,
            mode=conversation.mode,
            created_at=conversation.created_at.isoformat(),
            exact=conversation.exact,
            volume_of=volume_of,
            volume=volume,
        )
    )
    # No relationship tells the session what has to be there first.
    session.flush()
    session.add_all(
        _AboutRow(conversation=conversation.id, document=document, place=place)
        for place, document in enumerate(conversation.documents)
    )


def _turn_row(conversation: str, turn: Turn) -> _TurnRow:
    return _TurnRow(
        conversation=conversation,
        number=turn.number,
        question=turn.question,
        answer=turn.answer,
        created_at=turn.created_at.isoformat(),
        sections=json.dumps([asdict(section) for section in turn.sections]),
        results=json.dumps([asdict(result) for result in turn.results]),
        citations=json.dumps(list(turn.citations)),
    )


def _turn(row: _TurnRow) -> Turn:
    return Turn(
        number=row.number,
        question=row.question,
        answer=row.answer,
        created_at=_time(row.created_at),
        sections=tuple(Section(**section) for section in json.loads(row.sections)),
        results=tuple(ToolResult(**result) for result in json.loads(row.results)),
        citations=tuple(json.loads(row.citations)),
    )


def _documents(session: Session, id: str | None = None) -> dict[str, tuple[str, ...]]:
    """The documents of one conversation, or of all."""
    query = select(_AboutRow).order_by(_AboutRow.place)
    found: dict[str, list[str]] = {}
    for row in session.scalars(query if id is None else query.where(_AboutRow.conversation == id)):
        found.setdefault(row.conversation, []).append(row.document)
    return {conversation: tuple(documents) for conversation, documents in found.items()}


def _time(stored: str) -> datetime:
    return datetime.fromisoformat(stored).astimezone(UTC)
