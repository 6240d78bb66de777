"""An engine that finds the answer's beginning in its prompt and goes on from there, as a perfect reader would."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from eval.arms import Variant
from eval.serve import EngineServer, OpenServer
from eval.served import Server
from serving.engine import Delta, Request
from serving.scripted_engine import Script, ScriptedEngine


@dataclass
class ReadingEngine(ScriptedEngine):
    """Copies what follows the answer's beginning in the documents; says so when it is not there.

    With an `answer` it says that, whatever it is asked.
    """

    answer: str | None = None

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        documents, _, lead = self.decode(request.prompt).rpartition("[assistant]\n")
        found = documents.find(lead.strip())
        # A prompt that is refused takes no answer, and would leave it to the next one.
        if len(request.prompt) + request.sampling.max_tokens <= self.script.window:
            copied = documents[found + len(lead) :][:40] if found >= 0 else "it is not there"
            self.enqueue(self.answer or copied)
        deltas = super().generate(request)
        async with contextlib.aclosing(deltas):  # type: ignore[type-var]
            async for delta in deltas:
                yield delta


def opener(script: Script, opened: list[ReadingEngine] | None = None, answer: str | None = None) -> OpenServer:
    """Opens a reading engine for every variant; adds each to `opened`."""

    @contextlib.asynccontextmanager
    async def open_server(_: Variant) -> AsyncIterator[Server]:
        engine = ReadingEngine(script, answer=answer)
        if opened is not None:
            opened.append(engine)
        await engine.start()
        yield EngineServer(engine)
        await engine.stop()

    return open_server
