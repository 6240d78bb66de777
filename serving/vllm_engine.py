"""vLLM in process: chunked prefill, prefix caching, one life.

"In process" means that this process owns the engine and talks to it without HTTP; vLLM itself runs its core and its
worker as child processes. This is the only module that drives vLLM. It does not restart anything: `supervisor` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import structlog

from serving import orphans
from serving.accel.client import Client, read_exactly
from serving.block_events import BlockEvents
from serving.chat import ChatTokenizer
from serving.config import EngineConfig
from serving.engine import (
    Capabilities,
    Delta,
    KvDisk,
    Limits,
    Message,
    Plan,
    Prefill,
    PrefillMode,
    Progress,
    Request,
    Sampling,
    State,
    Stats,
    exact_path,
)
from serving.errors import (
    EngineDied,
    EngineMissing,
    EngineUnavailable,
    Overloaded,
    PromptTooLong,
    ServingError,
    StartError,
)
from serving.kv.files import KvFiles, namespace
from serving.kv.settings import CHUNK_TOKENS, COMPUTE, KEEP, tiers_config, transfer_config, transfer_params
from serving.model import ModelFolder, check_window, resolve_model
from serving.prefill_speed import PrefillSpeed
from serving.prefix import Prefix, prefix_of
from serving.resident import LowerBlocks, ResidentBlocks

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)

# Measured on two cores: a larger budget makes steps longer and prefill no faster (docs/log.md).
_CPU_TOKEN_BUDGET = 512
_GPU_TOKEN_BUDGET = 16_384
_CPU_BLOCK_SIZE = 32
_KV_SHARE_OF_FREE_MEMORY = 0.25
_TIER_SHARE_OF_FREE_MEMORY = 0.25
_KV_WINDOWS = 16
# How long a question may have to wait for a background request that has just begun.
_CPU_BACKGROUND_S = 1.0
_GPU_BACKGROUND_S = 0.15
_HOLDS = 4
# A load from the host's memory takes at least as long, so what is computed sooner is not kept there (docs/warm.md).
_HOST_LOAD_S = 0.06
# What Python names shared memory, in a list of what a process has mapped.
_SHARED_MEMORY = re.compile(r" /dev/shm/(psm_\w+)$", re.MULTILINE)
# Keeping on disk is for one worker.
_SEVERAL_WORKERS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# Lengths of the prompts read before the first question, up to the first that takes so long. Sparse prefill leaves the
# beginning of every prompt dense, so it needs longer ones to show what it is worth.
_WARM_UP_TOKENS = (64, 512, 2048, 4096, 8192, 16384, 32768)
_WARM_UP_S = 0.5
_WARM_UP_LEAST: dict[PrefillMode, int] = {"exact": 64, "sparse": 4096}


@dataclass(slots=True)
class _Reading:
    """A prompt on its way through prefill; `done` counts the tokens believed cached, then those computed.

    `resident` were in memory when it began.
    """

    mode: PrefillMode
    total: int
    done: int
    alone: bool
    resident: int = 0
    longest_step: float | None = None


@dataclass(frozen=True, slots=True)
class _AtHand:
    """How many tokens at the start of a prompt need not be computed; the first `memory` of them are in memory already.

    `load_s` are the seconds that reading the others from files takes, if any, and as far as is known. With `compute`
    there are more files, and reading them takes longer than computing.
    """

    memory: int
    tokens: int
    load_s: float = 0.0
    compute: bool = False


class VllmEngine:
    """One vLLM engine, from start to death."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._state = State("stopped")
        self._llm: AsyncLLM | None = None
        self._processes: list[psutil.Process] = []
        self._shared_memory: set[str] = set()
        self._pending: set[str] = set()
        self._background: set[str] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._blocks = ResidentBlocks()
        self._host_blocks = LowerBlocks(self._blocks)
        self._events: BlockEvents | None = None
        self._reading: dict[str, _Reading] = {}
        self._speed: dict[PrefillMode, PrefillSpeed] = {"exact": PrefillSpeed(), "sparse": PrefillSpeed()}
        self._accel: Client | None = None
        self._environment: list[str] = []
        self._disk = _disk(config)
        # The most tokens of one prompt in a step that several share.
        self._share: int | None = None
        # Whether what has no room in the card's memory goes to the host's.
        self._tiers = False
        # Whether anything goes to the disk: the model, the workers or the host's memory may not allow it.
        self._keeps = False

    async def start(self) -> None:
        self._state = State("starting", "the model is loading")
        try:
            self._llm = await self._load_or_give_up()
            self._processes = await asyncio.to_thread(_engine_processes)
            self._shared_memory = await asyncio.to_thread(_shared_memory, self._processes)
            assert self._events is not None
            self._events.follow()
            self._state = State("ready")
            await self._warm_up()
        except BaseException as error:
            self._state = State("down", str(error))
            await self.stop()
            self._state = State("down", str(error))
            raise

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        self._state = State("stopped", "the engine was stopped")
        if llm is not None:
            if llm.output_handler is not None and not (self._pending or self._background):
                # It would log the engine's orderly end as a failure; with requests left, it has to tell them.
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown)
            # Its finaliser would shut it down once more, and fail when that happens at the interpreter's end.
            llm.shutdown = _nothing
        await asyncio.to_thread(_end, self._processes)
        await asyncio.to_thread(_free, self._shared_memory)
        # Nothing is in work any more, even if somebody has not taken the end of an answer yet.
        self._quiet.set()
        # The next engine may need other values, and must not take these for the user's.
        for name in self._environment:
            os.environ.pop(name, None)
        self._environment = []
        if self._accel is not None:
            self._accel.close()
            self._accel = None
        if self._events is not None:
            await self._events.close()
            self._events = None
        self._blocks.clear()
        self._host_blocks.clear()

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        llm = self._admit(request)
        at_hand = self._at_hand(request)
        params = _sampling_params(request, self._extra_args(request, at_hand))
        tokens = 0
        first = True
        async with self._read(request, at_hand.memory) as reading:
            stream = llm.generate(_tokens_input(request), params, request.id)
            try:
                async for output in stream:
                    completion = output.outputs[0]
                    tokens += len(completion.token_ids)
                    delta = Delta(
                        text=completion.text,
                        tokens=tokens,
                        finish_reason=completion.finish_reason,
                        logprobs=_plain_logprobs(completion.logprobs),
                    )
                    if first:
                        first = False
                        queue, read = _waits(output)
                        prefill = self._finish_reading(request, reading, output)
                        delta = replace(
                            delta, prefill=prefill, queue=queue, read=read, longest_step=reading.longest_step
                        )
                    yield delta
            except Exception as error:
                raise self._translate(error) from error
            finally:
                await stream.aclose()

    async def prefill(self, request: Request) -> Prefill:
        result = Prefill(len(request.prompt))
        one = replace(request, sampling=replace(request.sampling, max_tokens=1))
        async for delta in self.generate(one):
            result = delta.prefill or result
        return result

    async def hold(self, request: Request) -> None:
        llm = self._admit(request)
        one = replace(request, sampling=Sampling(max_tokens=1))
        params = _sampling_params(one, self._extra_args(one, self._at_hand(one)))

        async def prompts() -> AsyncGenerator[StreamingInput]:
            from vllm.engine.protocol import StreamingInput

            # The last token is computed anew whatever is cached, so it must not be one of the last whole block.
            yield StreamingInput(prompt=_tokens_input(replace(request, prompt=[*request.prompt, request.prompt[0]])))
            # vLLM keeps the blocks of a prompt that may still go on.
            await asyncio.Event().wait()

        stream = llm.generate(prompts(), params, request.id)
        try:
            async for _ in stream:
                # The first token is of no use to anybody; what counts is that there are no more.
                continue
        except Exception as error:
            raise self._translate(error) from error
        finally:
            await stream.aclose()

    async def idle(self) -> None:
        await self._quiet.wait()

    async def progress(self, request_id: str) -> Progress | None:
        reading = self._reading.get(request_id)
        if reading is None:
            return None
        is_next = next(iter(self._reading)) == request_id
        return Progress(started=is_next, done=reading.done, total=reading.total)

    def plan(self, request: Request) -> Plan:
        at_hand = self._at_hand(request)
        computed = len(request.prompt) - at_hand.tokens
        own = self._speed[request.prefill].estimate(computed, at_hand.tokens)
        before = [self._remaining(reading) for reading in self._reading.values()]
        eta = None if own is None else own + at_hand.load_s + sum(before)
        path = exact_path(len(request.prompt), at_hand.tokens)
        if request.prefill == "sparse" and path == "exact":
            path = "sparse"
        return Plan(path=path, tokens_to_compute=computed, eta_s=eta)

    def estimate(self, computed: int, cached: int, mode: PrefillMode = "exact") -> float | None:
        return self._speed[mode].estimate(computed, cached)

    def prefix(self, salt: str, prompt: Sequence[int]) -> Prefix:
        return prefix_of(salt, prompt, self._block)

    def resident(self, prefix: Prefix) -> int:
        return self._blocks.tokens(prefix)

    def forget(self, salt: str) -> None:
        if self._disk is not None:
            self._disk.remove(namespace(salt))

    def retain(self, salts: Collection[str]) -> None:
        if self._disk is not None:
            for name in self._disk.namespaces() - set(map(namespace, salts)):
                self._disk.remove(name)

    def kv_disk(self) -> KvDisk | None:
        return self._disk.look() if self._disk is not None and self._keeps else None

    @property
    def keeps_in_host_memory(self) -> bool:
        """Whether what was read to be kept goes from the card's memory to the host's."""
        return self._tiers

    async def clear_memory(self) -> None:
        """Give up every cached block of the device; slower memory keeps its own.

        Raises:
            EngineUnavailable: the engine takes no requests now.
            ServingError: a request, or a block on its way to slower memory, still needs some.
        """
        if self._llm is None:
            raise EngineUnavailable(f"the engine is {self.state.phase}: {self.state.reason}")
        if not await self._llm.reset_prefix_cache():
            raise ServingError("the cache is in use and cannot be cleared; wait until nothing is read or answered")

    def count_tokens(self, text: str) -> int:
        return self._chat.count(text)

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        return self._chat.render(messages)

    @property
    def limits(self) -> Limits:
        budget = self._config.token_budget or (_CPU_TOKEN_BUDGET if _on_cpu() else _GPU_TOKEN_BUDGET)
        return Limits(
            window=self._window,
            token_budget=budget,
            max_pending=self._config.max_pending,
            block=self._block,
            background_s=_CPU_BACKGROUND_S if _on_cpu() else _GPU_BACKGROUND_S,
            holds=_HOLDS,
        )

    @property
    def state(self) -> State:
        if self._state.ready and (self._llm is None or self._llm.errored):
            return State("down", self._cause_of_death())
        return self._state

    @property
    def stats(self) -> Stats:
        return Stats(pending=len(self._pending), kv_tokens=self._kv_tokens if self._llm else None)

    @property
    def capabilities(self) -> Capabilities:
        selector = None if self._accel is None else self._accel.selector
        return Capabilities(
            self._folder.name,
            cached_tokens=True,
            salts=True,
            logprobs=True,
            sparse=selector is not None,
            progress=True,
            selector=selector,
            fingerprint=self._fingerprint,
        )

    # --- start ---

    @cached_property
    def _folder(self) -> ModelFolder:
        weights = self._config.engine_args.get("load_format") != "dummy"
        return resolve_model(self._config.model, self._config.models_dir.expanduser(), weights=weights)

    @cached_property
    def _chat(self) -> ChatTokenizer:
        return ChatTokenizer(self._folder)

    @property
    def _window(self) -> int:
        if self._llm is not None:
            return int(self._llm.model_config.max_model_len)
        return self._config.max_model_len or self._folder.window or 8192

    @cached_property
    def _kv_tokens(self) -> int:
        assert self._llm is not None
        cache = self._llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    @property
    def _block(self) -> int:
        if self._llm is not None:
            return int(self._llm.vllm_config.cache_config.block_size)
        return int(self._config.engine_args.get("block_size") or _CPU_BLOCK_SIZE)

    @cached_property
    def _fingerprint(self) -> str:
        settings = json.dumps(dict(self._config.engine_args), sort_keys=True, default=str)
        parts = [self._folder.fingerprint, settings, _vllm_version()]
        return sha256("\n".join(parts).encode()).hexdigest()

    async def _load_or_give_up(self) -> AsyncLLM:
        """Load in a thread. A thread cannot be cancelled, so its processes are ended, which makes it fail soon."""
        loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            while not (await asyncio.wait({loading}, timeout=0.2))[0]:
                await asyncio.to_thread(_end, _engine_processes())
            if loading.exception() is None:
                await asyncio.to_thread(loading.result().shutdown)
            raise

    def _load(self) -> AsyncLLM:
        """Start the engine's processes; blocks for as long as that takes."""
        _require_vllm()
        check_window(self._folder, self._config.max_model_len)
        self._chat.require_template()
        self._accel = Client() if self._config.acceleration else None
        self._events = BlockEvents(self._blocks, self._host_blocks)
        more = {**self._events.environment, **({} if self._accel is None else self._accel.environment)}
        self._environment = _set_environment(self._config, self._folder, more)
        orphans.claim()
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            return AsyncLLM.from_engine_args(self._engine_args(), stat_loggers=[self._step_logger()])
        except Exception as error:
            raise StartError(f"the engine did not start: {error}") from error

    def _engine_args(self) -> AsyncEngineArgs:
        from vllm.engine.arg_utils import AsyncEngineArgs

        # vLLM refuses a share that no prompt can have.
        self._share = min(self.limits.token_budget // 2, self._window)
        transfer = self._kv_transfer()
        self._keeps = transfer is not None
        arguments: dict[str, Any] = {
            "model": self._folder.source,
            "served_model_name": self._folder.name,
            "max_model_len": self._config.max_model_len,
            "max_num_batched_tokens": self.limits.token_budget,
            # A step is shared as soon as somebody else has something to read, too.
            "long_prefill_token_threshold": self._share,
            "max_num_seqs": self._config.max_running + _HOLDS,
            "kv_events_config": self._kv_events(),
            "kv_transfer_config": transfer,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "enable_logging_iteration_details": True,
            "use_tqdm_on_load": False,
            "seed": 0,
        }
        if _on_cpu():
            arguments |= {"enforce_eager": True, "block_size": _CPU_BLOCK_SIZE}
        return AsyncEngineArgs(**arguments | dict(self._config.engine_args))

    def _kv_events(self) -> Any:
        from vllm.config import KVEventsConfig

        assert self._events is not None
        return KVEventsConfig(**self._events.settings)

    def _kv_transfer(self) -> Any:
        folder, fingerprint = self._config.kv_disk, self._fingerprint
        if folder is None or not self._folder.keeps_every_token:
            return None
        if any(int(self._config.engine_args.get(name) or 1) > 1 for name in _SEVERAL_WORKERS):
            return None
        from vllm.config import KVTransferConfig

        quota = self._config.kv_disk_gib * 2**30
        if _on_cpu():
            return KVTransferConfig(**transfer_config(folder, quota, fingerprint)) if quota else None
        memory = _host_memory(self._config.kv_memory_gib)
        self._tiers = memory > 0
        return KVTransferConfig(**tiers_config(folder, quota, memory, fingerprint)) if self._tiers else None

    def _step_logger(self) -> Any:
        """A vLLM stat logger that tells this engine how many prompt tokens each step has read."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        engine = self

        class StepLogger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                """Nothing to set up; vLLM requires the signature."""

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                details = getattr(scheduler_stats, "iteration_details", None)
                if details is not None:
                    engine._advance(details.num_ctx_tokens, details.elapsed_ms / 1000)

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        return StepLogger

    async def _warm_up(self) -> None:
        """Read some prompts of random tokens: pays one-time costs before the first question, and measures speed."""
        vocabulary = len(self._chat.tokenizer)
        draw = random.Random(0)
        modes: tuple[PrefillMode, ...] = ("exact", "sparse") if self.capabilities.sparse else ("exact",)
        for mode in modes:
            seconds = 0.0
            for length in _WARM_UP_TOKENS:
                if length > _WARM_UP_LEAST[mode] and seconds > _WARM_UP_S:
                    break
                prompt = [draw.randrange(vocabulary) for _ in range(min(length, self._window - 2))]
                salt, id = uuid.uuid4().hex, f"warm-up-{uuid.uuid4().hex}"
                started = time.perf_counter()
                await self.prefill(Request(prompt=prompt, id=id, salt=salt, prefill=mode))
                seconds = time.perf_counter() - started
                if length >= self._window:
                    break

    # --- one request ---

    def _admit(self, request: Request) -> AsyncLLM:
        state = self.state
        if not state.ready or self._llm is None:
            raise EngineUnavailable(f"the engine is {state.phase}: {state.reason}")
        if not request.background and len(self._pending) >= self._config.max_pending:
            raise Overloaded(f"{len(self._pending)} questions wait already; try again in a moment")
        if len(request.prompt) + request.sampling.max_tokens > self._window:
            raise PromptTooLong(len(request.prompt), request.sampling.max_tokens, self._window)
        return self._llm

    @contextlib.asynccontextmanager
    async def _read(self, request: Request, cached: int) -> AsyncIterator[_Reading]:
        alone = not (self._pending or self._background)
        reading = _Reading(request.prefill, len(request.prompt), done=cached, alone=alone, resident=cached)
        for other in self._reading.values():
            other.alone = False
        mine = self._background if request.background else self._pending
        mine.add(request.id)
        self._reading[request.id] = reading
        if self._pending:
            self._quiet.clear()
        try:
            yield reading
        finally:
            mine.discard(request.id)
            self._reading.pop(request.id, None)
            if not self._pending:
                self._quiet.set()

    def _extra_args(self, request: Request, at_hand: _AtHand) -> dict[str, Any]:
        given = {} if self._accel is None else self._accel.extra_args(request)
        if self._tiers:
            computing = self._speed["exact"].estimate(len(request.prompt), 0)
            # vLLM loads whatever it finds there.
            keep = request.keep and (computing is None or computing > _HOST_LOAD_S)
            params = transfer_params(namespace(request.salt), keep=keep, compute=at_hand.compute)
            return given | {"kv_transfer_params": params}
        return given | ({KEEP: 1} if request.keep else {}) | ({COMPUTE: 1} if at_hand.compute else {})

    def _at_hand(self, request: Request) -> _AtHand:
        """What of a prompt need not be computed, which the last token always must.

        A salt has one document set, and what is kept of it on disk is the beginning of its prompts.
        """
        salt, prompt, block = request.salt, request.prompt, self._block
        memory = tokens = self._blocks.cached_tokens(salt, prompt, block)
        whole = (len(prompt) - 1) // block * block
        if request.prefill != "exact" or memory == whole:
            return _AtHand(memory, tokens)
        if self._tiers:
            tokens = max(memory, self._host_blocks.cached_tokens(salt, prompt, block, CHUNK_TOKENS))
        name = namespace(salt)
        kept = 0 if self._disk is None else self._disk.count(name) * (CHUNK_TOKENS if self._tiers else block)
        if self._disk is None or min(whole, kept) <= tokens:
            return _AtHand(memory, tokens)
        more = min(whole, kept) - tokens
        load_s = (self._disk.seconds(name) or 0.0) * more / kept
        compute_s = self._speed["exact"].estimate(more, tokens)
        if compute_s is not None and load_s > compute_s:
            return _AtHand(memory, tokens, compute=True)
        return _AtHand(memory, tokens + more, load_s)

    def _advance(self, prompt_tokens: int, seconds: float) -> None:
        """Credit a step's prompt tokens to the prompts being read.

        The scheduler serves them in order of admission, each with at most a share of the step if there are several.
        """
        several = len(self._reading) > 1
        for most in (self._share if several and self._share else prompt_tokens, prompt_tokens):
            for reading in self._reading.values():
                taken = min(most, prompt_tokens, reading.total - reading.done)
                reading.done += taken
                prompt_tokens -= taken
                if taken:
                    reading.longest_step = max(seconds, reading.longest_step or 0.0)

    def _finish_reading(self, request: Request, reading: _Reading, output: RequestOutput) -> Prefill:
        self._reading.pop(request.id, None)
        cached = output.num_cached_tokens
        # What was read from disk says nothing about the speed of reading anew.
        loaded = cached is not None and cached > reading.resident + self._block
        if reading.alone and cached is not None and not loaded and output.metrics is not None:
            seconds = output.metrics.first_token_ts - output.metrics.scheduled_ts
            self._speed[reading.mode].observe(reading.total - cached, cached, seconds)
        return read_exactly(request, cached) if self._accel is None else self._accel.prefill(request, cached)

    def _remaining(self, reading: _Reading) -> float:
        """Seconds until a prompt that is being read is read, as far as can be told."""
        return self._speed[reading.mode].estimate(reading.total - reading.done, reading.done) or 0.0

    # --- death ---

    def _translate(self, error: Exception) -> ServingError:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError) or self._llm is None or self._llm.errored:
            return EngineDied(f"{self._cause_of_death()} while it worked on this question; ask again in a minute")
        return ServingError(f"the engine refused the request: {error}")

    def _cause_of_death(self) -> str:
        gone = [str(process.pid) for process in self._processes if not _alive(process)]
        return f"an engine process ended unexpectedly (pid {', '.join(gone) or 'unknown'})"


def _disk(config: EngineConfig) -> KvFiles | None:
    """The files of prompts that are kept, if there are to be any."""
    if config.kv_disk is None or not config.kv_disk_gib:
        return None
    return KvFiles(config.kv_disk, config.kv_disk_gib * 2**30)


def _host_memory(gib: int | None) -> int:
    """Bytes of the host's memory for what has no room on the card; by default a share of what is free.

    vLLM takes them from /dev/shm, which is small in containers that were not given more.
    """
    if gib is not None:
        return gib * 2**30
    shared = psutil.disk_usage("/dev/shm").free  # noqa: S108 - looked at, not written to
    allowed = min(psutil.virtual_memory().available, shared) * _TIER_SHARE_OF_FREE_MEMORY
    return int(allowed) // 2**30 * 2**30


def _tokens_input(request: Request) -> Any:
    from vllm.inputs import tokens_input

    return tokens_input(list(request.prompt), cache_salt=request.salt)


def _sampling_params(request: Request, extra_args: dict[str, Any]) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=list(sampling.stop),
        logprobs=sampling.logprobs,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args,
    )


def _waits(output: RequestOutput) -> tuple[float | None, float | None]:
    """Seconds until the request was scheduled, and from then to its first token."""
    metrics = output.metrics
    if metrics is None:
        return None, None
    return max(0.0, metrics.scheduled_ts - metrics.queued_ts), metrics.first_token_ts - metrics.scheduled_ts


def _plain_logprobs(logprobs: Any) -> list[dict[int, float]] | None:
    if not logprobs:
        return None
    return [{token: entry.logprob for token, entry in position.items()} for position in logprobs]


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise EngineMissing(
            "no vLLM is installed; install the CPU build with 'pip install foreword[cpu]' "
            "or the CUDA build with 'pip install foreword[gpu]'"
        )
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise EngineMissing(
            "the installed vLLM finds no device: the CUDA build needs an NVIDIA driver; "
            "without a GPU install the CPU build with 'pip install foreword[cpu]'"
        )


def _nothing() -> None:
    """In place of a method that must not run again."""


def _vllm_version() -> str:
    from vllm import __version__

    return str(__version__)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _set_environment(config: EngineConfig, folder: ModelFolder, more: Mapping[str, str]) -> list[str]:
    """Set what vLLM and its children read, and tell what was set; what the user has set stands."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": config.log_level,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TORCH_CPP_LOG_LEVEL": config.log_level,
        # Deprecations inside vLLM are not for our users.
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TOKENIZERS_PARALLELISM": "false",
    }
    defaults |= more
    if not folder.on_hub:
        defaults["HF_HUB_OFFLINE"] = "1"
    if _on_cpu():
        cores = sorted(os.sched_getaffinity(0))
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_gib or _kv_gib(folder, config.max_model_len))
    else:
        # It is compiled at the first start, which takes minutes and a CUDA toolkit, and draws no greedy answer sooner.
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    new = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in new})
    return new


