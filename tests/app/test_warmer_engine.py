"""Reading early on the real engine, whose processes are killed in the middle of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from app.prompt import build_messages
from app.scope import Scope, salt_of, whole_sources
from app.warmer import Warmer
from retrieval.catalogue import Catalogue
from serving.config import EngineConfig
from serving.engine import Prefill, Request, Sampling
from serving.errors import EngineDied, EngineUnavailable
from serving.supervisor import RestartPolicy, SupervisedEngine
from serving.vllm_engine import VllmEngine
from tests.app.test_warmer import KEY, add

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

RESTART_S = 600.0
TOLD_S = 30.0


class Engine(SupervisedEngine):
    """The service's engine, which remembers the salts that were read early, in order."""

    def __init__(self, kept: Path) -> None:
        config = EngineConfig(max_model_len=2048, token_budget=256, kv_gib=1, kv_disk=kept, kv_disk_gib=1)
        super().__init__(lambda: VllmEngine(config), RestartPolicy(first_wait_s=0.1))
        self.read: list[str] = []

    async def prefill(self, request: Request) -> Prefill:
        self.read.append(request.salt)
        return await super().prefill(request)

    @property
    def living(self) -> VllmEngine:
        engine = self.engine
        assert isinstance(engine, VllmEngine)
        return engine


class Running:
    """A warmer at work on the real engine."""

    def __init__(self, engine: Engine, catalogue: Catalogue, warmer: Warmer) -> None:
        self.engine = engine
        self.catalogue = catalogue
        self.warmer = warmer

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(RESTART_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_warm(self, *scopes: Scope) -> None:
        await self.until(lambda: all(self.warmer.warmth(scope).state == "warm" for scope in scopes))

    async def until_in_the_middle(self, scope: Scope) -> None:
        await self.until(lambda: (warmth := self.warmer.warmth(scope)).tokens > 0 and warmth.state == "warming")

    def salt(self, scope: Scope) -> str:
        return salt_of(scope, "exact", self.engine, KEY)

    async def ask(self, scope: Scope) -> int | None:
        """Ask about a document; returns the tokens of the prompt that were in memory."""
        (id,) = scope.documents
        sources = whole_sources([self.catalogue.get(id)], self.catalogue.pages(id))
        prompt = self.engine.render_chat(build_messages(sources, "What is it?"))
        request = Request(prompt, f"question about {id}", self.salt(scope), Sampling(max_tokens=3))
        deltas = [delta async for delta in self.engine.generate(request)]
        assert deltas[0].prefill is not None
        return deltas[0].prefill.cached_tokens


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    engine = Engine(tmp_path / "kv")
    with closing(Catalogue(f"sqlite:///{tmp_path / 'catalogue.sqlite3'}")) as catalogue:
        warmer = Warmer(engine, catalogue, KEY)
        await engine.start()
        await warmer.start()
        try:
            yield Running(engine, catalogue, warmer)
        finally:
            await warmer.stop()
            await engine.stop()


def engine_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM::")]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev", "shm").iterdir()}


async def test_what_is_warm_outlives_the_engine_s_processes(running: Running) -> None:
    engine, warmer = running.engine, running.warmer
    latest_first: list[Scope] = []
    for number, title in enumerate(("VLLM::EngineCore", "VLLM::Worker"), start=1):
        first, second, third = (add(running.catalogue, f"{name}{number}", words=330) for name in ("a", "b", "c"))
        for scope in (first, second, third):
            await warmer.arrived(*scope.documents, last=False)
        warmer.asked(second)
        latest_first = [second, third, first, *latest_first]
        await running.until_warm(second)
        await running.until_in_the_middle(third)

        old, memory = engine_processes(), engine.living._shared_memory
        assert len(old) == len(memory) == 2
        question = asyncio.create_task(running.ask(second))
        await asyncio.sleep(0)
        next(process for process in old if process.name().startswith(title)).kill()
        (told,) = await asyncio.wait_for(asyncio.gather(question, return_exceptions=True), TOLD_S)
        assert isinstance(told, EngineDied | EngineUnavailable | int)
        await running.until(lambda: not engine.state.ready)
        engine.read.clear()

        await running.until_warm(*latest_first)
        # What is read first is what was used last, whether it was warm before, in the middle or not begun.
        assert list(dict.fromkeys(engine.read)) == [running.salt(scope) for scope in latest_first]
        totals = [warmer.warmth(scope).total for scope in latest_first]
        assert [await running.ask(scope) for scope in latest_first] == totals

        disk = engine.kv_disk()
        assert disk is not None
        assert disk.state == "ok"
        assert disk.bytes > 0

        assert len(engine_processes()) == 2
        assert not any(process.is_running() for process in old)
        assert memory.isdisjoint(shared_memory())
        assert set(warmer._entries) == set(latest_first)
        assert not list(itertools.chain(engine.living._pending, engine.living._background, engine.living._reading))
