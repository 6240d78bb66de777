"""Our errors as HTTP answers: one table, one body shape."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.answer import NoDocuments, NotReady
from ingest.errors import EmptyFile, EncryptedFile, FileRefused, NoText, QueueFull, UnsupportedType, WorkerCrashed
from retrieval.errors import StorageFailed, UnknownDocument, UnknownPage
from serving.errors import EngineDied, EngineUnavailable, Overloaded, PromptTooLong, ServingError

_RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """What a client reads of an error."""

    type: str
    message: str


class BodyTooLarge(Exception):
    """The request body is over the limit."""


# The first class that an error is an instance of decides.
_TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (BodyTooLarge, 413, "body_too_large"),
    (UnsupportedType, 415, "unsupported_type"),
    (EmptyFile, 422, "empty_file"),
    (NoText, 422, "no_text"),
    (EncryptedFile, 422, "encrypted"),
    (FileRefused, 422, "damaged"),
    (UnknownDocument, 404, "unknown_document"),
    (UnknownPage, 404, "unknown_page"),
    (NoDocuments, 404, "no_documents"),
    (NotReady, 409, "not_ready"),
    (PromptTooLong, 400, "prompt_too_long"),
    (Overloaded, 429, "overloaded"),
    (QueueFull, 429, "overloaded"),
    (EngineUnavailable, 503, "engine_unavailable"),
    (EngineDied, 503, "engine_died"),
    (ServingError, 500, "engine_failed"),
    (WorkerCrashed, 422, "damaged"),
    (StorageFailed, 507, "storage_failed"),
)
HANDLED = tuple(kind for kind, _, _ in _TABLE)
INTERNAL = "internal"


def describe(error: Exception) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error; one that is not in the table is our own mistake and tells nothing."""
    for kind, status, name in _TABLE:
        if isinstance(error, kind):
            return status, ErrorBody(name, str(error))
    return 500, ErrorBody(INTERNAL, f"an internal error ended the request ({error.__class__.__name__})")


def respond(error: Exception) -> JSONResponse:
    """The error as a response."""
    status, body = describe(error)
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status in (429, 503) else {}
    return JSONResponse({"error": {"type": body.type, "message": body.message}}, status, headers)


def install(app: FastAPI) -> None:
    """Answer every error of the app in our shape, and count it."""

    def handle(request: Request, error: Exception) -> JSONResponse:
        request.app.state.services.metrics.failed(describe(error)[1].type)
        return respond(error)

    def handle_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        # The offending value may be personal: only its place and the rule are told.
        faults = [f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors()]
        body = {"error": {"type": "invalid_request", "message": "; ".join(faults)}}
        return JSONResponse(body, 422)

    def handle_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = {"error": {"type": "not_found" if error.status_code == 404 else "http", "message": error.detail}}
        return JSONResponse(body, error.status_code, error.headers)

    for kind in (*HANDLED, Exception):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(RequestValidationError, handle_invalid)
    app.add_exception_handler(HTTPException, handle_http)
