"""What the service and the workers say to each other: what a request asks for, and what became of it.

A request says it in `SamplingParams.extra_args` (over HTTP `vllm_xargs`), as flat values under the names below. Back
comes a report, one small line a request, through a named pipe. Writing never waits: what does not fit is lost, and the
service then says that it does not know. On the CPU a line is written before the step's tokens leave the worker, so it
is there when the first of them arrives; on a GPU it is written as soon as the device has counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

PREFILL, SELECTOR, DENSE_FROM, TRACE = (
    "foreword_prefill",
    "foreword_selector",
    "foreword_dense_from",
    "foreword_trace",
)

# Holds the path of the pipe in the workers' environment.
VARIABLE = "FOREWORD_ACCEL_REPORTS"
# A line up to this length is written whole or not at all (POSIX, PIPE_BUF).
_LONGEST = 4096


class Sender:
    """Writes reports, from a worker. Without a pipe, or a reader, they are dropped."""

    def __init__(self, path: str | None) -> None:
        self._pipe: int | None = None
        if path is not None:
            with contextlib.suppress(OSError):
                self._pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    def send(self, report: dict[str, Any]) -> None:
        """Write a report, or lose it."""
        line = json.dumps(report).encode() + b"\n"
        if self._pipe is None or len(line) > _LONGEST:
            return
        # Full, or closed by a service that is ending.
        with contextlib.suppress(OSError):
            os.write(self._pipe, line)


class Inbox:
    """Reads reports, in the service. Keeps those that were not asked for yet, up to a limit."""

    def __init__(self, keep: int = 1024) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="foreword-"))
        self.path = self._folder / "reports"
        os.mkfifo(self.path, 0o600)
        # Open for writing too, so that it never ends while workers come and go.
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self._keep = keep
        self._rest = b""
        self._reports: dict[str, dict[str, Any]] = {}

    def take(self, trace: str) -> dict[str, Any] | None:
        """The report of this name, once, or None when there is none."""
        self._read()
        return self._reports.pop(trace, None)

    def close(self) -> None:
        """Remove the pipe."""
        os.close(self._pipe)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        while chunk := self._chunk():
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                report = json.loads(line)
                self._reports[report["trace"]] = report
        while len(self._reports) > self._keep:
            del self._reports[next(iter(self._reports))]

    def _chunk(self) -> bytes:
        try:
            return os.read(self._pipe, 65536)
        except BlockingIOError:
            return b""
