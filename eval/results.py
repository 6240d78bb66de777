"""Results as JSON lines: the identity first, then one line a request as it comes, and the summary last."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from eval.errors import BadUsage, NotWritten


class Results:
    """Writes a results file line by line, so that a run that breaks off loses nothing it has measured."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def add(self, kind: str, data: dict[str, Any]) -> None:
        """One line: `{"kind": ..., **data}`.

        Raises:
            NotWritten: it cannot be written, as on a full disk; the lines before it are there.
        """
        line = json.dumps({"kind": kind, **plain(data)}, ensure_ascii=False, allow_nan=False)
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except OSError as error:
            raise NotWritten(
                f"a result cannot be written to {self._stream.name!r} ({error.strerror}); what came before it is there"
            ) from error


def plain(data: Any) -> Any:
    """The data as JSON can hold it: an interval's end that is not bounded becomes null."""
    if isinstance(data, dict):
        return {name: plain(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


@contextmanager
def results_file(path: Path) -> Iterator[Results]:
    """A new results file.

    Raises:
        BadUsage: there is one already (measured results are never overwritten), or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("x", encoding="utf-8")
    except OSError as error:
        if path.exists():
            raise BadUsage(f"the results file {str(path)!r} is there already; name another one with --out") from error
        raise BadUsage(f"the results file {str(path)!r} cannot be written ({error.strerror}); set --out") from error
    with _closing(stream):
        yield Results(stream)


@contextmanager
def continued(path: Path) -> Iterator[Results]:
    """A results file that goes on where it was broken off; a last line that is not whole is taken away.

    Raises:
        BadUsage: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a", encoding="utf-8")
    except OSError as error:
        raise BadUsage(f"the results file {str(path)!r} cannot be written ({error.strerror}); set --out") from error
    with _closing(stream):
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
        yield Results(stream)


@contextmanager
def _closing(stream: IO[str]) -> Iterator[None]:
    try:
        yield
    finally:
        # A line that could not be written has been told; closing would try to write it once more.
        with suppress(OSError):
            stream.close()


def read_results(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a results file; one that was broken off may end in half a line, which is left out.

    Raises:
        BadUsage: it cannot be read, or another line is not JSON.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(f"the results file {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise BadUsage(f"line {number} of {str(path)!r} is not JSON; is it a results file?") from error
            return
        if not isinstance(record, dict):
            raise BadUsage(f"line {number} of {str(path)!r} is no object; is it a results file?")
        yield record


def default_path(run: str) -> Path:
    """Where a run's results go when the user names no place."""
    return Path("eval-results") / f"{run}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl"
