"""The engine contract: what the application may ask of a model, whoever serves it.

Implementations: `vllm_engine` (vLLM in process), `scripted_engine` (tests and demos), and `supervisor`,
which wraps one of them and replaces it when it dies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from serving.prefix import Prefix

Role = Literal["system", "user", "assistant"]
PrefillPath = Literal["warm", "sparse", "exact", "unknown"]
PrefillMode = Literal["exact", "sparse"]
Phase = Literal["starting", "ready", "restarting", "down", "stopped"]
DiskState = Literal["ok", "full", "unusable"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the answer is drawn. `temperature=0` is greedy; `logprobs` is the number of alternatives per token."""

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and how to serve it.

    `salt` separates cache namespaces: blocks are shared only between requests of one salt. Requests of different
    `prefill` or `selector` must not share one, for their blocks differ. `selector` tells how sparse prefill chooses
    what to read, in the engine's own notation; None is the engine's default. `dense_from` is the first token that
    attends to everything whatever the mode; None leaves it to the engine. A `background` request is nobody's question:
    it does not count as pending. With `keep`, what is read may be written to a slower memory, to be read from there
    after it was evicted.
    """

    prompt: Sequence[int]
    id: str
    salt: str
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    prefill: PrefillMode = "exact"
    selector: str | None = None
    dense_from: int | None = None
    background: bool = False
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Prefill:
    """How the prompt was read. What the engine does not know is None, or `unknown`.

    `density` is the share of the pages of the cache that attention read, of all that it would read if it were exact:
    `kept_pages` of `total_pages`, over layers, heads and queries. `selector_s` is the time spent on choosing them.
    `fallback_reason` says why a prompt that was to be read sparsely was not.
    """

    prompt_tokens: int
    cached_tokens: int | None = None
    path: PrefillPath = "unknown"
    density: float | None = None
    kept_pages: int | None = None
    total_pages: int | None = None
    selector_s: float | None = None
    fallback_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer.

    With the first one come `prefill` and, in seconds, `queue` (waited before it was scheduled), `read` (from then to
    the first token) and `longest_step` (of the engine's steps that read this prompt). `logprobs` holds, for each token
    of this piece, token ids with their natural logarithms, the chosen one first.
    """

    text: str
    tokens: int = 0
    finish_reason: str | None = None
    prefill: Prefill | None = None
    queue: float | None = None
    read: float | None = None
    longest_step: float | None = None
    logprobs: Sequence[dict[int, float]] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens read so far; `started` is false while the request waits its turn."""

    started: bool
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Plan:
    """An estimate made before a prompt is sent."""

    path: PrefillPath
    tokens_to_compute: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Limits:
    """`window` is the most tokens of a prompt and its answer; `token_budget` the most prompt tokens of one step.

    `block` is how many tokens are cached as a whole; `background_s` how many seconds one background request may take,
    so that a question that comes meanwhile waits no longer; `holds` how many prompts can be held at once.
    """

    window: int
    token_budget: int
    max_pending: int
    block: int
    background_s: float
    holds: int


@dataclass(frozen=True, slots=True)
class State:
    """Whether requests are taken, and if not, why."""

    phase: Phase
    reason: str | None = None

    @property
    def ready(self) -> bool:
        return self.phase == "ready"


@dataclass(frozen=True, slots=True)
class Stats:
    """What the engine is doing now; `pending` are the requests in work or waiting, but for background ones."""

    pending: int
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KvDisk:
    """What is kept on disk, in bytes, of at most `quota_bytes`; `reason` says why no more can be kept."""

    state: DiskState
    bytes: int
    quota_bytes: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine honours. What is missing is shown as null to the user.

    `selector` is the default of `Request.selector` in full, or None when there is no sparse prefill. `fingerprint`
    changes with everything that keys and values of a prompt depend on: weights, settings, precision.
    """

    model: str
    cached_tokens: bool
    salts: bool
    logprobs: bool
    sparse: bool
    progress: bool
    selector: str | None = None
    fingerprint: str = ""


def exact_path(prompt_tokens: int, cached_tokens: int) -> PrefillPath:
    """The path of a prompt read exactly: `warm` when at least half of it came from the cache."""
    return "warm" if cached_tokens * 2 >= prompt_tokens else "exact"


class Engine(Protocol):
    """A model that answers. All methods but `start` and `stop` may be called concurrently from one event loop."""

    async def start(self) -> None:
        """Load the model and wait until it can answer.

        Raises:
            StartError: the engine cannot start as configured.
        """
        ...

    async def stop(self) -> None:
        """End all work and free the engine's processes and memory. Safe to call twice."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Stream the answer. Closing the iterator aborts the request, prefill included.

        Raises:
            EngineUnavailable: the engine takes no requests now.
            EngineDied: the engine was lost meanwhile.
            Overloaded: too many requests wait already.
            PromptTooLong: prompt and answer do not fit the window.
        """
        ...

    async def prefill(self, request: Request) -> Prefill:
        """Read the prompt into the cache and produce no text."""
        ...

    async def progress(self, request_id: str) -> Progress | None:
        """How far the prompt of a running request has been read, or None when that is not known."""
        ...

    async def hold(self, request: Request) -> None:
        """Read the prompt and keep its whole blocks in memory until cancelled, whatever else is read meanwhile.

        Raises:
            as `generate`; EngineDied also later, when the engine is lost and the blocks with it.
        """
        ...

    async def idle(self) -> None:
        """Return when no request but background ones is in work or waits."""
        ...

    def plan(self, request: Request) -> Plan:
        """Estimate, without asking the engine, how the prompt will be read and how long that takes."""
        ...

    def estimate(self, computed: int, cached: int, mode: PrefillMode = "exact") -> float | None:
        """Seconds that reading `computed` tokens after `cached` ones takes, or None when that is not known."""
        ...

    def prefix(self, salt: str, prompt: Sequence[int]) -> Prefix:
        """The whole blocks at the start of a prompt under a salt, to ask for later."""
        ...

    def resident(self, prefix: Prefix) -> int:
        """Tokens at the start of a prefix whose keys and values are in the engine's memory now."""
        ...

    def forget(self, salt: str) -> None:
        """Remove what slower memory holds of a salt; blocks. What is in memory is overwritten when it is needed."""
        ...

    def retain(self, salts: Collection[str]) -> None:
        """Remove what slower memory holds of any other salt than these; blocks."""
        ...

    def kv_disk(self) -> KvDisk | None:
        """What is kept on disk now, and whether more can be; blocks. None when nothing is to be kept there."""
        ...

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text, without any template."""
        ...

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """Messages in the model's chat template as token ids, ready for the answer to begin.

        A last message of the assistant is the answer's beginning, which the model goes on from. Control tokens spelled
        out in a message's content stay plain text.
        """
        ...

    @property
    def limits(self) -> Limits: ...

    @property
    def state(self) -> State: ...

    @property
    def stats(self) -> Stats: ...

    @property
    def capabilities(self) -> Capabilities: ...
