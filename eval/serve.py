"""Serves prompts from an engine of this process, timed; and opens whatever server an arm needs."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from app.prompt import Excerpt, Source, build_messages, question_tokens
from app.scope import shared_tokens
from eval.arms import Arm, Variant
from eval.errors import BadUsage
from eval.remote import RemoteServer
from eval.served import Served, Server, checked, gaps_between, without_question
from eval.tasks.task import Question
from serving.config import EngineConfig
from serving.engine import Engine, Message, Request, Sampling
from serving.errors import ServingError
from serving.vllm_engine import VllmEngine

EngineName = Literal["vllm", "reference"]
OpenServer = Callable[[Variant], contextlib.AbstractAsyncContextManager[Server]]


# What an engine that computes with transformers, in one step and with a cache of its own, cannot be told.
_VLLM_ONLY = ("chunk", "kv", "quant")


def engine_named(name: str, arms: Sequence[Arm]) -> EngineName:
    """The engine of this name, which must be one that can serve all the arms.

    Raises:
        BadUsage: there is no such engine, or an arm has a setting that it does not have.
    """
    engines: tuple[EngineName, ...] = get_args(EngineName)
    engine = next((known for known in engines if known == name), None)
    if engine is None:
        raise BadUsage(f"there is no engine {name!r}; use {' or '.join(engines)}")
    for arm in arms if engine == "reference" else ():
        for setting in _VLLM_ONLY:
            if getattr(arm.variant, setting) is not None:
                raise BadUsage(
                    f"the arm {arm.name!r} cannot be measured: the reference engine has no {setting}; "
                    "leave the setting out or measure with --engine vllm"
                )
    return engine


async def probe(arms: Sequence[Arm], open_server: OpenServer) -> None:
    """Ask every foreign server for its model before the first engine is started.

    Raises:
        BadUsage: one of them does not answer.
    """
    for variant in {arm.variant for arm in arms if arm.variant.url is not None}:
        async with open_server(variant) as server:
            for arm in arms:
                if arm.variant == variant:
                    server.require(arm)


def messages_of(sources: Sequence[Source], question: Question, keep: float = 1.0) -> list[Message]:
    """The service's own prompt for a question, with the answer's beginning if there is one; of each document the first
    share only."""
    given = [_shortened(source, keep) for source in sources] if keep < 1 else sources
    begun = [Message("assistant", question.lead)] if question.lead else []
    return [*build_messages(given, question.text), *begun]


class EngineServer:
    """Serves prompts from an engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def about(self) -> dict[str, Any]:
        limits, capabilities = self._engine.limits, self._engine.capabilities
        return {
            "model": capabilities.model,
            "window": limits.window,
            "token_budget": limits.token_budget,
            "kv_tokens": self._engine.stats.kv_tokens,
        }

    @property
    def window(self) -> int:
        """Tokens of prompt and answer together."""
        return self._engine.limits.window

    @property
    def block(self) -> int:
        """Tokens of a block of the cache; fewer are not found in it."""
        return self._engine.limits.block

    def require(self, arm: Arm) -> None:
        if arm.accelerated and not self._engine.capabilities.sparse:
            raise BadUsage(
                f"the arm {arm.name!r} needs an engine with sparse prefill, and none is active in this one; "
                "see that FOREWORD_ACCELERATION is on"
            )

    def count_prompt(self, sources: Sequence[Source], question: Question) -> int:
        """Tokens of a question's whole prompt."""
        return self.count(messages_of(sources, question))

    def count(self, messages: Sequence[Message]) -> int:
        """Tokens of a chat as the model is given it."""
        return len(self._engine.render_chat(messages))

    async def serve(
        self, messages: Sequence[Message], arm: Arm, *, salt: str, max_tokens: int, logprobs: int | None = None
    ) -> Served:
        prompt = self._engine.render_chat(messages)
        request = Request(
            prompt=prompt,
            id=f"eval-{uuid.uuid4().hex}",
            salt=salt,
            sampling=Sampling(max_tokens=max_tokens, logprobs=logprobs),
            prefill="sparse" if arm.accelerated else "exact",
            selector=arm.at(len(prompt)).selector,
            dense_from=max(0, len(prompt) - question_tokens(messages, self._engine.render_chat)),
        )
        try:
            if arm.warm:
                await self._read_context(messages, request)
            return checked(await self._time(request), arm)
        except ServingError as error:
            return Served(prompt_tokens=len(prompt), error=f"{type(error).__name__}: {error}")

    async def _read_context(self, messages: Sequence[Message], request: Request) -> None:
        """Read what the prompt has in common with one that has no question yet."""
        context = self._engine.render_chat(without_question(messages))
        prefix = request.prompt[: shared_tokens(context, request.prompt)]
        await self._engine.prefill(replace(request, prompt=prefix, id=f"{request.id}-warm"))

    async def _time(self, request: Request) -> Served:
        text = ""
        arrivals: list[float] = []
        first_token = None
        served = Served(prompt_tokens=len(request.prompt))
        started = time.perf_counter()
        async for delta in self._engine.generate(request):
            now = time.perf_counter()
            if delta.prefill is not None:
                served = replace(
                    served,
                    # The engine's own count: a prompt that it cut would show.
                    prompt_tokens=delta.prefill.prompt_tokens,
                    cached_tokens=delta.prefill.cached_tokens,
                    path=delta.prefill.path,
                    density=delta.prefill.density,
                    fallback_reason=delta.prefill.fallback_reason,
                    queue=delta.queue,
                    read=delta.read,
                    longest_step=delta.longest_step,
                    first=delta.logprobs[0] if delta.logprobs else None,
                )
            first_token = first_token or now - started
            if delta.text:
                arrivals.append(now - started)
            text += delta.text
            served = replace(
                served,
                text=text,
                tokens=delta.tokens,
                finish_reason=delta.finish_reason or served.finish_reason,
                total=now - started,
            )
        # An answer may hold no text at all, such as the single token that ends it; it was read all the same.
        return replace(served, ttft=arrivals[0] if arrivals else first_token, gaps=gaps_between(arrivals))


@contextlib.asynccontextmanager
async def opened(
    variant: Variant, config: EngineConfig, say: Callable[[str], None], engine: EngineName = "vllm"
) -> AsyncIterator[Server]:
    """A server for a variant, for as long as the context is open.

    Args:
        engine: what runs the models of this machine.

    Raises:
        StartError: the engine cannot start as configured.
    """
    if variant.url is not None:
        async with RemoteServer.connect(variant.url, variant.model) as remote:
            yield remote
        return
    runs = _engine(engine, variant.apply(config))
    say(f"starting the engine ({str(variant) or 'as configured'}), about a minute")
    await runs.start()
    try:
        yield EngineServer(runs)
    finally:
        await runs.stop()


def _engine(name: EngineName, config: EngineConfig) -> Engine:
    if name == "vllm":
        return VllmEngine(config)
    # It loads torch.
    from serving.accel.reference_engine import ReferenceEngine

    return ReferenceEngine(config)


def _shortened(source: Source, keep: float) -> Source:
    total = sum(len(excerpt.text) for excerpt in source.excerpts)
    left = round(total * keep)
    excerpts = []
    for excerpt in source.excerpts:
        if left > 0:
            excerpts.append(Excerpt(excerpt.page, excerpt.text[:left]))
        left -= len(excerpt.text)
    return Source(source.name, tuple(excerpts))
