"""What clients say about reading early: warm a document, pin it, let it go, or have some of them before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.answer import documents_of
from app.documents import DocumentBody, document_body
from app.scope import Scope, scopes_of
from app.services import Services
from app.stream import EventResponse, encode
from app.warmer import WarmError, Warmth
from retrieval.catalogue import Document

router = APIRouter(prefix="/v1", tags=["warm documents"])

_TOO_LONG = "together they are longer than the model's window, so passages of them are searched for each question"


@router.post("/documents/{id}/warm", status_code=202)
async def warm(id: str, request: Request, pin: Annotated[bool, Query()] = False) -> DocumentBody:
    """Read a document before anybody asks about it; with `pin` it then stays, whatever else is read."""
    services: Services = request.app.state.services
    found = await asyncio.to_thread(documents_of, [id], "", services)
    scopes = await _scopes(found, services)
    if not scopes:
        raise WarmError(
            f"document {id!r} cannot be warmed: the model's window of {services.engine.limits.window:,} tokens is too "
            "small for volumes of it; raise FOREWORD_MAX_MODEL_LEN"
        )
    await services.warmer.warm(*scopes, pin=pin)
    return document_body(found[0], services)


@router.delete("/documents/{id}/warm")
async def release(id: str, request: Request) -> DocumentBody:
    """Stop reading a document early, and release its pin."""
    services: Services = request.app.state.services
    document = await asyncio.to_thread(services.catalogue.get, id)
    await services.warmer.release(*await _scopes([document], services))
    return document_body(document, services)


@router.get("/intent", response_class=Response)
async def intent(
    request: Request,
    documents: Annotated[list[str] | None, Query(max_length=1000)] = None,
    collection: Annotated[str, Query()] = "default",
) -> EventResponse:
    """Somebody is about to ask: what they would ask about is read first, for as long as they keep this stream open."""
    services: Services = request.app.state.services
    found = await asyncio.to_thread(documents_of, documents or [], collection, services)
    return EventResponse(_warmth(await _scopes(found, services), services))


async def _scopes(documents: list[Document], services: Services) -> list[Scope]:
    return await asyncio.to_thread(scopes_of, documents, services.catalogue, services.engine)


async def _warmth(scopes: list[Scope], services: Services) -> AsyncIterator[bytes]:
    if not scopes:
        yield encode("warm", asdict(Warmth("cold", reason=_TOO_LONG)))
        return
    last: Warmth | None = None
    with services.warmer.watched(*scopes):
        while True:
            if (now := services.warmer.warmth(*scopes)) != last:
                yield encode("warm", asdict(now))
                last = now
            await services.warmer.changes()
