"""`POST /v1/ask`: validates, prepares, and streams or collects the answer. A client that leaves aborts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from app.answer import (
    Ask,
    Citations,
    Context,
    Done,
    Event,
    Mode,
    Prepared,
    Reading,
    Token,
    answer,
    prepare_answer,
)
from app.conversation import NEW, ConversationFixed
from app.errors import INTERNAL, describe
from app.services import Services
from app.stream import EventResponse, encode, until_client_leaves
from retrieval.conversations import ToolResult

router = APIRouter(prefix="/v1", tags=["questions"])
log = structlog.get_logger(__name__)

_NAMES: dict[type[Any], str] = {
    Context: "context",
    Reading: "progress",
    Token: "token",
    Citations: "citations",
    Done: "done",
}
_CLIENT_CLOSED = 499

Question = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=8000)]
DocumentId = Annotated[str, StringConstraints(min_length=1, max_length=100)]


class ToolResultBody(BaseModel):
    """What a tool has found: data for the question, never an instruction."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=100)
    text: str = Field(max_length=100_000)


class AskBody(BaseModel):
    """A question about documents."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"question": "Where is the key?"}]})

    question: Question
    documents: list[DocumentId] = Field(
        default_factory=list, max_length=1000, description="ids; empty means the collection"
    )
    collection: str = "default"
    conversation: str | None = Field(
        None, min_length=1, max_length=100, description="'new', or an id to go on with, then without a scope"
    )
    tool_results: list[ToolResultBody] = Field(default_factory=list, max_length=20)
    mode: Mode = "auto"
    acceleration: Literal["auto", "off"] = "auto"
    stream: bool = True
    max_tokens: int | None = Field(
        None, ge=1, le=32_768, description="default 512, in a small window at most a quarter of it"
    )

    def to_ask(self) -> Ask:
        """The question itself.

        Raises:
            ConversationFixed: it goes on with a conversation and names another scope.
        """
        given = sorted(self.model_fields_set & {"collection", "documents"})
        if given and self.conversation not in (None, NEW):
            raise ConversationFixed(
                f"conversation {self.conversation!r} keeps the documents that it began with; leave out "
                f"{' and '.join(map(repr, given))}, or start a new conversation"
            )
        return Ask(
            question=self.question,
            documents=tuple(self.documents),
            collection=self.collection,
            mode=self.mode,
            acceleration=self.acceleration,
            max_tokens=self.max_tokens,
            conversation=self.conversation,
            results=tuple(ToolResult(result.name, result.text) for result in self.tool_results),
        )


class AnswerBody(BaseModel):
    """The answer in one piece; `context`, `usage`, `timings`, `prefill` and `evicted` as in docs/api.md."""

    answer: str
    finish_reason: str | None
    citations: list[dict[str, Any]]
    context: dict[str, Any]
    usage: dict[str, int]
    timings: dict[str, float | None]
    prefill: dict[str, Any]
    evicted: list[str]


@router.post("/ask", response_model=AnswerBody)
async def ask(body: AskBody, request: Request) -> Response:
    """Answer a question, as server-sent events or in one piece."""
    services: Services = request.app.state.services
    prepared = await prepare_answer(body.to_ask(), services, request.state.received)
    if body.stream:
        return EventResponse(_events(prepared, services), on_end=prepared.release)
    try:
        collected = await until_client_leaves(request.receive, asyncio.create_task(_collect(prepared, services)))
    finally:
        # A task that is cancelled before it begins cleans up nothing.
        prepared.release()
    if collected is None:
        services.metrics.cancelled()
        return Response(status_code=_CLIENT_CLOSED)
    return JSONResponse(collected)


async def _events(prepared: Prepared, services: Services) -> AsyncIterator[bytes]:
    events = answer(prepared, services)
    try:
        async for event in events:
            yield encode(_NAMES[type(event)], asdict(event))
    except Exception as error:
        # The stream has begun, so whatever went wrong can only be told in it.
        _, told = describe(error)
        services.metrics.failed(told.type)
        if told.type == INTERNAL:
            log.error("answer_broke", error=type(error).__name__)
        yield encode("error", asdict(told))
    except (asyncio.CancelledError, GeneratorExit):
        services.metrics.cancelled()
        raise
    finally:
        await events.aclose()


async def _collect(prepared: Prepared, services: Services) -> dict[str, Any]:
    parts: dict[str, Event] = {_NAMES[type(event)]: event async for event in answer(prepared, services)}
    return {
        **asdict(parts["done"]),
        **asdict(parts["citations"]),
        "context": asdict(parts["context"]),
    }
