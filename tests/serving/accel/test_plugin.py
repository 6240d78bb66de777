"""The switch, and what it puts where."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from serving.accel import plugin

OURS = "serving.accel.cpu_backend.SparseCPUAttentionBackend"


@pytest.fixture
def registered(vllm_attention: ModuleType) -> Iterator[Any]:
    """vLLM's name for its CPU backend; what is registered under it is taken back at the end."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.CPU_ATTN.clear_override()
    yield AttentionBackendEnum.CPU_ATTN
    AttentionBackendEnum.CPU_ATTN.clear_override()


@pytest.mark.parametrize(("value", "switch"), [(None, "off"), ("off", "off"), ("on", "on"), ("sparse", "sparse")])
def test_switch(value: str | None, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("FOREWORD_ACCEL", raising=False)
    else:
        monkeypatch.setenv("FOREWORD_ACCEL", value)
    assert plugin.switch() == switch


@pytest.mark.parametrize("value", ["", "1", "ON", "exact"])
def test_another_value_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_ACCEL", value)
    with pytest.raises(ValueError, match=f"^FOREWORD_ACCEL is '{value}'; use off, on or sparse$"):
        plugin.register()


@pytest.mark.parametrize("value", [None, "off"])
def test_off_does_not_even_load_vllm(value: str | None, root: Path) -> None:
    code = "import sys; from serving.accel import plugin; plugin.register(); print('vllm' in sys.modules)"
    environment = {"PYTHONPATH": str(root)} | ({} if value is None else {"FOREWORD_ACCEL": value})
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("value", ["on", "sparse"])
@pytest.mark.parametrize("times", [1, 2])
def test_on_takes_the_place_of_the_cpu_backend(
    value: str, times: int, registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREWORD_ACCEL", value)
    stock = registered.get_class()
    for _ in range(times):
        plugin.register()
    ours = registered.get_class()
    assert f"{ours.__module__}.{ours.__qualname__}" == OURS
    assert issubclass(ours, stock)
    # vLLM's own name, which it looks for in some places.
    assert ours.get_name() == stock.get_name() == "CPU_ATTN"
    assert issubclass(ours.get_impl_cls(), stock.get_impl_cls())
    assert issubclass(ours.get_builder_cls(), stock.get_builder_cls())


def test_on_another_device_nothing_is_replaced(
    registered: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setenv("FOREWORD_ACCEL", "on")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    # Whoever ran before may have quietened vLLM's loggers.
    monkeypatch.setattr(plugin.log, "disabled", False)
    with caplog.at_level(logging.WARNING, logger=plugin.log.name):
        plugin.register()
    assert registered.get_path() != OURS
    # Once for each handler that others have left on the way up.
    assert set(caplog.messages) == {"FOREWORD_ACCEL is set, but there is no acceleration backend for this device"}
