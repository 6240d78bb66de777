"""Conversations as the path of a question needs them: what was said before as messages, and one question at a time."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from app.prompt import Excerpt, Source, build_messages
from retrieval.catalogue import Document
from retrieval.conversations import Turn
from retrieval.passage import Section
from serving.engine import Message
from serving.errors import PromptTooLong

# In place of an id: begin a conversation.
NEW = "new"


class ConversationFixed(Exception):
    """A conversation keeps the documents and the mode that it began with; the message says what to leave out."""


class ConversationBusy(Exception):
    """Another question of the conversation is being answered."""

    def __init__(self, id: str) -> None:
        super().__init__(f"conversation {id!r} is answering another question; wait for its end, then ask again")


class ConversationFull(Exception):
    """The conversation, the question and its answer do not fit the model's window together."""

    def __init__(self, id: str, error: PromptTooLong) -> None:
        super().__init__(
            f"conversation {id!r} has {error.prompt_tokens:,} tokens with this question and the answer may have "
            f"{error.max_tokens:,}, but the model's window is {error.window:,} tokens; start a new conversation, or "
            "allow a shorter answer"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """The right to add the next turn to a conversation."""

    id: str
    _holders: dict[str, Claim]

    def release(self) -> None:
        """Let another question in; only the first call counts."""
        if self._holders.get(self.id) is self:
            del self._holders[self.id]


class Claims:
    """The conversations in which a question is being answered. They end with the process."""

    def __init__(self) -> None:
        self._holders: dict[str, Claim] = {}

    def take(self, id: str) -> Claim:
        """Claim a conversation, or one that is `NEW`.

        Raises:
            ConversationBusy: somebody else has it.
        """
        id = f"conv-{uuid.uuid4().hex}" if id == NEW else id
        if id in self._holders:
            raise ConversationBusy(id)
        return self._holders.setdefault(id, Claim(id, self._holders))


@dataclass(frozen=True, slots=True)
class Earlier:
    """What was said before a question, up to the last answer, and how many sources it showed."""

    messages: tuple[Message, ...] = ()
    sources: int = 0


def earlier_messages(turns: Sequence[Turn], documents: Sequence[Document], whole: Sequence[Source]) -> Earlier:
    """The turns as they went into their prompts, word for word, so that the next prompt begins with the last. Pure.

    Args:
        documents: of the conversation, in order.
        whole: the documents, when they are read whole; then they come before the first question.
    """
    earlier = Earlier()
    for turn in turns:
        sources = [*(() if earlier.messages else whole), *section_sources(documents, turn.sections)]
        messages = build_messages(
            sources,
            turn.question,
            results=turn.results,
            earlier=earlier.messages,
            number=earlier.sources + 1,
        )
        earlier = Earlier((*messages, Message("assistant", turn.answer)), earlier.sources + len(sources))
    return earlier


def section_sources(documents: Sequence[Document], sections: Sequence[Section]) -> list[Source]:
    """Sections as they go into the prompt, under the documents that have any."""
    sources = []
    for document in documents:
        excerpts = tuple(Excerpt(s.page, s.text) for s in sections if s.document == document.id)
        if excerpts:
            sources.append(Source(document.name, excerpts))
    return sources
