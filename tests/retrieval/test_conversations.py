"""Conversations on real SQLite: what goes in comes out, and nothing outlives what it quotes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from retrieval.catalogue import Catalogue, Document
from retrieval.conversations import Conversation, Conversations, ToolResult, Turn
from retrieval.errors import StorageFailed, UnknownConversation
from retrieval.passage import Chunk, Section

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECTION = Section("b", 3, 10, 26, "The mast is red.", 0.5, 6)
TALK = Conversation("conv-1", ("b", "a"), "retrieve", NOON)
FIRST = Turn(1, "Which colour?", "Red \x00 红 🛶", NOON, (SECTION,), (ToolResult("t", "x"),), ({"page": 3},))


@pytest.fixture
def conversations(catalogue: Catalogue) -> Conversations:
    for id in ("a", "b"):
        catalogue.add(Document(id, "a.txt", "default", "text/plain", 7, f"digest of {id}", NOON))
    return Conversations(catalogue.database)


def test_what_was_said_comes_back_in_order(conversations: Conversations) -> None:
    conversations.add(TALK, FIRST)
    second = Turn(2, "Since when?", "", NOON)
    conversations.add(replace(TALK, exact=True), second)
    assert conversations.get("conv-1") == replace(TALK, exact=True, turns=(FIRST, second))
    conversations.add(replace(TALK, id="conv-0", documents=("a",), created_at=NOON.replace(hour=13)), FIRST)
    summaries = [(s.id, s.documents, s.question, s.turns) for s in conversations.all()]
    assert summaries == [("conv-0", ("a",), "Which colour?", 1), ("conv-1", ("b", "a"), "Which colour?", 2)]


@pytest.mark.parametrize("document", ["a", "b"])
def test_a_document_takes_its_conversations_with_it(
    catalogue: Catalogue, conversations: Conversations, document: str
) -> None:
    conversations.add(TALK, FIRST)
    conversations.add(replace(TALK, id="conv-0", documents=("a",)), FIRST)
    catalogue.delete(document)
    assert [s.id for s in conversations.all()] == ([] if document == "a" else ["conv-0"])
    with pytest.raises(UnknownConversation, match="'conv-1'"):
        conversations.get("conv-1")


def test_nothing_is_added_to_what_is_not_there(catalogue: Catalogue, conversations: Conversations) -> None:
    with pytest.raises(UnknownConversation):
        conversations.add(TALK, replace(FIRST, number=2))
    with pytest.raises(UnknownConversation):
        conversations.delete("conv-1")
    catalogue.delete("a")
    with pytest.raises(UnknownConversation):
        conversations.add(TALK, FIRST)
    assert conversations.all() == []


def test_a_deleted_conversation_may_not_come_back(conversations: Conversations) -> None:
    conversations.add(TALK, FIRST)
    conversations.delete("conv-1")
    with pytest.raises(UnknownConversation):
        conversations.add(TALK, replace(FIRST, number=2))


def test_a_database_that_is_broken_is_no_missing_conversation(
    catalogue: Catalogue, conversations: Conversations
) -> None:
    with catalogue.database.transaction() as session:
        session.connection().exec_driver_sql("DROP TABLE turns")
    with pytest.raises(StorageFailed):
        conversations.add(TALK, FIRST)
    with pytest.raises(StorageFailed):
        conversations.all()


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        pytest.param({}, True, id="the same"),
        pytest.param({"start": 12, "end": 20}, True, id="inside"),
        pytest.param({"start": 9}, False, id="before"),
        pytest.param({"end": 27}, False, id="after"),
        pytest.param({"page": 4}, False, id="another page"),
        pytest.param({"document": "a"}, False, id="another document"),
    ],
)
def test_what_a_section_holds(changes: dict[str, int], held: bool) -> None:
    chunk = Chunk("b", 0, 3, 10, 26, "The mast is red.")
    assert SECTION.holds(replace(chunk, **changes)) is held  # type: ignore[arg-type]
