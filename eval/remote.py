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
from eval.served import Served, checked, without_question
from serving.engine import Message, exact_path

_TIMEOUT = httpx.Timeout(60.0, read=600.0)


class RemoteServer:
    """Serves prompts from a server that somebody else runs."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, url: str, model: str | None) -> AsyncIterator[RemoteServer]:
        """A client of the server at `url` (without `/v1`); its first model when none is named.

        Raises:
            BadUsage: nothing answers there, or it serves no model.
        """
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT) as http:
            try:
                listed = (await http.get("/v1/models")).raise_for_status().json()["data"]
                served = model or str(listed[0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                raise BadUsage(
                    f"the server at {url!r} does not answer /v1/models as the OpenAI API does "
                    f"({type(error).__name__}: {error}); start it, or give its address without '/v1'"
                ) from error
            yield cls(http, served)

    @property
    def about(self) -> dict[str, Any]:
        return {"model": self._model, "url": str(self._http.base_url)}

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
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return Served(error=f"{type(error).__name__}: {error}")

    def _body(self, messages: Sequence[Message], salt: str, max_tokens: int) -> dict[str, Any]:
        begun = messages[-1].role == "assistant"
        return {
            "model": self._model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # vLLM's and SGLang's own; other servers leave them out of account.
            "add_generation_prompt": not begun,
            "continue_final_message": begun,
            "cache_salt": salt,
        }

    async def _time(self, body: dict[str, Any]) -> Served:
        served = Served()
        started = time.perf_counter()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                told = (await response.aread()).decode(errors="replace")
                return Served(error=f"{response.status_code}: {told[:500]}")
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                served = _add(served, json.loads(line.removeprefix("data:")), time.perf_counter() - started)
        if served.finish_reason is None:
            return replace(served, error=served.error or "the server's stream ended before the answer did")
        return replace(served, ttft=served.ttft or served.total)


def _add(served: Served, event: dict[str, Any], elapsed: float) -> Served:
    """What is known after one more event of the stream."""
    if error := event.get("error"):
        return replace(served, error=str(error)[:500], finish_reason=None)
    for choice in event.get("choices") or []:
        text = (choice.get("delta") or {}).get("content") or ""
        served = replace(
            served,
            text=served.text + text,
            ttft=elapsed if text and served.ttft is None else served.ttft,
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
