"""`/health`, `/ready`, `/metrics` and the web page."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from app.services import Services

WEB = Path(__file__).parent / "web"
# The page uses nothing from elsewhere, and untrusted text can never become script.
_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"

router = APIRouter(tags=["service"])


@router.get("/health")
async def health() -> dict[str, str]:
    """200 as long as the process serves."""
    return {"service": "foreword"}


@router.get("/ready", responses={503: {"description": "with the reason"}})
async def ready(request: Request) -> JSONResponse:
    """200 when a question can be answered; `kv_disk` tells whether what is read early can be kept on disk."""
    services: Services = request.app.state.services
    state = services.engine.state
    if not state.ready:
        return JSONResponse({"ready": False, "phase": state.phase, "reason": state.reason or state.phase}, 503)
    disk = await asyncio.to_thread(services.engine.kv_disk)
    body: dict[str, Any] = {
        "ready": True,
        "model": services.engine.capabilities.model,
        "max_model_len": services.engine.limits.window,
        "kv_disk": None if disk is None else asdict(disk),
    }
    return JSONResponse(body)


@router.get("/metrics", response_class=Response)
def metrics(request: Request) -> Response:
    """Prometheus text: the service's own counters, then the engine's."""
    services: Services = request.app.state.services
    services.metrics.kept(services.engine.kv_disk())
    # vLLM registers its metrics in the process-wide registry.
    return Response(generate_latest(services.registry) + generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    return FileResponse(WEB / "index.html", headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})
