"""A foreign server with the OpenAI API (vLLM, SGLang and others), as an arm to compare with.

The answer's beginning is handed over as vLLM and SGLang take it: a last message of the assistant with
`continue_final_message`. What the API does not tell (queue, steps, path) stays None.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx

from eval.arms import Arm
from eval.errors import BadUsage
from eval.served import Served, checked, gaps_between, without_question
from serving.engine import Message, exact_path

_TIMEOUT = httpx.Timeout(60.0, read=600.0)
# As many connections as there are requests, or their wait for one would count as the server's. Idle ones are given up
# before servers do so, most of them after 5 seconds: a request sent into a closing connection would count as failed.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
# What a server that answers something else makes of reading it.
_UNREADABLE = (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, AttributeError)


class RemoteServer:
    """Serves prompts from a server that somebody else runs."""

    def __init__(self, http: httpx.AsyncClient, model: str, models: tuple[str, ...], key: str | None) -> None:
        self._http = http
        self._model = model
        self._models = models
        self._key = key

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, url: str, model: str | None, *, key: str | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[RemoteServer]:
        """A client of the server at `url` (without `/v1`); its first model when none is named.

        Args:
            key: sent as a bearer token, and never told to anybody else.
            timeout_s: most seconds between two signs of life.

        Raises:
            BadUsage: nothing answers there, or it serves no model.
        """
        timeout = _TIMEOUT if timeout_s is None else httpx.Timeout(timeout_s)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            client = httpx.AsyncClient(base_url=url, timeout=timeout, limits=_LIMITS, headers=headers)
        except httpx.InvalidURL as error:
            raise BadUsage(f"{url!r} is no address ({error}); give one such as http://127.0.0.1:8000") from error
        async with client as http:
            try:
                listed = (await http.get("/v1/models")).raise_for_status().json()["data"]
                models = tuple(str(one["id"]) for one in listed)
                served = model or models[0]
            except _UNREADABLE as error:
                raise BadUsage(
                    f"the server at {url!r} does not answer /v1/models as the OpenAI API does "
                    f"({type(error).__name__}: {error}); start it, or give its address without '/v1'"
                ) from error
            yield cls(http, served, models, key)

    @property
    def about(self) -> dict[str, Any]:
        return {"model": self._model, "url": str(self._http.base_url)}

    @property
    def models(self) -> tuple[str, ...]:
        """All models that the server lists."""
        return self._models

    def require(self, arm: Arm) -> None:
        if arm.accelerated:
            raise BadUsage(f"the arm {arm.name!r} is our own prefill, and a foreign server has none")

    async def serve(
        self, messages: Sequence[Message], arm: Arm, *, salt: str, max_tokens: int, logprobs: int | None = None
    ) -> Served:
        """As `Server.serve`; without the first token's probabilities: servers name tokens by their text."""
        del logprobs
        try:
            if arm.warm:
                read = await self._time(self._body(without_question(messages), salt, max_tokens=1))
                if read.error:
                    return read
            return checked(await self._time(self._body(messages, salt, max_tokens)), arm)
        except _UNREADABLE as error:
            return Served(error=f"{type(error).__name__}: {error}")

    def _body(self, messages: Sequence[Message], salt: str, max_tokens: int) -> dict[str, Any]:
        # vLLM's and SGLang's own; a server may refuse what it does not know, so it stands there only when it is needed.
        begun = {"add_generation_prompt": False, "continue_final_message": True}
        return {
            "model": self._model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # vLLM's own, too; without it nothing would keep prompts from what others have left in the cache.
            "cache_salt": salt,
            **(begun if messages[-1].role == "assistant" else {}),
        }

    async def _time(self, body: dict[str, Any]) -> Served:
        served = Served()
        arrivals: list[float] = []
        started = time.perf_counter()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                told = (await response.aread()).decode(errors="replace")
                return Served(error=f"{response.status_code}: {self._without_key(told)[:500]}")
            async for line in response.aiter_lines():
                field, _, data = line.partition(":")
                if field != "data" or data.strip() == "[DONE]":
                    continue
                elapsed = time.perf_counter() - started
                before = len(served.text)
                served = _add(served, json.loads(data), elapsed)
                if len(served.text) > before:
                    arrivals.append(elapsed)
        if served.error is not None:
            served = replace(served, error=self._without_key(served.error)[:500])
        if served.finish_reason is None:
            return replace(served, error=served.error or "the server's stream ended before the answer did")
        ttft = arrivals[0] if arrivals else served.total
        return replace(served, ttft=ttft, gaps=gaps_between(arrivals))

    def _without_key(self, told: str) -> str:
        """What the server says, should it repeat the key that it was given."""
        return told if self._key is None else told.replace(self._key, "***")


def _add(served: Served, event: dict[str, Any], elapsed: float) -> Served:
    """What is known after one more event of the stream."""
    if error := event.get("error"):
        return replace(served, error=str(error), finish_reason=None)
    for choice in event.get("choices") or []:
        text = (choice.get("delta") or {}).get("content") or ""
        served = replace(
            served,
            text=served.text + text,
            finish_reason=choice.get("finish_reason") or served.finish_reason,
            total=elapsed,
        )
    if usage := event.get("usage"):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        prompt = usage["prompt_tokens"]
        served = replace(
            served,
            prompt_tokens=prompt,
            tokens=usage["completion_tokens"],
            cached_tokens=cached,
            path="unknown" if cached is None else exact_path(prompt, cached),
        )
    return served
