"""The FastAPI application as a function of its parts."""

from __future__ import annotations

from importlib import metadata

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from app import ask, conversations, documents, errors, health, warm
from app.limits import Limits
from app.services import Services


def create_app(services: Services) -> FastAPI:
    """Routes, errors and limits around services that somebody else starts and stops."""
    app = FastAPI(
        title="Foreword",
        version=metadata.version("foreword"),
        summary="Questions about long documents, answered with citations.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    app.include_router(documents.router)
    app.include_router(warm.router)
    app.include_router(ask.router)
    app.include_router(conversations.router)
    app.include_router(health.router)
    app.mount("/web", StaticFiles(directory=health.WEB), name="web")
    errors.install(app)
    app.add_middleware(Limits, max_bytes=services.settings.max_upload_bytes)
    app.add_middleware(errors.LastResort)
    return app
