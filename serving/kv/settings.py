"""How the disk tier is switched on: settings for vLLM, and what a request says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# In `SamplingParams.extra_args`: 1 for a request whose prompt is to be stored.
KEEP = "foreword_keep"


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
