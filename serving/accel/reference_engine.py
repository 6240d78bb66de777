"""An engine for measuring answers: sparse prefill as a mask over dense attention, on any device, with transformers.

What is read is chosen by the same functions as in the backend, so its answers tell what a selector costs in quality;
nothing is skipped, so its times tell nothing. One request at a time, each prompt in one step.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from serving.accel import channel
from serving.accel.policy import Selector, Tiling, group_means, keep, page_shares
from serving.accel.requests import Asked, understood
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
    EngineUnavailable,
    ModelUnusable,
    Overloaded,
    PromptTooLong,
    ServingError,
    StartError,
)
from serving.model import ModelFolder, check_window, resolve_model
from serving.prefix import Prefix, prefix_of

_T = TypeVar("_T")
_ATTENTION = "foreword_reference"
_SALTS = 2
# Booleans of a mask at a time; the kernel makes numbers of them.
_MASK_ELEMENTS = 2**26
# Some tokenizers write a token otherwise at the beginning of a text, so the last tokens of the prompt go before it.
_TOKENS_BEFORE = 8


@dataclass(slots=True)
class _Sequence:
    """Tokens whose keys and values the cache holds."""

    tokens: list[int]
    cache: Any


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer is told; `tiles` is None when all of the step is read exactly."""

    asked: Asked
    tiles: Tiling | None = None
    layers: int = 0


