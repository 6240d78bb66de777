"""A server with the OpenAI API in front of a scripted engine, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serving.engine import Message, Request, Sampling
from serving.scripted_engine import ScriptedEngine

MODEL = "scripted"


@contextlib.asynccontextmanager
async def served(engine: ScriptedEngine, refused: set[int] | None = None) -> AsyncIterator[str]:
    """The address of a server that answers from the engine, and refuses requests by their number with 429."""
    count = 0

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def chat(http: HttpRequest) -> Response:
        nonlocal count
        count += 1
        if count in (refused or ()):
            return JSONResponse({"error": {"message": "too much to do"}}, 429)
        body = await http.json()
        prompt = engine.render_chat([Message(one["role"], _text(one["content"])) for one in body["messages"]])
        sampling = Sampling(max_tokens=body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        request = Request(prompt, uuid.uuid4().hex, body.get("cache_salt") or uuid.uuid4().hex, sampling)

        async def events() -> AsyncIterator[str]:
            tokens = 0
            async for delta in engine.generate(request):
                tokens = delta.tokens
                choice = {"index": 0, "delta": {"content": delta.text}, "finish_reason": delta.finish_reason}
                yield _event({"choices": [choice]})
            usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens, "total_tokens": len(prompt) + tokens}
            yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def _event(data: object) -> str:
        return f"data: {json.dumps({'id': 'chatcmpl-1', 'object': 'chat.completion.chunk', 'model': MODEL} | data)}\n\n"  # type: ignore[operator]

    app = Starlette(
        routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])],
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    await engine.start()
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        await engine.stop()


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
