"""Reads documents before anybody asks about them, so that a question has only itself to be read.

One loop, in the background: the scope that was used last comes first, in steps that a question never waits long for,
and only while no question is in work. A document longer than the window is read in volumes, each a scope of its own.
What is read is read exactly, so nothing is approximated. How much of a scope is in the engine's memory is never
assumed: the engine says it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from app.scope import Scope, in_order, prompt_of, salt_of, scopes_of
from ingest.changes import Changes
from retrieval.catalogue import READABLE, Catalogue, Document
from retrieval.errors import RetrievalError, StorageFailed
from serving.engine import Engine, Request, Sampling
from serving.errors import EngineDied, EngineUnavailable, ServingError
from serving.prefix import Prefix

log = structlog.get_logger(__name__)

WarmState = Literal["cold", "warming", "warm", "partly", "evicted"]

# Room in the cache for questions and their answers, in windows of the model; at most half of the cache.
_ROOM_WINDOWS = 2
# What questions drove out of the cache is read again after this time; if it is driven out once more, after twice that,
# and so on, so that a cache which cannot hold it is not churned.
_CALM_S = 5.0
_LONGEST_CALM_S = 600.0
_POLL_S = 0.5
# The engine tells of its blocks a moment after it has answered.
_EVENTS_S = 1.0
_MOST_STUCK = 3
_MOST_ENTRIES = 1000


class WarmError(Exception):
    """A scope cannot be kept warm as asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """How much of a scope the engine has in memory, in tokens, and what is being done about the rest.

    `total` is None until it was counted. `reason` says why it stays as it is.
    """

    state: WarmState
    tokens: int = 0
    total: int | None = None
    eta_s: float | None = None
    pinned: bool = False
    reason: str | None = None


@dataclass(slots=True)
class _Entry:
    """What is known of a scope. `used` orders scopes, the last one used has the highest; `noted` was written down."""

    scope: Scope
    used: int
    noted: int | None = None
    total: int | None = None
    prefix: Prefix | None = None
    wanted: bool = False
    watched: int = 0
    pinned: bool = False
    hold: asyncio.Task[None] | None = None
    was_warm: bool = False
    lost_at: float | None = None
    losses: int = 0
    stuck: int = 0
    reason: str | None = None


