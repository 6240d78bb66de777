"""Puts the acceleration backend in the place of vLLM's own; vLLM loads it as a general plugin in each of its processes.

Off unless FOREWORD_ACCEL is set: `on` leaves each request to say how it is read (exactly if it does not),
`sparse` makes sparse prefill the default. The service sets it for its own engine; with a plain `vllm serve` it is set
by hand.
"""

from __future__ import annotations

import logging
import os
from typing import Literal

VARIABLE = "FOREWORD_ACCEL"
Switch = Literal["off", "on", "sparse"]

# Under this name a worker reports that the backend is in use.
HELLO = "hello"

log = logging.getLogger("vllm.foreword")


def switch() -> Switch:
    """What the environment asks for.

    Raises:
        ValueError: it asks for something that does not exist.
    """
    value = os.environ.get(VARIABLE, "off")
    if value not in ("off", "on", "sparse"):
        raise ValueError(f"{VARIABLE} is {value!r}; use off, on or sparse")
    return value  # type: ignore[return-value]


def register() -> None:
    """Called by vLLM, possibly more than once in a process."""
    if switch() == "off":
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "serving.accel.cpu_backend.SparseCPUAttentionBackend")
    elif current_platform.is_cuda():
        register_backend(AttentionBackendEnum.FLASH_ATTN, "serving.accel.cuda_backend.SparseFlashAttentionBackend")
    else:
        log.warning("%s is set, but there is no acceleration backend for this device", VARIABLE)
