"""vLLM's attention, for tests that look at it from inside."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def vllm_attention() -> ModuleType:
    """vLLM's attention backend for CPUs, loaded when the first test needs it; loading takes seconds and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.attention.backends import cpu_attn

    return cpu_attn  # type: ignore[no-any-return]
