"""Memory of a running service: proportional set size, which shares common pages fairly between processes."""

from __future__ import annotations

from urllib.parse import urlsplit

import psutil


def measure_memory(url: str) -> list[tuple[str, float]]:
    """MiB of each process of the service that listens at `url`, and of all together, largest first.

    Raises:
        LookupError: no process of this machine listens there.
    """
    port = urlsplit(url).port
    listener = next(
        (
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        ),
        None,
    )
    if listener is None:
        raise LookupError(f"nothing listens at {url}; start the service first")
    parent = psutil.Process(listener)
    processes = [parent, *parent.children(recursive=True)]
    rows = [(f"{p.name()} ({p.pid})", p.memory_full_info().pss / 2**20) for p in processes]
    rows.sort(key=lambda row: -row[1])
    return [("all processes", sum(mib for _, mib in rows)), *rows]