class ReferenceEngine:
    """One model in this process, from start to death."""

    def __init__(self, config: EngineConfig, page: int = 32) -> None:
        """`page` is the number of tokens of a page, which is what a selector keeps or leaves out."""
        self._config = config
        self._page = page
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._state = State("stopped")
        self._model: Any = None
        self._sequences: dict[str, _Sequence] = {}
        self._pending = 0
        self._turn = asyncio.Lock()
        # One thread: work that its request no longer waits for still ends before the next begins.
        self._thread: ThreadPoolExecutor | None = None

    async def start(self) -> None:
        self._state = State("starting", "the model is loading")
        self._thread = ThreadPoolExecutor(max_workers=1)
        try:
            self._model = await self._work(self._load)
            self._state = State("ready")
            # Tells whether the model is one that can be computed here.
            await self.prefill(Request([0, 1], id="first", salt=""))
        except BaseException as error:
            await self.stop()
            self._state = State("down", str(error))
            raise

    async def stop(self) -> None:
        self._state = State("stopped", "the engine was stopped")
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown)
        self._model = None
        self._sequences.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self._admit(request)
        self._pending += 1
        arrived = time.perf_counter()
        try:
            async with self._turn:
                started = time.perf_counter()
                logits, prefill = await self._work(self._read, request)
                read = time.perf_counter() - started
                async for delta in self._answer(request, logits):
                    if delta.tokens == 1:
                        queue = started - arrived
                        delta = replace(delta, prefill=prefill, queue=queue, read=read, longest_step=read)
                    yield delta
        finally:
            self._pending -= 1

    async def prefill(self, request: Request) -> Prefill:
        result = Prefill(len(request.prompt))
        one = replace(request, sampling=replace(request.sampling, max_tokens=1))
        async for delta in self.generate(one):
            result = delta.prefill or result
        return result

    async def progress(self, request_id: str) -> Progress | None:  # noqa: ARG002 - a prompt is one step
        return None

    def plan(self, request: Request) -> Plan:
        cached = self._cached(request)
        path = exact_path(len(request.prompt), cached)
        if request.prefill == "sparse" and path == "exact":
            path = "sparse"
        return Plan(path=path, tokens_to_compute=len(request.prompt) - cached, eta_s=None)

    async def hold(self, request: Request) -> None:
        raise ServingError(f"the reference engine keeps nothing, so the request {request.id!r} cannot be held")

    async def idle(self) -> None:
        async with self._turn:
            return

    def estimate(
        self,
        computed: int,  # noqa: ARG002
        cached: int,  # noqa: ARG002
        mode: PrefillMode = "exact",  # noqa: ARG002 - it measures no speeds
    ) -> float | None:
        return None

    def prefix(self, salt: str, prompt: Sequence[int]) -> Prefix:
        return prefix_of(salt, prompt, 1)

    def resident(self, prefix: Prefix) -> int:  # noqa: ARG002 - what it caches is its own affair
        return 0

    def forget(self, salt: str) -> None:
        """There is no slower memory."""

    def retain(self, salts: Collection[str]) -> None:
        """There is no slower memory."""

    def kv_disk(self) -> KvDisk | None:
        return None

    def count_tokens(self, text: str) -> int:
        return self._chat.count(text)

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        return self._chat.render(messages)

    @property
    def limits(self) -> Limits:
        window = self._config.max_model_len or self._folder.window or 8192
        return Limits(
            window=window,
            token_budget=window,
            max_pending=self._config.max_pending,
            block=1,
            background_s=math.inf,
            holds=0,
        )

    @property
    def state(self) -> State:
        return self._state

    @property
    def stats(self) -> Stats:
        return Stats(pending=self._pending)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            self._folder.name,
            cached_tokens=True,
            salts=True,
            logprobs=True,
            sparse=True,
            progress=False,
            selector=str(Selector()),
        )

    # --- start ---

    @cached_property
    def _folder(self) -> ModelFolder:
        return resolve_model(self._config.model, self._config.models_dir.expanduser())

    @cached_property
    def _chat(self) -> ChatTokenizer:
        return ChatTokenizer(self._folder)

    @cached_property
    def _ends(self) -> set[int]:
        """The tokens that end an answer."""
        stated = self._model.generation_config.eos_token_id
        given = stated if isinstance(stated, list) else [stated]
        return {int(token) for token in (*given, self._chat.tokenizer.eos_token_id) if token is not None}

    def _load(self) -> Any:
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils import logging

        arguments = {name: value for name, value in self._config.engine_args.items() if value is not None}
        dtype = arguments.pop("dtype", "auto")
        if arguments:
            raise StartError(
                f"the reference engine has no {min(arguments)!r}; of the engine's arguments it takes dtype"
            )
        check_window(self._folder, self._config.max_model_len)
        self._chat.require_template()
        logging.disable_progress_bar()
        AttentionInterface.register(_ATTENTION, _attention)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self._folder.source, dtype=dtype, attn_implementation=_ATTENTION
            )
            return model.to(self._device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise StartError(f"the engine did not start: {error}") from error

    # --- one request ---

    def _admit(self, request: Request) -> None:
        if not self._state.ready:
            raise EngineUnavailable(f"the engine is {self._state.phase}: {self._state.reason}")
        if self._pending >= self._config.max_pending:
            raise Overloaded(f"{self._pending} questions wait already; try again in a moment")
        if len(request.prompt) + request.sampling.max_tokens > self.limits.window:
            raise PromptTooLong(len(request.prompt), request.sampling.max_tokens, self.limits.window)

    async def _work(self, call: Callable[..., _T], *given: Any) -> _T:
        """Run in the engine's thread."""
        if self._thread is None:
            raise EngineDied("the engine was stopped while it worked on this question; ask again")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *given)
        except RuntimeError as error:
            raise ServingError(f"the engine refused the request: {error}") from error

    async def _answer(self, request: Request, logits: Tensor) -> AsyncIterator[Delta]:
        """A delta for each token, the first drawn from `logits` [vocabulary]."""
        sampling = request.sampling
        text = _Text(self._decode, request.prompt[-_TOKENS_BEFORE:], sampling.stop)
        generator = torch.Generator()
        generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
        for count in range(1, sampling.max_tokens + 1):
            token, logprobs = draw(logits, sampling, generator)
            ended = token in self._ends
            piece = "" if ended else text.add(token)
            finish = "stop" if ended or text.stopped else "length" if count == sampling.max_tokens else None
            if finish is not None:
                piece += text.rest()
            yield Delta(piece, count, finish, logprobs=None if logprobs is None else [logprobs])
            if finish is not None:
                return
            logits = await self._work(self._go_on, request.salt, token)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._chat.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _read(self, request: Request) -> tuple[Tensor, Prefill]:
        """Compute what is not cached of a prompt: the logits of its last token [vocabulary], and how it was read."""
        prompt, cached = list(request.prompt), self._cached(request)
        sequence = self._resume(request.salt, cached)
        asked = understood(len(prompt), _extra_args(request), sparse=False)
        step = self._step(asked, cached, len(prompt) - cached)
        logits = self._forward(request.salt, sequence, prompt[cached:], step)
        exact = exact_path(len(prompt), cached)
        told = Prefill(prompt_tokens=len(prompt), cached_tokens=cached, path=exact, density=1.0)
        if not asked.sparse:
            return logits, told
        report = asked.report()
        return logits, replace(
            told,
            path="sparse" if asked.was_sparse else exact,
            density=asked.kept_pages / asked.total_pages if asked.total_pages else 1.0,
            kept_pages=asked.kept_pages,
            total_pages=asked.total_pages,
            selector_s=asked.selector_s,
            fallback_reason=None if exact == "warm" else report["fallback_reason"],
        )

    def _step(self, asked: Asked, first: int, tokens: int) -> _Step:
        """What is to be done in every layer; what is read densely is counted here, for all layers at once."""
        if asked.sparse and asked.refusal is None and self._page % asked.selector.span:
            asked.refusal = "span does not divide page"
        if not asked.sparse or asked.refusal is not None:
            return _Step(asked)
        tiles = Tiling(first, tokens, asked.dense_from, self._page, asked.selector)
        layers = int(self._model.config.num_hidden_layers)
        if not asked.takes(tiles, int(self._model.config.num_attention_heads) * layers):
            return _Step(asked)
        return _Step(asked, tiles.on(self._device), layers)

    def _go_on(self, salt: str, token: int) -> Tensor:
        """The logits after one more token of the answer, [vocabulary]."""
        return self._forward(salt, self._sequences[salt], [token], _Step(Asked(0)))

    def _forward(self, salt: str, sequence: _Sequence, tokens: list[int], step: _Step) -> Tensor:
        # Whatever breaks off leaves a cache of which nobody knows what it holds.
        self._sequences.pop(salt, None)
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                past_key_values=sequence.cache,
                use_cache=True,
                logits_to_keep=1,
                step=step,
            )
            logits = output.logits[0, -1].float().cpu()
        sequence.tokens += tokens
        self._sequences[salt] = sequence
        return logits

    def _cached(self, request: Request) -> int:
        """Tokens of a prompt that need not be computed: whole pages, and never the last token."""
        sequence = self._sequences.get(request.salt)
        if sequence is None:
            return 0
        pairs = zip(sequence.tokens, request.prompt[:-1], strict=False)
        same = next((n for n, (left, right) in enumerate(pairs) if left != right), None)
        if same is None:
            same = min(len(sequence.tokens), len(request.prompt) - 1)
        return same // self._page * self._page

    def _resume(self, salt: str, cached: int) -> _Sequence:
        """The sequence of a salt, cut down to what is used of it; the salts that were used last are kept."""
        from transformers import DynamicCache

        sequence = self._sequences.pop(salt, None)
        while len(self._sequences) >= _SALTS:
            del self._sequences[next(iter(self._sequences))]
        if sequence is None or not cached:
            return _Sequence([], DynamicCache())
        if surplus := len(sequence.tokens) - cached:
            sequence.cache.crop(-surplus)
            del sequence.tokens[cached:]
        return sequence


