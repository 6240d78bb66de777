"""`/v1/documents`: upload, list, look at, watch, cancel, delete."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel

from app.services import Services
from app.stream import EventResponse, encode
from app.upload import read_uploads
from ingest.jobs import Accepted, Stage
from retrieval.catalogue import Document
from retrieval.errors import UnknownDocument

router = APIRouter(prefix="/v1/documents", tags=["documents"])

# The largest number that every database takes.
_MAX_PAGE = 2**31 - 1
_UPLOAD_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["files"],
                    "properties": {
                        "files": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        "collection": {"type": "string", "default": "default"},
                        "on_duplicate": {"enum": ["skip", "replace", "version"], "default": "skip"},
                    },
                }
            }
        },
    }
}


class AcceptedBody(BaseModel):
    """A file that was taken, or found to be there already."""

    id: str
    name: str
    duplicate: bool
    status_url: str


class UploadBody(BaseModel):
    documents: list[AcceptedBody]


class ProgressBody(BaseModel):
    """How far the running stage is."""

    stage: str
    done: int
    total: int
    unit: str


class WarmBody(BaseModel):
    """How much of a document the engine has read already, in tokens; `total` is null until it was counted."""

    state: str
    tokens: int
    total: int | None
    eta_s: float | None
    pinned: bool
    reason: str | None


class DocumentBody(BaseModel):
    """A document with its status and counts."""

    id: str
    name: str
    collection: str
    media_type: str
    bytes: int
    created_at: datetime
    status: str
    reason: str | None
    progress: ProgressBody | None
    pages: int
    chunks: int
    tokens: int | None
    entities: dict[str, int]
    warm: WarmBody


class DocumentsBody(BaseModel):
    documents: list[DocumentBody]


class PageBody(BaseModel):
    """The redacted text of one page."""

    document: str
    page: int
    label: str
    text: str
    tokens: int


@router.post("", status_code=202, openapi_extra=_UPLOAD_SCHEMA)
async def upload(request: Request) -> UploadBody:
    """Take files in. All are checked before any is stored; ingest goes on in the background."""
    services = _services(request)
    files = await read_uploads(request, services)
    taken = zip(await services.jobs.add_all(files), files, strict=True)
    return UploadBody(documents=[_accepted(accepted, file.name) for accepted, file in taken])


@router.get("")
async def list_documents(request: Request, collection: Annotated[str | None, Query()] = None) -> DocumentsBody:
    """Documents, newest first."""
    services = _services(request)
    if collection is not None:
        collection = await asyncio.to_thread(services.collection, collection)
    documents = await asyncio.to_thread(services.catalogue.documents, collection)
    return DocumentsBody(documents=[document_body(document, services) for document in documents])


@router.get("/{id}")
async def show(id: str, request: Request) -> DocumentBody:
    """One document."""
    services = _services(request)
    return document_body(await asyncio.to_thread(services.catalogue.get, id), services)


@router.get("/{id}/pages/{number}")
async def page(id: str, number: Annotated[int, Path(ge=1, le=_MAX_PAGE)], request: Request) -> PageBody:
    """One page, redacted."""
    found = await asyncio.to_thread(_services(request).catalogue.page, id, number)
    return PageBody(document=id, page=found.number, label=found.label, text=found.text, tokens=found.tokens)


@router.get("/{id}/events", response_class=Response)
async def events(id: str, request: Request) -> EventResponse:
    """The document as `status` events until its ingest has ended."""
    services = _services(request)
    await asyncio.to_thread(services.catalogue.get, id)
    return EventResponse(_statuses(id, services))


@router.post("/{id}/cancel")
async def cancel(id: str, request: Request) -> DocumentBody:
    """Stop a running ingest; a document that has ended stays as it is."""
    services = _services(request)
    await asyncio.to_thread(services.catalogue.get, id)
    await services.jobs.cancel(id)
    return document_body(await asyncio.to_thread(services.catalogue.get, id), services)


@router.delete("/{id}", status_code=204)
async def delete(id: str, request: Request) -> None:
    """Remove a document, its pages, chunks and vectors."""
    await _services(request).jobs.delete(id)


async def _statuses(id: str, services: Services) -> AsyncIterator[bytes]:
    # A document that is deleted meanwhile has no status any more; its stream just ends.
    with contextlib.suppress(UnknownDocument):
        async for document in services.jobs.watch(id):
            yield encode("status", document_body(document, services).model_dump(mode="json"))


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _accepted(accepted: Accepted, name: str) -> AcceptedBody:
    url = str(router.url_path_for("show", id=accepted.id))
    return AcceptedBody(id=accepted.id, name=name, duplicate=accepted.duplicate, status_url=url)


def document_body(document: Document, services: Services) -> DocumentBody:
    """A document as clients see it."""
    stage = services.jobs.stage(document.id)
    return DocumentBody(
        id=document.id,
        name=document.name,
        collection=document.collection,
        media_type=document.media_type,
        bytes=document.bytes,
        created_at=document.created_at,
        status=stage.stage if stage else document.status,
        reason=document.reason,
        progress=_progress(stage),
        pages=stage.total if stage and stage.unit == "pages" else document.pages,
        chunks=document.chunks,
        tokens=document.tokens,
        entities=dict(document.entities or {}),
        warm=WarmBody(**asdict(services.warmer.warmth_of(document.id))),
    )


def _progress(stage: Stage | None) -> ProgressBody | None:
    return (
        None if stage is None else ProgressBody(stage=stage.stage, done=stage.done, total=stage.total, unit=stage.unit)
    )
