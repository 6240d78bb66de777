"""Keeps an engine alive: replaces a dead one with backoff, and gives up after three deaths in ten minutes.

It is an engine itself. While it has no living engine, requests are refused with the reason, never queued.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass

import structlog

from serving.engine import (
    Capabilities,
    Delta,
    Engine,
    KvDisk,
    Limits,
    Message,
    Plan,
    Prefill,
    PrefillMode,
    Progress,
    Request,
    State,
    Stats,
)
from serving.errors import EngineUnavailable
from serving.prefix import Prefix

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """`deaths` within `window_s` seconds end the restarts; waits double from `first_wait_s` to `longest_wait_s`."""

    deaths: int = 3
    window_s: float = 600.0
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    poll_s: float = 0.2


class SupervisedEngine:
    """Runs engines made by a factory, one at a time."""

    def __init__(self, make: Callable[[], Engine], policy: RestartPolicy | None = None) -> None:
        self._make = make
        self._policy = policy or RestartPolicy()
        self._engine = make()
        self._state = State("stopped")
        self._deaths: deque[float] = deque()
        self._watch: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        """The engine that serves now, or the last one that did."""
        return self._engine

    async def start(self) -> None:
        self._state = State("starting", "the model is loading")
        try:
            await self._engine.start()
        except BaseException as error:
            self._state = State("down", str(error))
            raise
        self._state = State("ready")
        self._watch = asyncio.create_task(self._keep_alive(), name="engine supervisor")

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
            self._watch = None
        self._state = State("stopped", "the service is shutting down")
        await self._engine.stop()

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self._require_ready()
        stream = self._engine.generate(request)
        try:
            async for delta in stream:
                yield delta
        finally:
            # Closing the inner stream here, not when it is collected, makes an abort immediate.
            await stream.aclose()  # type: ignore[attr-defined]

    async def prefill(self, request: Request) -> Prefill:
        self._require_ready()
        return await self._engine.prefill(request)

    async def progress(self, request_id: str) -> Progress | None:
        return await self._engine.progress(request_id)

    async def hold(self, request: Request) -> None:
        self._require_ready()
        await self._engine.hold(request)

    async def idle(self) -> None:
        await self._engine.idle()

    def plan(self, request: Request) -> Plan:
        return self._engine.plan(request)

    def estimate(self, computed: int, cached: int, mode: PrefillMode = "exact") -> float | None:
        return self._engine.estimate(computed, cached, mode)

    def prefix(self, salt: str, prompt: Sequence[int]) -> Prefix:
        return self._engine.prefix(salt, prompt)

    def resident(self, prefix: Prefix) -> int:
        return self._engine.resident(prefix)

    def forget(self, salt: str) -> None:
        self._engine.forget(salt)

    def retain(self, salts: Collection[str]) -> None:
        self._engine.retain(salts)

    def kv_disk(self) -> KvDisk | None:
        return self._engine.kv_disk()

    def count_tokens(self, text: str) -> int:
        return self._engine.count_tokens(text)

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        return self._engine.render_chat(messages)

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    @property
    def state(self) -> State:
        # Seen before the watcher wakes, a death must already refuse requests.
        if self._state.ready and not self._engine.state.ready:
            return State("restarting", self._engine.state.reason)
        return self._state

    @property
    def stats(self) -> Stats:
        return self._engine.stats

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    def _require_ready(self) -> None:
        state = self.state
        if not state.ready:
            raise EngineUnavailable(f"the engine is {state.phase}: {state.reason}")

    async def _keep_alive(self) -> None:
        while self._state.phase != "down":
            await asyncio.sleep(self._policy.poll_s)
            if not self._engine.state.ready:
                await self._replace(self._engine.state.reason or "the engine stopped without a reason")

    async def _replace(self, reason: str) -> None:
        """Put a new engine in the dead one's place, or stay down with the reason."""
        while True:
            if not self._may_restart():
                minutes = round(self._policy.window_s / 60)
                self._state = State(
                    "down",
                    f"the engine died {self._policy.deaths} times in {minutes} minutes, last because {reason}; "
                    "mend the cause and restart the service",
                )
                log.error("engine_given_up", reason=reason)
                await self._stop_engine()
                return
            wait = min(self._policy.first_wait_s * 2 ** (len(self._deaths) - 1), self._policy.longest_wait_s)
            self._state = State("restarting", reason)
            log.warning("engine_restarting", reason=reason, wait_s=wait)
            await self._stop_engine()
            await asyncio.sleep(wait)
            try:
                self._engine = self._make()
                await self._engine.start()
            # Whatever it is, an engine that does not start has died once more.
            except Exception as error:
                reason = str(error) or type(error).__name__
                continue
            self._state = State("ready")
            log.info("engine_restarted")
            return

    async def _stop_engine(self) -> None:
        """Stop a dead engine; that it cannot be stopped must not keep the next one from starting."""
        try:
            await self._engine.stop()
        except Exception as error:
            log.error("engine_not_stopped", error=str(error))

    def _may_restart(self) -> bool:
        """Count a death; false when it was one too many."""
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > self._policy.window_s:
            self._deaths.popleft()
        return len(self._deaths) < self._policy.deaths
