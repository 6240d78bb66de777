"""Logging loses a line rather than a request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOGS = (
    "from app import log; log.configure(); log.log.error('told', n=1); {then}; log.log.error('lost'); print('went on')"
)


@pytest.mark.parametrize(
    ("then", "shell", "told"),
    [
        pytest.param("pass", "{}", ["told", "lost"], id="it is read"),
        pytest.param("import os; os.close(2)", "{}", ["told"], id="it was closed"),
        pytest.param("import sys; sys.stderr.close()", "{}", ["told"], id="Python has closed it"),
        pytest.param("pass", "{} 2>&-", [], id="there is none"),
        pytest.param("pass", "{} 2>/dev/full", [], id="it goes to a full disk"),
        pytest.param("import time; time.sleep(0.3)", "{} 2> >(head -n 1 >&2)", ["told"], id="its reader is gone"),
    ],
)
def test_a_line_that_cannot_be_written_is_lost(root: Path, then: str, shell: str, told: list[str]) -> None:
    command = shell.format(f'{sys.executable} -c "$LOGS"')
    environment = {"LOGS": LOGS.format(then=then), "PYTHONPATH": str(root)}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "went on\n"
    assert [word for word in ("told", "lost") if f'"{word}"' in done.stderr] == told
    assert "Traceback" not in done.stderr
