"""`foreword bench` against a real HTTP server with a scripted engine, and against what is none."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from app.server import running
from app.settings import Settings
from serving.model import packaged_folder
from serving.scripted_engine import Script, ScriptedEngine
from tests.eval.openai_server import served

FIRST_S, GAP_S = 0.3, 0.02
TOKENIZER = str(packaged_folder(Path("~/.foreword/models").expanduser()))


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with served(ScriptedEngine(Script(first_token_s=FIRST_S, gap_s=GAP_S))) as url:
        yield url


async def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, so that it shares no event loop with the server."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"COLUMNS": "200", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | environment,
    )


async def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return await run("from eval.bench_cli import cli; cli()", *arguments, **environment)


async def test_a_table_of_levels(url: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.jsonl"
    options = ("--concurrency", "1,4", "--requests", "4", "--prompt-tokens", "200", "--max-tokens", "8")
    done = await bench(url, *options, "--out", str(out), FOREWORD_API_KEY="secret-1234")
    assert done.returncode == 0, done.stderr
    assert "secret-1234" not in done.stdout + done.stderr + out.read_text()
    heads, *rows = done.stdout.strip().splitlines()
    assert heads.split()[:2] == ["at", "once"]
    assert [row.split()[:4] for row in rows] == [["1", "4", "4", "0"], ["4", "4", "4", "0"]]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines].count("request") == 8
    level = next(line for line in lines if line["kind"] == "level")
    assert FIRST_S <= level["ttft_p50"] < FIRST_S + 0.2
    assert GAP_S * 0.9 <= level["itl_p50"] < GAP_S + 0.05


async def test_what_is_refused_counts_and_is_told() -> None:
    # The first one is asked before the load, and one warms each level up.
    async with served(ScriptedEngine(Script()), refused={4, 5}) as url:
        done = await bench(url, "--concurrency", "2", "--requests", "6", "--prompt-tokens", "200", "--json")
    assert done.returncode == 1, done.stderr
    level = json.loads(done.stdout)["levels"][0]
    assert (level["n"], level["failures"]) == (6, {"refused": 2})


async def test_our_own_service_is_asked_about_a_collection(tmp_path: Path) -> None:
    settings = Settings(port=0, engine="scripted", data_dir=tmp_path, scripted_first_token_s=0.1, warm=False)
    async with running(settings) as (url, _), httpx.AsyncClient(base_url=url, trust_env=False) as http:
        empty = await bench(url, "--collection", "papers")
        assert (empty.returncode, "the collection 'papers' holds no document" in empty.stderr) == (2, True)
        upload = {"files": ("a.txt", b"The yawl is red.")}
        id = (await http.post("/v1/documents", files=upload, data={"collection": "papers"})).json()["documents"][0][
            "id"
        ]
        while (await http.get(f"/v1/documents/{id}")).json()["status"] != "ready":
            await asyncio.sleep(0.05)
        done = await bench(url, "--collection", "papers", "--concurrency", "1,2", "--requests", "4", "--json")
    assert done.returncode == 0, done.stderr
    levels = json.loads(done.stdout)["levels"]
    assert [(level["at_once"], level["n"], level["failures"]) for level in levels] == [(1, 4, {}), (2, 4, {})]
    assert all(0.1 <= level["ttft_p50"] < 0.5 for level in levels)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        pytest.param(
            ("--concurrency", "two"), "the levels of concurrency are 'two'; give numbers with commas", id="levels"
        ),
        pytest.param(("--requests", "2"), "2 requests cannot be 8 at once", id="too few requests"),
        pytest.param(("--file", "prompts.jsonl"), "line 2 of 'prompts.jsonl'", id="a bad line"),
        pytest.param(("--file", "none.jsonl"), "'none.jsonl' cannot be read", id="no file"),
        pytest.param(("--model", "other"), "has no model 'other'", id="unknown model"),
    ],
)
async def test_wrong_commands_are_one_sentence_and_exit_2(
    url: str, arguments: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": 2}\n')
    done = await bench(url, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


async def test_what_is_no_server_is_one_sentence() -> None:
    done = await bench("http://127.0.0.1:9", "--requests", "8")
    assert done.returncode == 2
    assert "does not answer /v1/models as the OpenAI API does" in done.stderr

    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(nonsense, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        done = await bench(f"http://127.0.0.1:{port}", "--requests", "8")
    assert done.returncode == 2
    assert "does not answer /v1/models as the OpenAI API does" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
async def test_medians_agree_with_vllms_own_benchmark(url: str, tmp_path: Path) -> None:
    number = "40"
    ours = tmp_path / "ours.jsonl"
    options = ("--concurrency", "1", "--requests", number, "--prompt-tokens", "300", "--out", str(ours))
    done = await bench(url, *options)
    assert done.returncode == 0, done.stderr
    theirs = tmp_path / "theirs.json"
    done = await run(
        "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
        "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())",
        *("--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions"),
        *("--model", model(ours), "--tokenizer", TOKENIZER),
        *("--dataset-name", "random", "--random-input-len", "300", "--random-output-len", "16"),
        *("--num-prompts", number, "--max-concurrency", "1", "--num-warmups", "1", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "theirs.json"),
    )
    assert theirs.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(theirs.read_text())
    assert found["completed"] == int(number)
    level = next(line for line in lines(ours) if line["kind"] == "level")
    gaps = [gap for answer in found["itls"] for gap in answer]
    for mine, other in ((level["ttft_p50"], found["median_ttft_ms"] / 1000), (level["itl_p50"], median(gaps))):
        print(f"{1000 * mine:.1f} ms, vLLM's own {1000 * other:.1f} ms")
        assert mine == pytest.approx(other, rel=0.05, abs=0.015)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def model(file: Path) -> str:
    """The model that the server said it has."""
    return str(next(line for line in lines(file) if line["kind"] == "identity")["model"])
