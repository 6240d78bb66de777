"""The service's side: switches the workers' backend on, sends what a request asks for, and reads what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serving.accel import channel, plugin
from serving.engine import Prefill, Request, exact_path


class Client:
    """Of one engine. Make it before the workers start, whose environment must have `environment` in it.

    Nothing is claimed that no worker has reported: until one says that the backend is in use, `selector` is None.
    """

    def __init__(self) -> None:
        self._inbox = channel.Inbox()
        self._selector: str | None = None
        self.environment: Mapping[str, str] = {plugin.VARIABLE: "on", channel.VARIABLE: str(self._inbox.path)}

    @property
    def selector(self) -> str | None:
        """The workers' default selector in full, or None while no worker has reported in."""
        if self._selector is None and (hello := self._inbox.take(plugin.HELLO)):
            self._selector = str(hello["selector"])
        return self._selector

    def extra_args(self, request: Request) -> dict[str, Any]:
        """What goes to the workers with a request."""
        if request.prefill == "exact":
            return {channel.PREFILL: "exact"}
        given = {
            channel.PREFILL: "sparse",
            channel.TRACE: request.id,
            channel.SELECTOR: request.selector,
            channel.DENSE_FROM: request.dense_from,
        }
        return {name: value for name, value in given.items() if value is not None}

    def prefill(self, request: Request, cached_tokens: int | None) -> Prefill:
        """How a prompt was read, once its first token is here."""
        exact = read_exactly(request, cached_tokens)
        if request.prefill == "exact":
            return exact
        if self.selector is None:
            return replace(exact, fallback_reason="no acceleration backend")
        report = self._inbox.take(request.id)
        if report is None:
            return replace(exact, path="unknown", density=None)
        kept, total = int(report["kept_pages"]), int(report["total_pages"])
        return replace(
            exact,
            path="sparse" if report["path"] == "sparse" else exact.path,
            density=kept / total if total else 1.0,
            kept_pages=kept,
            total_pages=total,
            selector_s=float(report["selector_s"]),
            # What comes from the cache leaves little to choose from, and that is no failure.
            fallback_reason=None if exact.path == "warm" else report["fallback_reason"],
        )

    def close(self) -> None:
        """Stop listening."""
        self._inbox.close()


def read_exactly(request: Request, cached_tokens: int | None) -> Prefill:
    """How a prompt was read that attended to everything."""
    total = len(request.prompt)
    path = "unknown" if cached_tokens is None else exact_path(total, cached_tokens)
    return Prefill(prompt_tokens=total, cached_tokens=cached_tokens, path=path, density=1.0)
