"""One way to log: structured lines on standard error, with ids and counts, never with text of documents."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import structlog

log = structlog.get_logger(__name__)


def configure(level: int = logging.INFO) -> None:
    """Set up logging for the whole process."""
    human = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer() if human else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def lost_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An error that nobody waits for, by its type; asyncio's own report has a traceback, which may quote a document."""
    error = context.get("exception")
    log.error("error_lost", error=type(error).__name__ if error else context["message"])