def _kv_gib(folder: ModelFolder, max_model_len: int | None) -> int:
    """KV space on a CPU in GiB: room for some whole windows, at most a quarter of the free memory, at least one."""
    allowed = int(psutil.virtual_memory().available * _KV_SHARE_OF_FREE_MEMORY / 2**30)
    window = max_model_len or folder.window
    if window is None or folder.kv_bytes_per_token is None:
        return max(1, allowed)
    wanted = -(-folder.kv_bytes_per_token * window * _KV_WINDOWS // 2**30)
    return max(1, min(wanted, allowed))


def _engine_processes() -> list[psutil.Process]:
    """vLLM's children of this process, known by the titles they give themselves."""
    return [child for child in psutil.Process().children(recursive=True) if _title(child).startswith("VLLM::")]


def _shared_memory(processes: list[psutil.Process]) -> set[str]:
    """Names of the shared memory through which an engine's processes talk."""
    names: set[str] = set()
    for process in processes:
        # One that has ended has nothing mapped.
        with contextlib.suppress(OSError):
            names.update(_SHARED_MEMORY.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return names


def _free(names: set[str]) -> None:
    """Remove shared memory that processes have left behind because they were killed."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            left = SharedMemory(name)
            left.close()
            left.unlink()


def _title(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return ""


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # gone between the two questions
        return False


def _end(processes: list[psutil.Process]) -> None:
    """Kill what an engine left behind; a worker can outlive a core that was killed."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
