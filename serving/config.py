"""How an engine is to be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.model import PACKAGED


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """None means: chosen from the machine and the model at start.

    `kv_gib` is the size of the KV cache in GiB (CPU) or None for vLLM's share of the card's memory (GPU);
    `token_budget` the most prompt tokens of one engine step; `engine_args` goes to vLLM as it is. `acceleration` makes
    sparse prefill available to requests that ask for it. `kv_disk` is the folder for at most `kv_disk_gib` GiB of keys
    and values of prompts that are to be kept; None or 0 keeps none. `kv_memory_gib` is the host's memory for those
    that have no room on the card (GPU): without any nothing is kept on disk either.
    """

    model: str = PACKAGED
    models_dir: Path = Path("~/.foreword/models")
    max_model_len: int | None = None
    token_budget: int | None = None
    kv_gib: int | None = None
    max_pending: int = 32
    max_running: int = 16
    log_level: str = "ERROR"
    acceleration: bool = True
    kv_disk: Path | None = None
    kv_disk_gib: int = 0
    kv_memory_gib: int | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
