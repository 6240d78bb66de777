"""Work on untrusted files in one child process, which may crash, hang or be killed without harm.

The process starts with the first task and ends when it has been idle for a while, so that an idle service does not
pay for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import ParamSpec, TypeVar

from ingest.errors import WorkerCrashed

P = ParamSpec("P")
T = TypeVar("T")

_IDLE_S = 60.0
_START_S = 60.0


class Workers:
    """Runs functions of importable modules, one at a time, in a child process."""

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._pool: ProcessPoolExecutor | None = None
        # The pool would queue calls itself, but their clocks would run meanwhile and a crash would end them all.
        self._turn = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None

    async def run(self, limit_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result. Waiting for its turn and for the process to start does not count.

        Raises:
            WorkerCrashed: the process died of it, or the function took longer than `limit_s` seconds.
        """
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            try:
                pool = await self._living_pool()
                return await _result(pool, limit_s, partial(function, *args, **kwargs))
            except BrokenProcessPool as error:
                self._discard()
                raise WorkerCrashed(
                    "the process that read the file was killed or crashed; the file may be broken"
                ) from error
            except TimeoutError as error:
                self._discard()
                raise WorkerCrashed(f"reading the file took longer than {limit_s:.0f} s and was stopped") from error
            except asyncio.CancelledError:
                # What nobody waits for any more must not hold up the next call.
                self._discard()
                raise
            finally:
                self._idle = asyncio.get_running_loop().call_later(self._idle_s, self.close)

    def close(self) -> None:
        """End the process."""
        if self._idle is not None:
            self._idle.cancel()
        self._discard()

    async def _living_pool(self) -> ProcessPoolExecutor:
        """A pool whose process answers; one whose process has died while it was idle is replaced.

        Raises:
            WorkerCrashed: no process answers, not even a new one.
        """
        for _ in range(2):
            pool = self._pool = self._pool or _new_pool()
            try:
                await _result(pool, _START_S, os.getpid)
            except (BrokenProcessPool, TimeoutError):
                self._discard()
            else:
                return pool
        raise WorkerCrashed(
            "the process that reads files cannot be started; free some memory and upload the file again"
        )

    def _discard(self) -> None:
        if self._pool is None:
            return
        # The executor has no public way to stop a task that hangs.
        for process in list((self._pool._processes or {}).values()):
            with contextlib.suppress(ValueError):
                process.kill()
        self._pool.shutdown(wait=False)
        self._pool = None


async def _result(pool: ProcessPoolExecutor, limit_s: float, function: Callable[[], T]) -> T:
    # Not `wait_for`: that of Python 3.11 loses a cancellation that comes together with the result.
    async with asyncio.timeout(limit_s):
        return await asyncio.get_running_loop().run_in_executor(pool, function)


def _new_pool() -> ProcessPoolExecutor:
    # Spawned, not forked: this process has threads, and a fork would copy their locks.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_end_with_parent, initargs=(os.getpid(),))


def _end_with_parent(parent: int) -> None:
    """In the child: log nothing, and watch the parent, which may be killed and then cannot end its children."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    # Parsers quote the bytes of a file in their warnings, and nothing of it is redacted yet.
    logging.disable(logging.CRITICAL)
    threading.Thread(target=watch, daemon=True).start()
