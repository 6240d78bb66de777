"""The child process: results, crashes, hangs, idleness. Its tasks are functions of the standard library."""

from __future__ import annotations

import asyncio
import operator
import os
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from ingest import workers as workers_module
from ingest.errors import WorkerCrashed
from ingest.workers import Workers

LONG_S = 30.0


@pytest.fixture
async def own() -> AsyncIterator[Workers]:
    """Workers that a test may break."""
    workers = Workers()
    yield workers
    workers.close()


async def process_of(workers: Workers) -> psutil.Process:
    return psutil.Process(await workers.run(LONG_S, os.getpid))


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def until_gone(process: psutil.Process) -> None:
    async with asyncio.timeout(10):
        while not gone(process):
            await asyncio.sleep(0.02)


async def test_result_errors_and_one_process(own: Workers) -> None:
    assert await own.run(LONG_S, operator.add, 1, 2) == 3
    assert await own.run(LONG_S, sorted, [2, 1], reverse=True) == [2, 1]
    # An error of the function is handed on, and is no crash.
    with pytest.raises(ZeroDivisionError):
        await own.run(LONG_S, operator.truediv, 1, 0)
    pids = await asyncio.gather(*(own.run(LONG_S, os.getpid) for _ in range(3)))
    assert len(set(pids)) == 1
    assert pids[0] != os.getpid()


async def test_crash_is_told_and_the_next_call_works(own: Workers) -> None:
    with pytest.raises(WorkerCrashed, match="killed or crashed"):
        await own.run(LONG_S, os._exit, 7)
    assert await own.run(LONG_S, operator.add, 1, 2) == 3


async def test_kill_from_outside(own: Workers) -> None:
    process = await process_of(own)
    task = asyncio.create_task(own.run(LONG_S, time.sleep, LONG_S))
    await asyncio.sleep(0.1)
    process.kill()
    with pytest.raises(WorkerCrashed):
        await task


async def test_time_limit_ends_the_process_and_the_next_call_works(own: Workers) -> None:
    process = await process_of(own)
    started = time.monotonic()
    with pytest.raises(WorkerCrashed, match="longer than 0 s"):
        await own.run(0.2, time.sleep, LONG_S)
    assert time.monotonic() - started < 5
    await until_gone(process)
    assert await own.run(LONG_S, operator.add, 1, 2) == 3


async def test_a_cancelled_call_does_not_hold_up_the_next(own: Workers) -> None:
    await process_of(own)
    task = asyncio.create_task(own.run(LONG_S, time.sleep, LONG_S))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await own.run(10, operator.add, 1, 2) == 3


async def test_cancelling_a_call_that_waits_leaves_the_running_one_alone(own: Workers) -> None:
    process = await process_of(own)
    running = asyncio.create_task(own.run(LONG_S, time.sleep, 0.5))
    waiting = asyncio.create_task(own.run(LONG_S, time.sleep, LONG_S))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await running
    assert (await process_of(own)).pid == process.pid


async def test_the_clock_does_not_run_while_a_call_waits(own: Workers) -> None:
    await process_of(own)
    first = asyncio.create_task(own.run(LONG_S, time.sleep, 1.0))
    await asyncio.sleep(0)
    assert await own.run(0.8, operator.add, 1, 2) == 3
    assert first.done()


@pytest.mark.parametrize("end", ["crash", "hang", "cancel"])
async def test_the_end_of_one_call_is_not_that_of_those_waiting(own: Workers, end: str) -> None:
    await process_of(own)
    limit_s = 0.5 if end == "hang" else LONG_S
    call = own.run(limit_s, os._exit, 7) if end == "crash" else own.run(limit_s, time.sleep, LONG_S)
    first = asyncio.create_task(call)
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(own.run(LONG_S, operator.add, n, 1)) for n in range(3)]
    await asyncio.sleep(0)
    if end == "cancel":
        first.cancel()
    with pytest.raises(asyncio.CancelledError if end == "cancel" else WorkerCrashed):
        await first
    assert await asyncio.gather(*waiting) == [1, 2, 3]


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_process_that_died_idle_costs_the_next_call_nothing(own: Workers, noticed: bool) -> None:
    process = await process_of(own)
    process.kill()
    if noticed:
        await asyncio.sleep(0.5)
    assert (await process_of(own)).pid != process.pid


async def test_a_process_that_cannot_be_started_is_not_the_files_fault(
    own: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "_end_with_parent", os._exit)
    with pytest.raises(WorkerCrashed, match="cannot be started"):
        await own.run(LONG_S, operator.add, 1, 2)
    monkeypatch.undo()
    assert await own.run(LONG_S, operator.add, 1, 2) == 3


async def test_idle_process_ends_and_a_later_call_starts_another() -> None:
    workers = Workers(idle_s=0.05)
    process = await process_of(workers)
    await until_gone(process)
    assert (await process_of(workers)).pid != process.pid
    workers.close()


async def test_work_keeps_the_process_from_being_idle() -> None:
    workers = Workers(idle_s=0.3)
    process = await process_of(workers)
    await workers.run(LONG_S, time.sleep, 0.6)
    assert (await process_of(workers)).pid == process.pid
    workers.close()


async def test_close(own: Workers) -> None:
    own.close()
    process = await process_of(own)
    own.close()
    own.close()
    await until_gone(process)
