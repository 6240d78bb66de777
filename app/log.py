"""One way to log: structured lines on standard error, with ids and counts, never with text of documents."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import sys
from typing import Any, TextIO, cast

import structlog

log = structlog.get_logger(__name__)


def configure(level: int = logging.INFO) -> None:
    """Set up logging for the whole process."""
    lines = _Lossy(sys.stderr)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer() if lines.isatty() else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", lines)),
    )


class _Lossy(io.TextIOBase):
    """Loses what it cannot write: whoever read the log may be gone, and no request may fail because of that."""

    def __init__(self, stream: TextIO | None) -> None:
        """Args:
        stream: None in a process that was started without standard error.
        """
        self._stream = stream

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        if self._stream is not None:
            # What is closed raises ValueError.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()
        return len(text)


def lost_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An error that nobody waits for, by its type; asyncio's own report has a traceback, which may quote a document."""
    error = context.get("exception")
    log.error("error_lost", error=type(error).__name__ if error else context["message"])
