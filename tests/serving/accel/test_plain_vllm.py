"""The backend in vLLM's own server, without the service: a request says by `vllm_xargs` how it is read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.accel import channel, plugin
from serving.config import EngineConfig
from serving.model import PACKAGED, resolve_model

pytestmark = pytest.mark.long

START_S = 240.0


@pytest.fixture(scope="module")
def inbox() -> Iterator[channel.Inbox]:
    inbox = channel.Inbox()
    yield inbox
    inbox.close()


@pytest.fixture(scope="module")
def server(inbox: channel.Inbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = resolve_model(PACKAGED, EngineConfig().models_dir.expanduser())
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        plugin.VARIABLE: "on",
        channel.VARIABLE: str(inbox.path),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--enforce-eager"]
    command += ["--model", model.source, "--served-model-name", "m", "--block-size", "32"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as http:
            _wait(process, http, log)
            yield http
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: subprocess.Popen[bytes], http: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    pytest.fail(f"vLLM's server is not ready:\n{log.read_text()[-4000:]}")


def ask(server: httpx.Client, salt: str, **xargs: str | int) -> str:
    buoys = " ".join(f"Buoy number {n} lies at a depth of {n * 7 % 91} metres." for n in range(120))
    question = f"{buoys} The spare key is in locker 47. Where is the spare key?"
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 12,
        "temperature": 0,
        "cache_salt": salt,
        "vllm_xargs": xargs,
    }
    response = server.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: str = response.json()["choices"][0]["message"]["content"]
    return answer


def test_a_worker_reports_in(server: httpx.Client, inbox: channel.Inbox) -> None:
    hello = inbox.take(plugin.HELLO)
    assert hello is not None
    assert hello["selector"].startswith("alpha:")


def test_a_request_decides_how_it_is_read(server: httpx.Client, inbox: channel.Inbox) -> None:
    exact = ask(server, "a", foreword_trace="exact")
    default = ask(server, "b", foreword_prefill="sparse", foreword_trace="default")
    own = ask(
        server,
        "c",
        foreword_prefill="sparse",
        foreword_selector="alpha:0.1,start=256",
        foreword_dense_from=1900,
        foreword_trace="own",
    )
    assert "47" in exact
    assert "47" in default
    assert "47" in own
    reports = {name: inbox.take(name) for name in ("exact", "default", "own")}
    assert [report and report["path"] for report in reports.values()] == ["exact", "sparse", "sparse"]
    shares = [
        report["kept_pages"] / report["total_pages"] for report in reports.values() if report and report["total_pages"]
    ]
    assert shares == sorted(shares, reverse=True)
