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
from app.errors import INTERNAL, describe
from app.services import Services
from app.stream import EventResponse, encode, until_client_leaves

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


class AskBody(BaseModel):
    """A question about documents."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"question": "Where is the key?"}]})

    question: Question
    documents: list[DocumentId] = Field(
        default_factory=list, max_length=1000, description="ids; empty means the collection"
    )
    collection: str = "default"
    mode: Mode = "auto"
    acceleration: Literal["auto", "off"] = "auto"
    stream: bool = True
    max_tokens: int | None = Field(
        None, ge=1, le=32_768, description="default 512, in a small window at most a quarter of it"
    )

    def to_ask(self) -> Ask:
        return Ask(
            question=self.question,
            documents=tuple(self.documents),
            collection=self.collection,
            mode=self.mode,
            acceleration=self.acceleration,
            max_tokens=self.max_tokens,
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
        return EventResponse(_events(prepared, services))
    collected = await until_client_leaves(request.receive, asyncio.create_task(_collect(prepared, services)))
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
