"""How the disk tier is switched on: settings for vLLM, and what a request says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# In `SamplingParams.extra_args`: 1 for a request whose prompt is to be stored.
KEEP = "foreword_keep"
# There too: 1 for a request that is computed rather than read from files.
COMPUTE = "foreword_compute"
# In vLLM's `kv_transfer_params` on a GPU: the folder in which a request's files are.
NAMESPACE = "foreword_namespace"
# Tokens that a GPU moves between tiers as a whole: files of some megabytes, and little to compute anew at the end.
CHUNK_TOKENS = 256


def transfer_config(root: Path, quota_bytes: int, fingerprint: str) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`.

    Args:
        root: folder of the files; made when the first block is written.
        quota_bytes: most bytes of all files.
        fingerprint: any text that differs when the same tokens give other pages: weights, configuration, types. What
            the engine knows itself (its version, the pages' sizes and order) is added to it.
    """
    return {
        "kv_connector": "DiskConnector",
        "kv_connector_module_path": "serving.kv.disk_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "root": str(root),
            "quota_bytes": quota_bytes,
            "fingerprint": fingerprint,
        },
    }


def tiers_config(root: Path, quota_bytes: int, memory_bytes: int, fingerprint: str) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` on a GPU: the host's memory, and files below it; the rest as in `transfer_config`.

    Args:
        memory_bytes: of the host, taken when the engine starts.
    """
    files = {
        "type": "FileTier",
        "module_path": "serving.kv.file_tier",
        "root": str(root),
        "quota_bytes": quota_bytes,
        "fingerprint": fingerprint,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": memory_bytes,
            "block_size": CHUNK_TOKENS,
            "secondary_tiers": [files] if quota_bytes else [],
        },
    }


def transfer_params(namespace: str, *, keep: bool, compute: bool) -> dict[str, Any]:
    """vLLM's `kv_transfer_params` of a request on a GPU.

    Args:
        keep: whether its prompt is to be kept; if not, nothing of it moves down.
        compute: whether it is computed rather than read from files; the host's memory is used all the same.
    """
    params: dict[str, Any] = {NAMESPACE: namespace}
    if not keep:
        params["max_offload_tokens"] = 0
    if compute:
        params["kv_load_tiers"] = [{"medium": "CPU"}]
    return params
