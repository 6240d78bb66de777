"""Tells those who wait that something has changed."""

from __future__ import annotations

import asyncio


class Changes:
    """Changes of something that many may wait for, each from when they ask."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set at the next change; whoever takes it before looking misses nothing."""
        return self._event

    def notify(self) -> None:
        """Wake everyone who waits for a change, and give the next waiters a fresh event."""
        changed, self._event = self._event, asyncio.Event()
        changed.set()