class Warmer:
    """Keeps the scopes used last in the engine's memory, as many as have room."""

    def __init__(
        self,
        engine: Engine,
        catalogue: Catalogue,
        key: bytes,
        *,
        enabled: bool = True,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Args:
        enabled: without it only what is asked for by name is read early.
        on_read: told how many tokens were read, after each step.
        """
        self._engine = engine
        self._catalogue = catalogue
        self._key = key
        self._enabled = enabled
        self._on_read = on_read
        self._entries: dict[Scope, _Entry] = {}
        self._clock = itertools.count(1)
        self._changes = Changes()
        self._rendered: tuple[Scope, list[int]] | None = None
        self._task: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self) -> None:
        """Begin to work: as soon as the engine is ready, on the scopes of an earlier run in the order of their use."""
        self._task = asyncio.create_task(self._work(), name="warmer")

    async def stop(self) -> None:
        """Stop reading, let go of what is held."""
        holds = [entry.hold for entry in self._entries.values() if entry.hold is not None]
        tasks = [task for task in (self._task, *holds) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._task = None

    # --- what may happen to a scope ---

    async def arrived(self, id: str, *, last: bool) -> None:
        """A document can be asked about; after the last one of several also all documents of its collection together.

        Raises:
            UnknownDocument: it was deleted meanwhile.
        """
        if not self._enabled:
            return
        document = await asyncio.to_thread(self._catalogue.get, id)
        if last:
            together = await asyncio.to_thread(self._catalogue.documents, document.collection, READABLE)
            if len(together) > 1:
                await self._want_what_fits(in_order(together))
        await self._want_what_fits([document])

    def asked(self, scope: Scope) -> None:
        """A question about the scope was answered, so another one may come."""
        if self._enabled:
            self._want(scope)

    async def warm(self, *scopes: Scope, pin: bool = False) -> None:
        """Read scopes early because somebody says so, the first one first; with `pin` they are then kept.

        Raises:
            WarmError: there is no room for so many pins; then nothing is pinned.
        """
        new = [entry for entry in self._entries_of(scopes) if pin and not entry.pinned]
        if new:
            await self._require_pins(new)
            for entry in new:
                entry.pinned = True
        self._want(*scopes)

    async def release(self, *scopes: Scope) -> None:
        """Stop reading scopes early, and let go of those that were pinned."""
        for entry in [self._entries[scope] for scope in scopes if scope in self._entries]:
            entry.wanted = entry.pinned = False
            # Not to be read again on its own account, until it is used.
            entry.was_warm = False
            await self._let_go(entry)
        self._changes.notify()

    @contextlib.contextmanager
    def watched(self, *scopes: Scope) -> Iterator[None]:
        """While somebody has these scopes before them, they come before all others."""
        entries = self._entries_of(scopes)
        for entry in entries:
            entry.watched += 1
            entry.wanted, entry.reason = True, None
        self._changes.notify()
        try:
            yield
        finally:
            for entry in entries:
                entry.watched -= 1
                if not entry.watched and not entry.pinned and not self._enabled:
                    entry.wanted = False
            self._changes.notify()

    async def forget(self, document: str) -> None:
        """A document is about to be deleted: nothing that holds it is read early any more, or kept on disk.

        Raises:
            StorageFailed: it cannot be removed from the disk.
        """
        known = {Scope(*stored) for stored in await asyncio.to_thread(self._catalogue.scopes)}
        for scope in [scope for scope in known | self._entries.keys() if document in scope.documents]:
            if (entry := self._entries.pop(scope, None)) is not None:
                entry.wanted = entry.pinned = False
                await self._let_go(entry)
            # Without an engine nothing is read from there, and the next one removes what nobody knows.
            if self._engine.state.ready:
                await asyncio.to_thread(self._remove, scope)
        if self._rendered is not None and document in self._rendered[0].documents:
            self._rendered = None
        self._changes.notify()

    def _remove(self, scope: Scope) -> None:
        try:
            self._engine.forget(self._salt(scope))
        except OSError as error:
            raise StorageFailed(
                f"what the engine has read of a document cannot be removed from the disk ({error.strerror}); mend the "
                "folder 'kv' of the data folder and delete the document again"
            ) from error

    # --- what is known ---

    def warmth(self, *scopes: Scope) -> Warmth:
        """How much of scopes is in memory now; what was not counted yet is taken to be as long as the others."""
        parts = [self._warmth(scope) for scope in scopes]
        if len(parts) == 1:
            return parts[0]
        counted = [part.total for part in parts if part.total is not None]
        length = sum(counted) // len(counted) if counted else None
        states = {part.state for part in parts}
        tokens = sum(part.tokens for part in parts)
        if states == {"warm"}:
            state: WarmState = "warm"
        elif "warming" in states:
            state = "warming"
        elif tokens:
            state = "partly"
        else:
            state = "evicted" if "evicted" in states else "cold"
        return Warmth(
            state,
            tokens,
            None if length is None else sum(length if part.total is None else part.total for part in parts),
            self._rest(parts, length),
            pinned=bool(parts) and all(part.pinned for part in parts),
            reason=next((part.reason for part in parts if part.reason is not None), None),
        )

    def warmth_of(self, document: str) -> Warmth:
        """How much of a document is in memory now, whole or in all of its volumes."""
        volumes = (Scope((document,), number) for number in itertools.count(1))
        known = list(itertools.takewhile(self._entries.__contains__, volumes))
        return self.warmth(*known or [Scope((document,))])

    def _rest(self, parts: Sequence[Warmth], length: int | None) -> float | None:
        """Seconds until the parts that are being read are read; those that were not counted have this length."""
        if length is None:
            return None
        etas = [
            self._engine.estimate(length, 0) if part.total is None else part.eta_s
            for part in parts
            if part.state == "warming"
        ]
        known = [eta for eta in etas if eta is not None]
        return sum(known) if known and len(known) == len(etas) else None

    def _warmth(self, scope: Scope) -> Warmth:
        entry = self._entries.get(scope)
        if entry is None:
            return Warmth("cold")
        tokens, total, reason = self._resident(entry), entry.total, entry.reason
        eta = None
        if (phase := self._engine.state.phase) == "down":
            reason = f"the engine is down: {self._engine.state.reason}"
        if tokens == total:
            state: WarmState = "warm"
        elif entry.wanted and phase != "down":
            state = "warming"
            eta = None if total is None else self._engine.estimate(total - tokens, tokens)
        elif tokens:
            state = "partly"
        else:
            state = "evicted" if entry.was_warm else "cold"
        return Warmth(state, tokens, total, eta, entry.hold is not None, None if state == "warm" else reason)

    def warm_scopes(self) -> frozenset[Scope]:
        """The scopes that are wholly in memory."""
        return frozenset(scope for scope, entry in self._entries.items() if self._is_warm(entry))

    async def changes(self) -> None:
        """Return when something may have become warmer or colder."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._changes.next().wait()

    # --- the loop ---

    async def _work(self) -> None:
        while not self._engine.state.ready:
            await self.changes()
        await self._take_up()
        while True:
            if (entry := self._next()) is None:
                await self.changes()
                continue
            await self._engine.idle()
            # A question may have read it, or somebody opened another document meanwhile.
            if self._next() is not entry:
                continue
            try:
                await self._step(entry)
            except (EngineUnavailable, EngineDied):
                # Whatever was read is gone; what is still wanted is read again by the next engine.
                await asyncio.sleep(_POLL_S)
            except (WarmError, ServingError, RetrievalError) as error:
                self._give_up(entry, str(error))
            except Exception as error:  # noqa: BLE001 - one document must not end the loop for all others
                # Its text may quote the document.
                log.error("warming_broke", error=type(error).__name__)
                self._give_up(entry, f"an internal error ended the reading ({type(error).__name__})")

    async def _take_up(self) -> None:
        """Go on with the scopes of earlier runs; whatever is kept of deleted documents, or of another model, goes."""
        try:
            known = await asyncio.to_thread(self._known)
            if self._enabled:
                for age, scope in enumerate(known):
                    # Whatever is used in this run is newer.
                    entry = self._entries.setdefault(scope, _Entry(scope, used=-age, noted=-age))
                    entry.wanted = True
            await asyncio.to_thread(self._engine.retain, {self._salt(scope) for scope in known})
        except (OSError, RetrievalError) as error:
            log.error("kept_prompts_not_removed", error=str(error))

    def _known(self) -> list[Scope]:
        """The stored scopes, the latest use first; another window may cut a document into other volumes, or none."""
        known: list[Scope] = []
        now: dict[str, list[Scope]] = {}
        for scope in (Scope(*stored) for stored in self._catalogue.scopes()):
            if len(scope.documents) > 1:
                known.append(scope)
                continue
            (id,) = scope.documents
            if id not in now:
                now[id] = scopes_of([self._catalogue.get(id)], self._catalogue, self._engine)
            if scope in now[id]:
                known.append(scope)
        return list(dict.fromkeys([*known, *itertools.chain.from_iterable(now.values())]))

    def _next(self) -> _Entry | None:
        """The scope to read a step of, if there is any."""
        if not self._engine.state.ready or self._engine.stats.kv_tokens is None:
            self._want_again()
            return None
        for entry in self._with_room():
            self._note_loss(entry)
            if entry.pinned and entry.hold is None and self._is_warm(entry):
                entry.hold = asyncio.create_task(self._keep(entry), name="pin")
            if entry.wanted or self._is_due(entry):
                return entry
        return None

    def _with_room(self) -> Iterator[_Entry]:
        """Scopes in the order in which they deserve to be in memory, as many as fit."""
        left = self._budget()
        by_rank = sorted(self._entries.values(), key=lambda entry: (entry.pinned, entry.watched > 0, entry.used))
        for entry in reversed(by_rank):
            tokens = entry.total or 0
            if tokens <= left:
                left -= tokens
                yield entry
                continue
            if entry.wanted:
                entry.wanted, entry.reason = False, "no room: what was used later fills the cache"
                self._changes.notify()
            if not self._resident(entry):
                # Digests of a long prompt are many, and can be made again.
                entry.prefix = None

    def _budget(self) -> int:
        """Tokens of the cache that may hold what nobody has asked about yet."""
        capacity = self._engine.stats.kv_tokens or 0
        return max(capacity - _ROOM_WINDOWS * self._engine.limits.window, capacity // 2)

    async def _step(self, entry: _Entry) -> None:
        """Read a little more of a scope; at first only count what there is to read, for that decides if it has room."""
        if entry.total is None:
            await self._prompt(entry)
            return
        if not self._is_warm(entry):
            prompt, prefix = await self._prompt(entry)
            before = self._engine.resident(prefix)
            if before < prefix.tokens:
                end = before + self._step_tokens(before, prefix.tokens)
                await self._engine.prefill(self._request(entry, prompt[:end]))
                self._on_read(end - before)
                await self._until_told(prefix, end)
                entry.stuck = 0 if self._engine.resident(prefix) > before else entry.stuck + 1
                if entry.stuck == _MOST_STUCK:
                    raise WarmError("the engine does not keep what it reads; other prompts fill its cache")
        if self._is_warm(entry):
            entry.wanted, entry.was_warm, entry.stuck, entry.lost_at = False, True, 0, None
            if entry.noted != entry.used:
                used = entry.used
                await self._store([entry.scope])
                entry.noted = used
        self._changes.notify()

    async def _until_told(self, prefix: Prefix, tokens: int) -> None:
        deadline = time.monotonic() + _EVENTS_S
        while self._engine.resident(prefix) < tokens and time.monotonic() < deadline:  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.005)

    def _step_tokens(self, done: int, total: int) -> int:
        """How many tokens can be read within the time that a background request may take, in whole blocks."""
        limits = self._engine.limits
        low, high = 1, max(1, (total - done) // limits.block)
        while low < high:
            middle = (low + high + 1) // 2
            seconds = self._engine.estimate(middle * limits.block, done)
            fits = middle * limits.block <= limits.token_budget if seconds is None else seconds <= limits.background_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * limits.block

    async def _prompt(self, entry: _Entry) -> tuple[Sequence[int], Prefix]:
        """A scope's prompt and its whole blocks; the last prompt is kept, because the next step needs it again."""
        if self._rendered is None or self._rendered[0] != entry.scope:
            prompt = await asyncio.to_thread(prompt_of, entry.scope, self._catalogue, self._engine)
            self._rendered = (entry.scope, prompt)
        prompt = self._rendered[1]
        if len(prompt) >= self._engine.limits.window:
            raise WarmError(f"it has {len(prompt):,} tokens, and the model's window {self._engine.limits.window:,}")
        if entry.prefix is None:
            entry.prefix = await asyncio.to_thread(self._engine.prefix, self._salt(entry.scope), prompt)
            entry.total = entry.prefix.tokens
        return prompt, entry.prefix

    def _request(self, entry: _Entry, prompt: Sequence[int]) -> Request:
        return Request(
            prompt=prompt,
            id=f"warm-{uuid.uuid4().hex}",
            salt=self._salt(entry.scope),
            sampling=Sampling(max_tokens=1),
            background=True,
            keep=True,
        )

    # --- eviction ---

    def _want_again(self) -> None:
        """What a lost engine had in memory is read by the next one, without waiting for calm: nothing drove it out."""
        for entry in self._entries.values():
            if entry.was_warm and (self._enabled or entry.pinned):
                entry.wanted, entry.was_warm, entry.lost_at = True, False, None

    def _note_loss(self, entry: _Entry) -> None:
        if not entry.was_warm or entry.wanted:
            return
        if self._is_warm(entry):
            entry.lost_at = None
        elif entry.lost_at is None:
            entry.lost_at = time.monotonic()
            entry.losses += 1
            log.info("scope_evicted", documents=len(entry.scope.documents), tokens=self._resident(entry))
            self._changes.notify()

    def _is_due(self, entry: _Entry) -> bool:
        """Whether what was driven out is to be read again."""
        if entry.lost_at is None or not (self._enabled or entry.pinned):
            return False
        calm = min(_CALM_S * 2.0 ** min(entry.losses - 1, 30), _LONGEST_CALM_S)
        return time.monotonic() - entry.lost_at >= calm

    # --- pins ---

    async def _require_pins(self, new: Sequence[_Entry]) -> None:
        pins = [other for other in self._entries.values() if other.pinned]
        holds = self._engine.limits.holds
        if len(new) > holds:
            raise WarmError(f"it has {len(new)} volumes, and at most {holds} can be pinned; warm it without a pin")
        if len(pins) + len(new) > holds:
            raise WarmError(
                f"{len(pins)} documents are pinned already, and no more can be; release one of them first "
                "(DELETE /v1/documents/{id}/warm)"
            )
        capacity = self._engine.stats.kv_tokens
        if capacity is None:
            raise EngineUnavailable("the engine is still loading; pin the document when it is ready")
        for entry in new:
            await self._prompt(entry)
        held = sum(other.total or 0 for other in [*pins, *new])
        if held > capacity // 2:
            raise WarmError(
                f"the pinned documents would take {held:,} of {capacity:,} tokens of the cache, more than half; "
                "release one, or raise FOREWORD_KV_GIB"
            )

    async def _keep(self, entry: _Entry) -> None:
        try:
            prompt, prefix = await self._prompt(entry)
            await self._engine.hold(replace(self._request(entry, prompt[: prefix.tokens]), keep=False))
        except (WarmError, ServingError, RetrievalError) as error:
            log.warning("pin_lost", reason=str(error))
        finally:
            entry.hold = None

    async def _let_go(self, entry: _Entry) -> None:
        if (hold := entry.hold) is not None:
            hold.cancel()
            await asyncio.wait({hold})
            # A task that is cancelled before it begins cleans up nothing.
            entry.hold = None

    # --- small ---

    async def _want_what_fits(self, documents: Sequence[Document]) -> None:
        scopes = await asyncio.to_thread(scopes_of, documents, self._catalogue, self._engine)
        if scopes:
            # Written down at once: this process may have no engine, or end before it has read anything.
            await self._store(scopes)
            for entry in self._want(*scopes):
                entry.noted = entry.used

    async def _store(self, scopes: Sequence[Scope]) -> None:
        """Write down the use of a scope, or of volumes of one document, the first one as the latest."""
        volumes = [scope.volume for scope in reversed(scopes) if scope.volume is not None]
        await asyncio.to_thread(self._catalogue.use_scope, scopes[0].documents, *volumes)

    def _want(self, *scopes: Scope) -> list[_Entry]:
        """Scopes were used, the first one last."""
        entries = self._entries_of(scopes)
        for entry in reversed(entries):
            entry.used = next(self._clock)
            entry.wanted, entry.reason, entry.losses = True, None, 0
        self._changes.notify()
        return entries

    def _entries_of(self, scopes: Sequence[Scope]) -> list[_Entry]:
        """What is known of scopes; of those that are new, the first one counts as used last."""
        for scope in reversed(scopes):
            self._entries.setdefault(scope, _Entry(scope, next(self._clock)))
        entries = [self._entries[scope] for scope in scopes]
        spare = len(self._entries) - _MOST_ENTRIES
        if spare > 0:
            kept = set(scopes)
            others = [
                other
                for scope, other in self._entries.items()
                if scope not in kept and not (other.watched or other.pinned)
            ]
            for other in sorted(others, key=lambda other: (other.wanted, other.used))[:spare]:
                del self._entries[other.scope]
        return entries

    def _salt(self, scope: Scope) -> str:
        return salt_of(scope, "exact", self._engine, self._key)

    def _resident(self, entry: _Entry) -> int:
        return 0 if entry.prefix is None else self._engine.resident(entry.prefix)

    def _is_warm(self, entry: _Entry) -> bool:
        return self._resident(entry) == entry.total

    def _give_up(self, entry: _Entry, reason: str) -> None:
        entry.wanted, entry.was_warm, entry.stuck, entry.reason = False, False, 0, reason
        log.warning("scope_not_warmed", documents=len(entry.scope.documents), reason=reason)
        self._changes.notify()
