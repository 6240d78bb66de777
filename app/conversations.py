"""`/v1/conversations`: list, look at, delete. They begin and go on with `POST /v1/ask`."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from app.services import Services

router = APIRouter(prefix="/v1/conversations", tags=["conversations"])


class SummaryBody(BaseModel):
    """A conversation by its first question; `turns` is how many there are."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    documents: list[str]
    mode: str
    created_at: datetime
    question: str
    turns: int


class ConversationsBody(BaseModel):
    conversations: list[SummaryBody]


class FoundBody(BaseModel):
    """What a tool had found before a question, redacted."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    text: str


class TurnBody(BaseModel):
    """A question, redacted, and its answer; `citations` as in docs/api.md."""

    model_config = ConfigDict(from_attributes=True)

    number: int
    question: str
    tool_results: list[FoundBody] = Field(validation_alias="results")
    answer: str
    created_at: datetime
    citations: list[dict[str, Any]]


class ConversationBody(BaseModel):
    """A conversation with all its turns."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    documents: list[str]
    mode: str
    created_at: datetime
    turns: list[TurnBody]


@router.get("")
async def list_conversations(request: Request) -> ConversationsBody:
    """Conversations, newest first."""
    found = await asyncio.to_thread(_services(request).conversations.all)
    return ConversationsBody(conversations=[SummaryBody.model_validate(summary) for summary in found])


@router.get("/{id}")
async def show(id: str, request: Request) -> ConversationBody:
    """One conversation with its questions and answers."""
    return ConversationBody.model_validate(await asyncio.to_thread(_services(request).conversations.get, id))


@router.delete("/{id}", status_code=204)
async def delete(id: str, request: Request) -> None:
    """Remove a conversation with its questions and answers."""
    await asyncio.to_thread(_services(request).conversations.delete, id)


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services
