"""What an arm's server is asked and what it answers: one prompt, timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from app.prompt import QUESTION
from eval.arms import Arm
from serving.engine import Message


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one request. Times in seconds; what is not known is None.

    `ttft` runs from sending to the first non-empty text (to the first token when there is no text); `queue` and `read`
    are the engine's own share of it, `rest` is what is left. `gaps` lie between the arrivals of consecutive pieces of
    text. `first` holds the logarithms of the first token's probabilities. `error` is set when it failed.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    path: str = "unknown"
    density: float | None = None
    fallback_reason: str | None = None
    ttft: float | None = None
    queue: float | None = None
    read: float | None = None
    longest_step: float | None = None
    total: float | None = None
    gaps: tuple[float, ...] | None = None
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    first: Mapping[int, float] | None = None
    error: str | None = None

    @property
    def rest(self) -> float | None:
        if self.ttft is None or self.queue is None or self.read is None:
            return None
        return self.ttft - self.queue - self.read


class Server(Protocol):
    """Serves prompts, whoever does it."""

    @property
    def about(self) -> dict[str, Any]:
        """What serves: its model and, where they are known, its limits."""
        ...

    def require(self, arm: Arm) -> None:
        """Refuse an arm that cannot be served as it says.

        Raises:
            BadUsage: what is missing.
        """
        ...

    async def serve(
        self, messages: Sequence[Message], arm: Arm, *, salt: str, max_tokens: int, logprobs: int | None = None
    ) -> Served:
        """Serve one prompt; a failure is told in the result.

        Args:
            messages: as the prompt is built by the service; a last one of the assistant is the answer's beginning.
            salt: the cache namespace; prompts of one salt may share what they have in common.
        """
        ...


def gaps_between(arrivals: Sequence[float]) -> tuple[float, ...]:
    """Seconds from each arrival to the next."""
    return tuple(later - earlier for earlier, later in pairwise(arrivals))


def without_question(messages: Sequence[Message]) -> list[Message]:
    """A prompt up to where its last question begins; the answers to earlier ones stay."""
    *before, last = messages[:-1] if messages[-1].role == "assistant" else messages
    documents, mark, _ = last.content.rpartition(QUESTION)
    return [*before, replace(last, content=documents + mark)]


def checked(served: Served, arm: Arm) -> Served:
    """An arm that was not served as its name says has not measured it: that is an error.

    A warm arm must find its context in the cache. An accelerated one must read sparsely, or find what it has read
    sparsely before, or tell why it does not.
    """
    if arm.accelerated and served.path not in ("sparse", "warm") and served.fallback_reason is None:
        return replace(served, error=f"the prompt was to be read sparsely, but its path is {served.path!r}")
    if arm.warm and served.cached_tokens == 0:
        return replace(served, error="the context had been read, but nothing of it was found in the cache")
    return served
