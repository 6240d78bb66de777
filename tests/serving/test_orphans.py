"""Engine processes end with their owner: watched by threads here, by real processes at the end of the file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from serving import orphans

OWNER = "FOREWORD_ENGINE_OWNER"
# What the engine's users are promised; the watcher looks once a second.
END_S = 3.0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The (owner, parent) of each watcher started, which waits for the end of the test and does no harm."""
    calls: list[tuple[int, int]] = []
    over = threading.Event()

    def wait(owner: int, parent: int) -> None:
        calls.append((owner, parent))
        over.wait(10)

    monkeypatch.setattr(orphans, "_end_with", wait)
    monkeypatch.delenv(OWNER, raising=False)
    yield calls
    over.set()
    for thread in _watchers():
        thread.join(10)


def _watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == OWNER]


def test_without_an_owner_nobody_watches(watched: list[tuple[int, int]]) -> None:
    orphans.register()
    assert (watched, _watchers()) == ([], [])


def test_the_owner_does_not_watch_itself(watched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWNER, "to be replaced")
    orphans.claim()
    assert os.environ[OWNER] == str(os.getpid())
    orphans.register()
    assert (watched, _watchers()) == ([], [])


def test_an_engine_process_starts_one_watcher(watched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWNER, str(os.getppid()))
    orphans.register()
    orphans.register()
    (thread,) = _watchers()
    # It must not keep a process alive that wants to end.
    assert thread.daemon
    assert watched == [(os.getppid(), os.getppid())]


# --- real processes ---

CHILD = "import time; from serving import orphans; orphans.register(); print('ready', flush=True); time.sleep(60)"
PARENT = """
import subprocess, sys, time
if {claims}:
    from serving import orphans
    orphans.claim()
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def family(root: Path) -> Iterator[list[psutil.Process]]:
    """A parent and its child; both are ended at the end of the test."""
    everyone: list[psutil.Process] = []
    yield everyone
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _start(code: str, root: Path, environment: dict[str, str]) -> tuple[subprocess.Popen[str], psutil.Process]:
    """The parent, and the child that it has named once the child is watching."""
    inherited = {name: value for name, value in os.environ.items() if name != OWNER}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, env=inherited | environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        return parent, psutil.Process(int(parent.stdout.readline()))


def _ends_in_time(process: psutil.Process) -> bool:
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        # Who would reap it may be slow (a container's init) or never do it (a core that hangs).
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_child_ends_when_its_parent_is_killed(family: list[psutil.Process], root: Path) -> None:
    parent, child = _start(PARENT.format(claims=True, child=CHILD), root, {})
    family += [psutil.Process(parent.pid), child]
    assert child.is_running()
    parent.kill()
    parent.wait(10)
    assert _ends_in_time(child)


def test_a_worker_ends_with_the_owner_though_its_parent_lives(family: list[psutil.Process], root: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    family.append(psutil.Process(owner.pid))
    parent, child = _start(PARENT.format(claims=False, child=CHILD), root, {OWNER: str(owner.pid)})
    family += [psutil.Process(parent.pid), child]
    owner.kill()
    owner.wait(10)
    assert _ends_in_time(child)
    assert parent.poll() is None
    parent.kill()
    parent.wait(10)


def test_a_stranger_s_child_outlives_its_parent(family: list[psutil.Process], root: Path) -> None:
    parent, child = _start(PARENT.format(claims=False, child=CHILD), root, {})
    family += [psutil.Process(parent.pid), child]
    parent.kill()
    parent.wait(10)
    # Without an owner there is no watcher at all, so there is nothing to wait for.
    assert child.num_threads() == 1
    assert child.is_running()
