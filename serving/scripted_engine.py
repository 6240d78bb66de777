"""A scripted engine: no weights, settable delays, for tests, demos and measuring the service itself.

It keeps the whole engine contract, so the application cannot tell it from a real one: it counts tokens, honours
salts, aborts, can be told to die, and remembers the prompts it was given.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field

from serving.engine import (
    Capabilities,
    Delta,
    KvDisk,
    Limits,
    Message,
    Plan,
    Prefill,
    PrefillMode,
    PrefillPath,
    Progress,
    Request,
    State,
    Stats,
    exact_path,
)
from serving.errors import EngineDied, EngineUnavailable, Overloaded, PromptTooLong
from serving.kv.files import KvFiles
from serving.prefill_speed import PrefillSpeed
from serving.prefix import Prefix, prefix_of
from serving.prefix_memory import PrefixMemory

_TOKEN = re.compile(r"\w{1,6}|[^\w\s]|\s+")
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Script:
    """How the engine behaves: seconds to the first text, seconds between pieces, and the pieces themselves.

    With a `selector` it offers sparse prefill, which reads the share `density` of all pages and takes that share of the
    time; with a `fallback_reason` it offers it and reads exactly all the same.
    """

    answer: tuple[str, ...] = ("The documents ", "do not ", "say.")
    first_token_s: float = 0.0
    gap_s: float = 0.0
    seconds_per_token: float = 0.0
    window: int = 8192
    kv_windows: int = 16
    max_pending: int = 32
    selector: str | None = None
    density: float = 0.25
    fallback_reason: str | None = None


@dataclass
class ScriptedEngine:
    """Answers every prompt with the script's pieces, or with `enqueue`d ones first.

    It writes nothing to `files`, and tells of their disk.
    """

    script: Script = field(default_factory=Script)
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    retained: frozenset[str] | None = None
    files: KvFiles | None = None

    def __post_init__(self) -> None:
        self._state = State("stopped")
        self._queue: list[tuple[str, ...]] = []
        self._vocabulary: dict[str, int] = {}
        self._words: list[str] = []
        self._running: dict[str, Progress] = {}
        self._background: set[str] = set()
        self._cache = PrefixMemory(_BLOCK, self._capacity)
        self._changed = asyncio.Event()
        self._speed = PrefillSpeed()
        self._dead = asyncio.Event()

    def enqueue(self, *pieces: str) -> None:
        """Answer the next request with these pieces."""
        self._queue.append(pieces)

    def die(self) -> None:
        """Behave as if the engine's process had been killed."""
        self._state = State("down", "killed by the script")
        self._dead.set()

    def decode(self, prompt: Sequence[int]) -> str:
        """The text of token ids that this engine produced."""
        return "".join(self._words[token] for token in prompt)

    async def start(self) -> None:
        self._dead.clear()
        self._cache.clear()
        self._state = State("ready")

    async def stop(self) -> None:
        self._state = State("stopped")
        self._dead.set()

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self._admit(request)
        prefill = self._read(request)
        seconds = self.script.first_token_s + self._seconds(prefill)
        pieces = self._queue.pop(0) if self._queue else self.script.answer
        pieces, cut = pieces[: request.sampling.max_tokens], len(pieces) > request.sampling.max_tokens
        self._begin(request, prefill)
        try:
            await self._sleep(seconds)
            self._cache.add(request.salt, request.prompt)
            if request.prefill == "exact":
                self._speed.observe(prefill.prompt_tokens - (prefill.cached_tokens or 0), 0, seconds)
            for number, piece in enumerate(pieces, start=1):
                if number > 1:
                    await self._sleep(self.script.gap_s)
                yield Delta(
                    text=piece,
                    tokens=number,
                    finish_reason=None if number < len(pieces) else "length" if cut else "stop",
                    prefill=prefill if number == 1 else None,
                    queue=0.0 if number == 1 else None,
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.id)
            raise
        finally:
            self._end(request)

    async def prefill(self, request: Request) -> Prefill:
        self._admit(request)
        prefill = self._read(request)
        seconds = self._seconds(prefill)
        self._begin(request, prefill)
        try:
            await self._sleep(seconds)
            self._cache.add(request.salt, request.prompt)
            if request.prefill == "exact":
                self._speed.observe(prefill.prompt_tokens - (prefill.cached_tokens or 0), 0, seconds)
        finally:
            self._end(request)
        return prefill

    async def hold(self, request: Request) -> None:
        await self.prefill(request)
        await self._dead.wait()
        raise EngineDied("the engine died, and what it held is lost")

    async def idle(self) -> None:
        while self.stats.pending:
            self._changed.clear()
            await self._changed.wait()

    async def progress(self, request_id: str) -> Progress | None:
        return self._running.get(request_id)

    def plan(self, request: Request) -> Plan:
        cached = self._cache.cached_tokens(request.salt, request.prompt)
        computed = len(request.prompt) - cached
        path, density = self._path(request, cached)
        exact_s = self._speed.estimate(computed, cached)
        return Plan(path, tokens_to_compute=computed, eta_s=None if exact_s is None else exact_s * density)

    def estimate(self, computed: int, cached: int, mode: PrefillMode = "exact") -> float | None:
        seconds = self._speed.estimate(computed, cached)
        return seconds if seconds is None or mode == "exact" else seconds * self.script.density

    def prefix(self, salt: str, prompt: Sequence[int]) -> Prefix:
        return prefix_of(salt, prompt, _BLOCK)

    def resident(self, prefix: Prefix) -> int:
        return self._cache.tokens(prefix)

    def forget(self, salt: str) -> None:
        self.forgotten.append(salt)

    def retain(self, salts: Collection[str]) -> None:
        self.retained = frozenset(salts)

    def kv_disk(self) -> KvDisk | None:
        return None if self.files is None else self.files.look()

    def count_tokens(self, text: str) -> int:
        return len(_TOKEN.findall(text))

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        text = "".join(f"[{message.role}]\n{message.content}\n" for message in messages)
        begun = bool(messages) and messages[-1].role == "assistant"
        text = text.removesuffix("\n") if begun else text + "[assistant]\n"
        return [self._token(word) for word in _TOKEN.findall(text)]

    @property
    def limits(self) -> Limits:
        return Limits(
            window=self.script.window,
            token_budget=512,
            max_pending=self.script.max_pending,
            block=_BLOCK,
            background_s=0.1,
            holds=2,
        )

    @property
    def state(self) -> State:
        return self._state

    @property
    def stats(self) -> Stats:
        return Stats(pending=len(self._running) - len(self._background), kv_tokens=self._capacity)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            "scripted",
            cached_tokens=True,
            salts=True,
            logprobs=False,
            sparse=self.script.selector is not None,
            progress=True,
            selector=self.script.selector,
            fingerprint="scripted",
        )

    @property
    def _capacity(self) -> int:
        return self.script.kv_windows * self.script.window

    def _begin(self, request: Request, prefill: Prefill) -> None:
        self._running[request.id] = Progress(True, prefill.cached_tokens or 0, prefill.prompt_tokens)
        if request.background:
            self._background.add(request.id)

    def _end(self, request: Request) -> None:
        self._running.pop(request.id, None)
        self._background.discard(request.id)
        self._changed.set()

    def _token(self, word: str) -> int:
        token = self._vocabulary.setdefault(word, len(self._vocabulary))
        if token == len(self._words):
            self._words.append(word)
        return token

    def _admit(self, request: Request) -> None:
        if not self._state.ready:
            raise EngineUnavailable(f"the engine is {self._state.phase}")
        if not request.background and self.stats.pending >= self.script.max_pending:
            raise Overloaded(f"{self.stats.pending} requests wait already; try again in a moment")
        if len(request.prompt) + request.sampling.max_tokens > self.script.window:
            raise PromptTooLong(len(request.prompt), request.sampling.max_tokens, self.script.window)
        self.requests.append(request)

    def _read(self, request: Request) -> Prefill:
        cached = self._cache.cached_tokens(request.salt, request.prompt)
        path, density = self._path(request, cached)
        total = (len(request.prompt) - cached) // _BLOCK
        return Prefill(
            len(request.prompt),
            cached,
            path,
            density,
            kept_pages=round(density * total),
            total_pages=total,
            selector_s=0.0,
            fallback_reason=self.script.fallback_reason if request.prefill == "sparse" else None,
        )

    def _path(self, request: Request, cached: int) -> tuple[PrefillPath, float]:
        """How a request is read, and the share of the pages that it reads."""
        path = exact_path(len(request.prompt), cached)
        accelerated = request.prefill == "sparse" and self.script.selector is not None
        if path == "warm" or not accelerated or self.script.fallback_reason is not None:
            return path, 1.0
        return "sparse", self.script.density

    def _seconds(self, prefill: Prefill) -> float:
        computed = prefill.prompt_tokens - (prefill.cached_tokens or 0)
        return self.script.seconds_per_token * computed * (prefill.density or 1.0)

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._dead.wait(), timeout=max(seconds, 0.0))
        except TimeoutError:
            # A wait of no length ends before it has looked.
            if not self._dead.is_set():
                return
        raise EngineDied("the engine died while it worked on this question; ask again")
