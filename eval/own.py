"""A running service of ours as a server: questions about a collection, asked as its users ask them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx

from app.client import Client, RequestFailed
from eval.arms import Arm
from eval.errors import BadUsage
from eval.served import Served, checked, gaps_between
from serving.engine import Message


class OwnServer:
    """Asks `/v1/ask` about a collection. What questions share is read from the cache, as it is for users."""

    def __init__(self, client: Client, url: str, collection: str, about: dict[str, Any]) -> None:
        self._client = client
        self._url = url
        self._collection = collection
        self._about = about

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, url: str, collection: str, timeout_s: float) -> AsyncIterator[OwnServer]:
        """A client of the service at `url`.

        Raises:
            BadUsage: none answers there, or nothing of the collection can be asked about.
        """
        try:
            http = httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False)
        except httpx.InvalidURL as error:
            raise BadUsage(f"{url!r} is no address ({error}); give one such as http://127.0.0.1:8000") from error
        async with http:
            client = Client(http)
            try:
                listed = await client.json("GET", "/v1/documents", params={"collection": collection})
                documents = [one["id"] for one in listed["documents"]]
            except (RequestFailed, ValueError, LookupError, TypeError) as error:
                raise BadUsage(
                    f"the server at {url!r} does not answer /v1/documents as this service does ({error}); "
                    "leave --collection out for another one"
                ) from error
            if not documents:
                raise BadUsage(f"the collection {collection!r} holds no document; upload one, or name another")
            yield cls(client, url, collection, {"url": url, "collection": collection, "documents": len(documents)})

    @property
    def about(self) -> dict[str, Any]:
        return self._about

    def require(self, arm: Arm) -> None:
        """How prompts are read is the service's own choice."""

    async def serve(
        self, messages: Sequence[Message], arm: Arm, *, salt: str, max_tokens: int, logprobs: int | None = None
    ) -> Served:
        """As `Server.serve`: the last message is the question; documents and salt are the service's."""
        del salt, logprobs
        served, arrivals = Served(), list[float]()
        asked = {"question": messages[-1].content, "collection": self._collection, "max_tokens": max_tokens}
        started = time.perf_counter()
        try:
            async for name, data in self._client.events("POST", "/v1/ask", json=asked):
                elapsed = time.perf_counter() - started
                if name == "token" and data["text"]:
                    arrivals.append(elapsed)
                    served = replace(served, text=served.text + data["text"])
                elif name == "done":
                    served = _done(served, data, elapsed)
        except RequestFailed as error:
            return Served(error=f"{error.status or type(error).__name__}: {error}")
        except (ValueError, LookupError, TypeError) as error:
            return Served(error=f"{type(error).__name__}: {error}")
        if served.finish_reason is None:
            return replace(served, error="the stream ended before the answer did")
        ttft = arrivals[0] if arrivals else served.total
        return checked(replace(served, ttft=ttft, gaps=gaps_between(arrivals)), arm)


def _done(served: Served, data: dict[str, Any], elapsed: float) -> Served:
    prefill, timings = data["prefill"], data["timings"]
    return replace(
        served,
        prompt_tokens=prefill["prompt_tokens"],
        cached_tokens=prefill["cached_tokens"],
        path=prefill["path"],
        density=prefill["density"],
        fallback_reason=prefill["fallback_reason"],
        queue=timings["queue"],
        tokens=data["usage"]["completion_tokens"],
        finish_reason=data["finish_reason"],
        total=elapsed,
    )
