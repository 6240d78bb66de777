"""vLLM's processes end with the service, even when the service is killed and cannot stop them.

vLLM loads general plugins in each of its processes, so this is registered as one (pyproject.toml). It does nothing
unless the engine of this project has started the process.
"""

from __future__ import annotations

import os
import threading
import time

import psutil

_OWNER = "FOREWORD_ENGINE_OWNER"
_POLL_S = 1.0


def claim() -> None:
    """Mark the engine processes started from now on as this process's own."""
    os.environ[_OWNER] = str(os.getpid())


def register() -> None:
    """Watch parent and owner, if this is an engine process of ours; called by vLLM, possibly more than once."""
    owner = os.environ.get(_OWNER)
    already = any(thread.name == _OWNER for thread in threading.enumerate())
    if owner is None or int(owner) == os.getpid() or already:
        return
    threading.Thread(target=_end_with, args=(int(owner), os.getppid()), name=_OWNER, daemon=True).start()


def _end_with(owner: int, parent: int) -> None:
    # The parent of a worker is the core; it may be gone before the worker comes to watch it, so the owner counts too.
    while os.getppid() == parent and psutil.pid_exists(owner):
        time.sleep(_POLL_S)
    # Nobody is left to answer; a normal exit would wait for work that never comes.
    os._exit(1)
