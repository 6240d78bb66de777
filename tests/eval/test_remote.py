"""A foreign server as an arm, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from eval.arms import Arm, Variant
from eval.errors import BadUsage
from eval.remote import RemoteServer
from eval.serve import opened
from serving.config import EngineConfig
from serving.engine import Message

MESSAGES = [
    Message("system", "Answer."),
    Message("user", "<document>47</document>\n\nQuestion: Which locker?"),
    Message("assistant", "Locker"),
]


@contextlib.asynccontextmanager
async def serving(bodies: list[dict[str, Any]]) -> AsyncIterator[str]:
    """A server that answers as vLLM does, and keeps what it was asked."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "some-model"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        bodies.append(body)
        if "break" in body["messages"][1]["content"]:
            parts = [{"choices": [{"delta": {"content": " 4"}}]}, {"error": {"message": "the engine died"}}]
            return StreamingResponse(iter(f"data: {json.dumps(part)}\n\n" for part in parts))
        if "refuse" in body["messages"][1]["content"]:
            return JSONResponse({"error": {"message": "too long"}}, 400)
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": " 47"}}]},
            {"choices": [{"delta": {"content": "."}, "finish_reason": "stop"}]},
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 30,
                    "completion_tokens": 2,
                    "prompt_tokens_details": {"cached_tokens": 16 if len(bodies) > 1 else 0},
                },
            },
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        return StreamingResponse(iter(lines), media_type="text/event-stream")

    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await running


async def test_an_answer_is_timed_and_counted() -> None:
    bodies: list[dict[str, Any]] = []
    async with serving(bodies) as url, RemoteServer.connect(url, None) as server:
        served = await server.serve(MESSAGES, Arm("exact"), salt="s", max_tokens=8)
    assert server.about == {"model": "some-model", "url": url}
    assert (served.text, served.finish_reason, served.tokens) == (" 47.", "stop", 2)
    assert (served.prompt_tokens, served.cached_tokens, served.path) == (30, 0, "exact")
    assert served.ttft is not None
    assert served.ttft > 0
    # The first event has no text, so it is no piece.
    assert served.gaps is not None
    assert len(served.gaps) == 1
    assert (served.queue, served.longest_step, served.first, served.error) == (None, None, None, None)
    assert bodies[0]["messages"][-1] == {"role": "assistant", "content": "Locker"}
    assert (bodies[0]["continue_final_message"], bodies[0]["cache_salt"]) == (True, "s")


async def test_a_warm_arm_sends_the_context_first() -> None:
    bodies: list[dict[str, Any]] = []
    async with serving(bodies) as url, RemoteServer.connect(url, "m") as server:
        served = await server.serve(MESSAGES, Arm("warm", warm=True), salt="s", max_tokens=8)
    assert [body["messages"][-1]["content"] for body in bodies] == ["<document>47</document>\n\nQuestion: ", "Locker"]
    assert (served.cached_tokens, served.path) == (16, "warm")


async def test_a_refusal_is_told_in_the_result() -> None:
    refused = [MESSAGES[0], Message("user", "refuse\n\nQuestion: why?"), MESSAGES[2]]
    async with serving([]) as url, RemoteServer.connect(url, None) as server:
        served = await server.serve(refused, Arm("exact"), salt="s", max_tokens=8)
    assert served.error is not None
    assert served.error.startswith("400: ")
    assert served.ttft is None


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("word", "told"), [("refuse", "400"), ("break", "the engine died")])
async def test_failures_are_never_answers(warm: bool, word: str, told: str) -> None:
    asked = [MESSAGES[0], Message("user", f"{word}\n\nQuestion: why?"), MESSAGES[2]]
    async with serving([]) as url, RemoteServer.connect(url, None) as server:
        served = await server.serve(asked, Arm("warm" if warm else "exact", warm=warm), salt="s", max_tokens=8)
    assert told in (served.error or "")


async def test_an_error_of_the_caller_is_not_the_servers() -> None:
    async with serving([]) as url:
        with pytest.raises(KeyError, match="ours"):
            async with RemoteServer.connect(url, None):
                raise KeyError("ours")


async def test_a_server_that_is_not_there_is_told() -> None:
    variant = Variant(url="http://127.0.0.1:9")
    with pytest.raises(BadUsage, match=r"'http://127.0.0.1:9' does not answer /v1/models"):
        async with opened(variant, EngineConfig(), print):
            pass


async def test_a_foreign_server_is_not_called_sparse() -> None:
    async with serving([]) as url, RemoteServer.connect(url, None) as server:
        with pytest.raises(BadUsage, match="a foreign server has none"):
            server.require(Arm("sparse", accelerated=True))
