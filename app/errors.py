"""Our errors as HTTP answers: one table, one body shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.answer import NoDocuments, NotReady
from app.conversation import ConversationBusy, ConversationFixed, ConversationFull
from app.services import UnusableCollection
from app.warmer import WarmError
from ingest.errors import EmptyFile, EncryptedFile, FileRefused, NoText, QueueFull, UnsupportedType, WorkerCrashed
from retrieval.errors import StorageFailed, UnknownConversation, UnknownDocument, UnknownPage
from serving.errors import EngineDied, EngineUnavailable, Overloaded, PromptTooLong, ServingError

log = structlog.get_logger(__name__)

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
    (UnusableCollection, 422, "invalid_request"),
    (ConversationFixed, 422, "invalid_request"),
    (UnsupportedType, 415, "unsupported_type"),
    (EmptyFile, 422, "empty_file"),
    (NoText, 422, "no_text"),
    (EncryptedFile, 422, "encrypted"),
    (FileRefused, 422, "damaged"),
    (UnknownDocument, 404, "unknown_document"),
    (UnknownPage, 404, "unknown_page"),
    (UnknownConversation, 404, "unknown_conversation"),
    (NoDocuments, 404, "no_documents"),
    (NotReady, 409, "not_ready"),
    (WarmError, 409, "not_warmed"),
    (ConversationBusy, 409, "conversation_busy"),
    (ConversationFull, 400, "conversation_full"),
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
    return _json(body, status, headers)


class LastResort:
    """ASGI middleware: an error that nobody has handled is answered and logged by its type alone.

    The web server would log its traceback, which may quote a document. An answer that has begun is cut off.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = False

        async def noting(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:  # noqa: BLE001 - nobody else will tell it
            log.error("request_broke", error=type(error).__name__)
            scope["app"].state.services.metrics.failed(INTERNAL)
            if not answered:
                await respond(error)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Answer every error of the app in our shape, and count it."""

    def handle(request: Request, error: Exception) -> JSONResponse:
        request.app.state.services.metrics.failed(describe(error)[1].type)
        return respond(error)

    def handle_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        # The offending value may be personal: only its place and the rule are told.
        faults = [f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors()]
        return _json(ErrorBody("invalid_request", "; ".join(faults)), 422)

    def handle_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        name = "not_found" if error.status_code == 404 else "http"
        return _json(ErrorBody(name, error.detail), error.status_code, error.headers)

    for kind in HANDLED:
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(RequestValidationError, handle_invalid)
    app.add_exception_handler(HTTPException, handle_http)


def _json(body: ErrorBody, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    # A message may name a key of the request, and JSON can spell half of a surrogate pair, which UTF-8 cannot.
    message = body.message.encode(errors="backslashreplace").decode()
    return JSONResponse({"error": {"type": body.type, "message": message}}, status, headers)
