"""The supervisor replaces dead engines and gives up at last; its engines are scripted, its waits short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest

from serving.engine import Phase, Request, Sampling
from serving.errors import EngineDied, EngineUnavailable, StartError
from serving.scripted_engine import Script, ScriptedEngine
from serving.supervisor import RestartPolicy, SupervisedEngine

LIMIT_S = 10.0
LONG_S = 30.0
FAST = RestartPolicy(deaths=3, window_s=600, first_wait_s=0.01, longest_wait_s=0.02, poll_s=0.005)
# Long enough to look at the state in between.
WAITING = replace(FAST, first_wait_s=LONG_S, longest_wait_s=LONG_S)


class Engine(ScriptedEngine):
    """A scripted engine that may take long to start, or fail to."""

    failure: Exception | None = None
    slow = False
    stops = 0

    async def start(self) -> None:
        if self.slow:
            await asyncio.sleep(LONG_S)
        if self.failure is not None:
            raise self.failure
        await super().start()

    async def stop(self) -> None:
        self.stops += 1
        await super().stop()


@dataclass
class Factory:
    """Makes engines and remembers them; `prepare` gets each with its number."""

    script: Script = field(default_factory=Script)
    prepare: Callable[[int, Engine], None] = lambda number, engine: None
    made: list[Engine] = field(default_factory=list)

    def __call__(self) -> Engine:
        engine = Engine(self.script)
        self.prepare(len(self.made), engine)
        self.made.append(engine)
        return engine


@pytest.fixture
async def kept() -> AsyncIterator[list[SupervisedEngine]]:
    """What is put here is stopped at the end."""
    engines: list[SupervisedEngine] = []
    yield engines
    for engine in engines:
        await engine.stop()


async def supervised(kept: list[SupervisedEngine], factory: Factory, policy: RestartPolicy = FAST) -> SupervisedEngine:
    engine = SupervisedEngine(factory, policy)
    kept.append(engine)
    await engine.start()
    return engine


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def until_phase(engine: SupervisedEngine, phase: Phase) -> None:
    await until(lambda: engine.state.phase == phase)


async def answer(engine: SupervisedEngine) -> str:
    request = Request([1, 2, 3], "r", "s", Sampling(max_tokens=20))
    async with asyncio.timeout(LIMIT_S):
        return "".join([delta.text async for delta in engine.generate(request)])


async def test_passes_everything_on(kept: list[SupervisedEngine]) -> None:
    factory = Factory(Script(answer=("yes",), window=100))
    engine = await supervised(kept, factory)
    (inner,) = factory.made
    assert engine.engine is inner
    assert engine.state.ready
    assert await answer(engine) == "yes"
    request = Request(list(range(40)), "p", "s", Sampling(max_tokens=1))
    assert (await engine.prefill(request)).prompt_tokens == 40
    assert engine.plan(request) == inner.plan(request)
    assert engine.count_tokens("a b") == inner.count_tokens("a b")
    assert engine.render_chat([]) == inner.render_chat([])
    assert (engine.limits, engine.stats, engine.capabilities) == (inner.limits, inner.stats, inner.capabilities)
    assert await engine.progress("none") is None


async def test_restarts_after_a_death(kept: list[SupervisedEngine]) -> None:
    factory = Factory()
    engine = await supervised(kept, factory)
    factory.made[0].die()
    # Refused at once, even before the watcher has noticed.
    assert (engine.state.phase, engine.state.reason) == ("restarting", "killed by the script")
    await until(lambda: len(factory.made) == 2 and engine.state.ready)
    assert factory.made[0].stops == 1
    assert engine.engine is factory.made[1]
    assert await answer(engine)


async def test_refuses_while_it_restarts(kept: list[SupervisedEngine]) -> None:
    factory = Factory()
    engine = await supervised(kept, factory, WAITING)
    factory.made[0].die()
    await until(lambda: factory.made[0].stops == 1)
    for act in (lambda: answer(engine), lambda: engine.prefill(Request([1], "r", "s"))):
        with pytest.raises(EngineUnavailable, match="the engine is restarting: killed by the script"):
            await act()
    assert len(factory.made) == 1
    # Nothing of it needs the engine to live.
    assert engine.count_tokens("a b") == 3


async def test_a_question_in_flight_is_lost_and_the_next_is_answered(kept: list[SupervisedEngine]) -> None:
    factory = Factory(Script(answer=("a", "b"), gap_s=0.02))
    engine = await supervised(kept, factory)
    stream = engine.generate(Request([1, 2, 3], "r", "s"))
    assert (await anext(stream)).text == "a"
    factory.made[0].die()
    with pytest.raises(EngineDied):
        await anext(stream)
    await until_phase(engine, "ready")
    assert await answer(engine) == "ab"


async def test_an_abort_reaches_the_engine_at_once(kept: list[SupervisedEngine]) -> None:
    factory = Factory()
    engine = await supervised(kept, factory)
    stream = engine.generate(Request([1, 2, 3], "left", "s"))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert factory.made[0].aborted == ["left"]


async def test_three_deaths_are_enough(kept: list[SupervisedEngine]) -> None:
    factory = Factory()
    engine = await supervised(kept, factory)
    for number in range(3):
        await until(lambda number=number: len(factory.made) == number + 1 and engine.state.ready)  # type: ignore[misc]
        factory.made[number].die()
    await until_phase(engine, "down")
    assert engine.state.reason == (
        "the engine died 3 times in 10 minutes, last because killed by the script; "
        "mend the cause and restart the service"
    )
    with pytest.raises(EngineUnavailable, match="the engine is down: the engine died 3 times"):
        await answer(engine)
    await asyncio.sleep(0.05)
    assert len(factory.made) == 3
    assert [inner.stops for inner in factory.made] == [1, 1, 1]


async def test_old_deaths_are_forgiven(kept: list[SupervisedEngine]) -> None:
    factory = Factory()
    engine = await supervised(kept, factory, replace(FAST, window_s=0.0))
    for number in range(5):
        await until(lambda number=number: len(factory.made) == number + 1 and engine.state.ready)  # type: ignore[misc]
        factory.made[number].die()
    await until(lambda: len(factory.made) == 6 and engine.state.ready)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        pytest.param(StartError("no memory is left"), "no memory is left", id="of its own kind"),
        pytest.param(OSError("no space is left"), "no space is left", id="of any kind"),
        pytest.param(AssertionError(), "AssertionError", id="without a word"),
    ],
)
async def test_a_failed_restart_is_a_death(kept: list[SupervisedEngine], failure: Exception, reason: str) -> None:
    def fail_later(number: int, engine: Engine) -> None:
        engine.failure = failure if number else None

    factory = Factory(prepare=fail_later)
    engine = await supervised(kept, factory)
    factory.made[0].die()
    await until_phase(engine, "down")
    assert engine.state.reason is not None
    assert f"last because {reason};" in engine.state.reason
    assert len(factory.made) == 3


async def test_the_first_start_fails_for_good(kept: list[SupervisedEngine]) -> None:
    def fail(number: int, engine: Engine) -> None:
        engine.failure = StartError("no model")

    factory = Factory(prepare=fail)
    with pytest.raises(StartError, match="no model"):
        await supervised(kept, factory)
    assert (kept[0].state.phase, kept[0].state.reason) == ("down", "no model")
    await asyncio.sleep(0.05)
    assert len(factory.made) == 1


async def test_waits_double(kept: list[SupervisedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds != policy.poll_s:
            waits.append(seconds)
        await sleep(0)

    policy = RestartPolicy(deaths=6, first_wait_s=1, longest_wait_s=5, poll_s=0.125)
    factory = Factory()
    engine = await supervised(kept, factory, policy)
    monkeypatch.setattr("serving.supervisor.asyncio.sleep", note)
    async with asyncio.timeout(LIMIT_S):
        for number in range(5):
            while len(factory.made) != number + 1 or not engine.state.ready:
                await sleep(0.001)
            factory.made[number].die()
        while len(factory.made) != 6:
            await sleep(0.001)
    assert waits == [1, 2, 4, 5, 5]


# --- stopping ---


async def test_stop(kept: list[SupervisedEngine]) -> None:
    factory = Factory()
    engine = await supervised(kept, factory)
    await engine.stop()
    await engine.stop()
    assert engine.state.phase == "stopped"
    assert not factory.made[0].state.ready
    with pytest.raises(EngineUnavailable, match="the engine is stopped: the service is shutting down"):
        await answer(engine)
    # A stopped engine has not died.
    await asyncio.sleep(0.05)
    assert len(factory.made) == 1


async def test_stop_while_it_waits_to_restart(kept: list[SupervisedEngine]) -> None:
    factory = Factory()
    engine = await supervised(kept, factory, WAITING)
    factory.made[0].die()
    await until(lambda: factory.made[0].stops == 1)
    async with asyncio.timeout(LIMIT_S):
        await engine.stop()
    assert engine.state.phase == "stopped"
    assert len(factory.made) == 1


async def test_stop_while_the_new_engine_starts(kept: list[SupervisedEngine]) -> None:
    def slow_later(number: int, engine: Engine) -> None:
        engine.slow = number > 0

    factory = Factory(prepare=slow_later)
    engine = await supervised(kept, factory)
    factory.made[0].die()
    await until(lambda: len(factory.made) == 2)
    async with asyncio.timeout(LIMIT_S):
        await engine.stop()
    assert engine.state.phase == "stopped"
    assert factory.made[1].stops == 1
    assert not factory.made[1].state.ready


async def test_stop_before_start() -> None:
    factory = Factory()
    engine = SupervisedEngine(factory, FAST)
    assert engine.state.phase == "stopped"
    with pytest.raises(EngineUnavailable):
        await answer(engine)
    await engine.stop()


async def test_stop_after_it_gave_up(kept: list[SupervisedEngine]) -> None:
    factory = Factory()
    engine = await supervised(kept, factory, replace(FAST, deaths=1))
    factory.made[0].die()
    await until_phase(engine, "down")
    await engine.stop()
    assert engine.state.phase == "stopped"