class _Text:
    """The text of an answer, as its tokens come."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int], stop: Sequence[str]) -> None:
        self._decode = decode
        self._before = list(before)
        self._begin = len(decode(self._before))
        self._stop = stop
        self._tokens: list[int] = []
        self._text = ""
        self._given = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """What is certain to be part of the answer and has not been given before."""
        self._tokens.append(token)
        # A character may take several tokens; until the last of them it is decoded as U+FFFD.
        self._text = self._decode([*self._before, *self._tokens])[self._begin :].rstrip("\ufffd")
        found = [place for stop in self._stop if (place := self._text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._text = self._text[: min(found)]
        # The beginning of what may become a stop string waits.
        return self._give(len(self._text) - max((len(stop) - 1 for stop in self._stop), default=0))

    def rest(self) -> str:
        """What has been held back; the answer is over."""
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        piece = self._text[self._given : max(end, self._given)]
        self._given += len(piece)
        return piece


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, dict[int, float] | None]:
    """A token, and if wanted its logarithm and those of the likeliest ones, as the model gives them.

    Args:
        logits: [vocabulary], float32.
    """
    if sampling.temperature <= 0:
        token = int(logits.argmax())
    else:
        shares, order = torch.softmax(logits / sampling.temperature, -1).sort(descending=True)
        # The token that crosses the limit is among them.
        shares[shares.cumsum(-1) - shares >= sampling.top_p] = 0
        token = int(order[torch.multinomial(shares, 1, generator=generator)])
    if sampling.logprobs is None:
        return token, None
    logprobs = torch.log_softmax(logits, -1)
    top = logprobs.topk(sampling.logprobs)
    likeliest = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return token, {token: float(logprobs[token])} | likeliest


def _extra_args(request: Request) -> dict[str, Any]:
    given = {
        channel.PREFILL: request.prefill,
        channel.SELECTOR: request.selector,
        channel.DENSE_FROM: request.dense_from,
    }
    return {name: value for name, value in given.items() if value is not None}


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers gives it; there is one sequence, without padding
    *,
    step: _Step,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        query: [1, query heads, tokens, head size]; `key` and `value` [1, KV heads, positions, head size], whose last
            positions are the queries' own.
    """
    if fault := next((name for name in ("sliding_window", "softcap", "s_aux") if rest.get(name) is not None), None):
        raise ModelUnusable(f"the reference engine has plain causal attention only, and the model uses {fault}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if step.tiles is None:
        out = exact_attention(query[0], key[0], value[0], scale)
    else:
        kept = _choose(module.layer_idx, query[0], key[0], scale, step)
        out = masked_attention(query[0], key[0], value[0], scale, kept, step.tiles)
    return out.transpose(0, 1)[None], None


def _choose(layer: int, query: Tensor, key: Tensor, scale: float, step: _Step) -> Tensor:
    """The pages that each tile reads in this layer, bool [query heads, tiles, pages]; counts them."""
    asked, tiles = step.asked, step.tiles
    assert tiles is not None
    started = _now(query.device)
    means = dense_span_means(key, tiles.selector.span, tiles.page)
    shares = page_shares(group_means(query.transpose(0, 1), tiles), means, scale, tiles)
    kept = keep(shares, tiles.selector.at(layer, step.layers), tiles)
    asked.selector_s += _now(query.device) - started
    kept = kept.repeat_interleave(len(query) // len(kept), 0)
    asked.kept_pages += int(kept.sum())
    asked.total_pages += tiles.total * len(query)
    return kept


def dense_span_means(key: Tensor, span: int, page: int) -> Tensor:
    """As `page_means.span_means`, of keys that lie in order: [KV heads, head size, pages * page / span] in float32.

    Args:
        key: [KV heads, tokens, head size].
    """
    heads, tokens, size = key.shape
    spans = pad(key, (0, 0, 0, -tokens % page)).reshape(heads, -1, span, size)
    # Rounded like those of the backend, which come out of a product in the keys' own type.
    means = spans.mean(2, dtype=torch.float32).to(key.dtype).float()
    if rest := tokens % span:
        means[:, tokens // span] *= span / rest
    return means.transpose(1, 2)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, [query heads, tokens, head size]. Arguments as of `masked_attention`."""
    heads, tokens, size = query.shape
    if tokens == 1:
        grouped = query.view(1, len(key), heads // len(key), size)
        return scaled_dot_product_attention(grouped, key[None], value[None], scale=scale).view(heads, 1, size)
    if tokens == key.shape[1]:
        whole = (query[None], key[None], value[None])
        return scaled_dot_product_attention(*whole, is_causal=True, scale=scale, enable_gqa=True)[0]
    return masked_attention(query, key, value, scale)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, kept: Tensor | None = None, tiles: Tiling | None = None
) -> Tensor:
    """Causal attention over the kept pages of each tile, [query heads, tokens, head size].

    Args:
        query: [query heads, tokens, head size]; the last tokens of the keys.
        key, value: [KV heads, positions, head size].
        kept: [query heads, tiles, pages], bool, of `tiles`; None keeps everything.
    """
    heads, tokens, size = query.shape
    kv_heads, positions, _ = key.shape
    first = positions - tokens
    rows = max(1, _MASK_ELEMENTS // (heads * positions))
    out = torch.empty_like(query)
    for begin in range(0, tokens, rows):
        end = min(begin + rows, tokens)
        own = torch.arange(first + begin, first + end, device=query.device)
        seen = (torch.arange(first + end, device=query.device) <= own[:, None]).expand(heads, -1, -1)
        if kept is not None and tiles is not None:
            tile = own // tiles.selector.tile - first // tiles.selector.tile
            seen = seen & kept[:, tile].repeat_interleave(tiles.page, 2)[..., : first + end]
        # The query heads of a KV head are rows of one head, so nothing is repeated.
        attended = scaled_dot_product_attention(
            query[:, begin:end].reshape(1, kv_heads, -1, size),
            key[None, :, : first + end],
            value[None, :, : first + end],
            attn_mask=seen.reshape(1, kv_heads, -1, first + end),
            scale=scale,
        )
        out[:, begin:end] = attended.view(heads, end - begin, size)
    return out


def _now(device: torch.device) -> float:
    """The time when everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
