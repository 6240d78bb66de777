"""Runs the service: claims the port first, serves at once, loads the models meanwhile, stops everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from app import log
from app.settings import Settings, local_url
from serving.errors import ModelUnusable
from serving.model import PACKAGED, check_window, is_prepared, resolve_model

if TYPE_CHECKING:
    from app.services import Services

_GRACE_S = 3
# malloc.h
_M_TRIM_THRESHOLD, _M_ARENA_MAX = -1, -8
# Nothing leaves the machine: no usage statistics, no tracing, no look-ups.
_SILENCE = {
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}


class ListenError(Exception):
    """The address cannot be listened on; the message says what to do."""


@contextlib.asynccontextmanager
async def running(settings: Settings, *, with_engine: bool = True) -> AsyncIterator[tuple[str, Services]]:
    """A started service and its address, for as long as the context is open.

    Raises:
        ListenError: the address is taken or not ours.
        StorageFailed, ReindexNeeded: the data folder cannot be used.
        StartError: the engine cannot start as configured.
    """
    async with _serving(settings) as (url, services):
        await services.start(with_engine=with_engine)
        yield url, services


async def serve(settings: Settings, when_ready: Callable[[str, Services], None]) -> None:
    """Serve until cancelled.

    Args:
        when_ready: called with the address once a question can be answered.

    Raises:
        as `running`.
    """
    async with running(settings) as (url, services):
        when_ready(url, services)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _serving(settings: Settings) -> AsyncIterator[tuple[str, Services]]:
    """Port, services and web server; the services are not started, but always stopped."""
    silence(settings)
    _bound_heap()
    asyncio.get_running_loop().set_exception_handler(log.lost_error)
    # Imported here because they take seconds, and after silence() because some read the environment at import.
    import uvicorn

    from app.main import create_app
    from app.services import build_services

    listener = _listen(settings.host, settings.port)
    try:
        services = build_services(settings)
        config = uvicorn.Config(
            create_app(services),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        server = uvicorn.Server(config)
        # Signals are ours: uvicorn would end the process by them before the engine has been stopped.
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        ended = asyncio.create_task(server.serve(sockets=[listener]), name="web server")
        try:
            await asyncio.to_thread(_check_model, settings)
            host, port = listener.getsockname()[:2]
            yield local_url(host, port), services
        finally:
            server.should_exit = True
            await asyncio.wait({ended})
            await services.stop()
    finally:
        listener.close()


def _bound_heap() -> None:
    """Keep glibc from hoarding what ingest has freed: few arenas, and free memory goes back to the system."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_ARENA_MAX, 2)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 * 1024)
    except (OSError, AttributeError):
        return  # another C library; it has its own habits


def silence(settings: Settings) -> None:
    """Switch off everything in our parts that would call home; what the user has set stands."""
    for name, value in _SILENCE.items():
        os.environ.setdefault(name, value)
    if not any(_may_be_on_hub(model) for model in (settings.model, settings.embedding_model)):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _may_be_on_hub(model: str) -> bool:
    return model.count("/") == 1 and not Path(model).expanduser().is_dir()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(
                f"port {port} of {host} is in use; stop the other service or choose another port with --port"
            ) from error
        raise ListenError(f"cannot listen on {host}:{port} ({error.strerror}); set --host and --port") from error
    return listener


def _check_model(settings: Settings) -> None:
    """Find the model before anything heavy is loaded, so that a wrong setting is told at once.

    Raises:
        ModelUnusable: there is no such model, it is incomplete, or the packaged one cannot be prepared.
    """
    if settings.engine != "vllm":
        return
    config = settings.engine_config
    if settings.model == PACKAGED and not is_prepared(config.models_dir):
        # In a process of its own, so that this one never holds the full weights; -P: this `app`, not the working
        # directory's.
        command = [sys.executable, "-P", "-m", "app.cli", "prepare"]
        ended = subprocess.run(command, env=os.environ | {"FOREWORD_DATA_DIR": str(settings.folder)}, check=False)
        if ended.returncode:
            raise ModelUnusable(
                f"the default model could not be prepared (its process ended with {ended.returncode}); mend what it "
                "told above, or set FOREWORD_MODEL to another model"
            )
    check_window(resolve_model(settings.model, config.models_dir), settings.max_model_len)
