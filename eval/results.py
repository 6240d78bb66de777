"""Results as JSON lines: the identity first, then one line a request as it comes, and the summary last."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from eval.errors import BadUsage


class Results:
    """Writes a results file line by line, so that a run that breaks off loses nothing it has measured."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def add(self, kind: str, data: dict[str, Any]) -> None:
        """One line: `{"kind": ..., **data}`."""
        json.dump({"kind": kind, **plain(data)}, self._stream, ensure_ascii=False, allow_nan=False)
        self._stream.write("\n")
        self._stream.flush()


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
    with stream:
        yield Results(stream)


def default_path(run: str) -> Path:
    """Where a run's results go when the user names no place."""
    return Path("eval-results") / f"{run}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl"
