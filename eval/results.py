"""Results as JSON lines: the identity first, then one line a request as it comes, and the summary last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any


class Results:
    """Writes a results file line by line, so that a run that breaks off loses nothing it has measured."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def add(self, kind: str, data: dict[str, Any]) -> None:
        """One line: `{"kind": ..., **data}`."""
        json.dump({"kind": kind, **data}, self._stream, ensure_ascii=False)
        self._stream.write("\n")
        self._stream.flush()


@contextmanager
def results_file(path: Path) -> Iterator[Results]:
    """A new results file.

    Raises:
        FileExistsError: there is one already; measured results are never overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as stream:
        yield Results(stream)


def default_path(run: str) -> Path:
    """Where a run's results go when the user names no place."""
    return Path("eval-results") / f"{run}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl"
