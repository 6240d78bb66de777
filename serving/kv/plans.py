"""What to load and what to store in each step of the engine: the scheduler's side of the disk tier."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.accel.channel import PREFILL
from serving.kv.files import KvFiles, namespace
from serving.kv.settings import COMPUTE, KEEP


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one prompt that follow each other: their hashes, and the pages in memory that hold them."""

    namespace: str
    hashes: list[bytes]
    pages: list[int]
    first: bool = False
    """Whether they begin with the first block of the prompt."""


@dataclass(slots=True)
class Plan:
    """Of one step: loads by request, to be done at once; stores, to be copied when the step has been computed."""

    loads: dict[str, Blocks] = field(default_factory=dict)
    stores: list[Blocks] = field(default_factory=list)


@dataclass(slots=True)
class _Kept:
    """A request that is to be stored; its first `done` blocks were handed over."""

    request: Any
    done: int = 0


class Planner:
    """Follows the scheduler's requests (vLLM's `Request`) from their arrival to their end."""

    def __init__(self, files: KvFiles, block_size: int, *, sparse: bool) -> None:
        """
        Args:
            sparse: whether a request that does not say is read sparsely.
        """
        self._files = files
        self._block_size = block_size
        self._default = "sparse" if sparse else "exact"
        self._kept: dict[str, _Kept] = {}
        self._loads: dict[str, Blocks] = {}
        self._loading: dict[str, Blocks] = {}
        self._unreadable: set[str] = set()

    def begin(self, request: Any) -> None:
        """A request has arrived."""
        if self._takes_part(request) and _asked(request).get(KEEP) == 1:
            self._kept[request.request_id] = _Kept(request)

    def found(self, request: Any, computed: int) -> int:
        """Tokens on disk that follow the `computed` ones in memory: whole blocks, never the last token."""
        if not self._takes_part(request) or request.request_id in self._unreadable or _asked(request).get(COMPUTE) == 1:
            return 0
        name = namespace(request.cache_salt)
        first, last = computed // self._block_size, (request.num_tokens - 1) // self._block_size
        blocks = 0
        for block_hash in request.block_hashes[first:last]:
            if not self._files.has(name, block_hash):
                break
            blocks += 1
        return blocks * self._block_size

    def allocated(self, request: Any, pages: list[int], tokens: int) -> None:
        """Pages were given to a request, the last of them for `tokens` tokens to be loaded."""
        if not tokens:
            return
        first = len(pages) - tokens // self._block_size
        hashes = request.block_hashes[first : len(pages)]
        self._loads[request.request_id] = Blocks(namespace(request.cache_salt), hashes, pages[first:])

    def step(self, scheduled: Mapping[str, int], pages: Callable[[str], list[int]]) -> Plan:
        """The plan of a step.

        Args:
            scheduled: tokens that the step computes, by request.
            pages: of a request, in the order of its blocks.
        """
        plan = Plan(self._loads)
        self._loading |= self._loads
        self._loads = {}
        for id in scheduled.keys() & self._kept.keys():
            kept = self._kept[id]
            request = kept.request
            tokens = min(request.num_computed_tokens + scheduled[id], request.num_prompt_tokens)
            full = tokens // self._block_size
            if full > kept.done:
                plan.stores.append(
                    Blocks(
                        namespace(request.cache_salt),
                        request.block_hashes[kept.done : full],
                        pages(id)[kept.done : full],
                        first=kept.done == 0,
                    )
                )
                kept.done = full
        return plan

    def loaded(self, ids: Collection[str], invalid: Collection[int]) -> None:
        """Loads have ended; those with invalid pages load nothing more, even if the files are still there."""
        for id in ids:
            blocks = self._loading.pop(id, None)
            if blocks is not None and not set(invalid).isdisjoint(blocks.pages):
                self._unreadable.add(id)

    def end(self, id: str) -> None:
        """A request has ended, one way or another."""
        self._kept.pop(id, None)
        self._loads.pop(id, None)
        self._loading.pop(id, None)
        self._unreadable.discard(id)

    def _takes_part(self, request: Any) -> bool:
        return bool(request.cache_salt) and _asked(request).get(PREFILL, self._default) != "sparse"


def _asked(request: Any) -> Mapping[str, Any]:
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}
