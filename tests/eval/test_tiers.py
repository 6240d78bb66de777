"""Bringing prompts back from slower memory: what comes of the measurements, and one whole run on the real engine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from eval.tiers import Fetched, Source, _tiers, tier_lines


def fetched(length: int, source: Source, *ttfts: float, cached: int = 0) -> list[Fetched]:
    return [Fetched(length, number, source, length, cached + number, ttft) for number, ttft in enumerate(ttfts)]


def test_each_source_is_compared_with_computing() -> None:
    measured = [
        *fetched(4000, "computed", 2.0, 4.0),
        *fetched(4000, "warm", 0.3, 0.3, cached=3900),
        *fetched(4000, "files", 0.5, 0.7, cached=3900),
        *fetched(1000, "computed", 1.0),
        *fetched(1000, "files", 2.0, cached=900),
    ]
    tiers = list(_tiers(measured))
    assert [(t.length, t.source, t.n, t.cached_tokens, t.ttft, t.of_computed) for t in tiers] == [
        (1000, "computed", 1, 0, 1.0, 1.0),
        (1000, "files", 1, 900, 2.0, 2.0),
        (4000, "computed", 2, 0, 3.0, 1.0),
        (4000, "warm", 2, 3900, 0.3, pytest.approx(0.1)),
        (4000, "files", 2, 3900, 0.6, pytest.approx(0.2)),
    ]
    assert [line.split()[-1] for line in tier_lines(tiers)[1:]] == ["1.000", "2.000", "1.000", "0.100", "0.200"]


@pytest.mark.engine
@pytest.mark.long
async def test_prompts_come_back_after_a_restart_of_the_real_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.cli", "eval", "tiers", "--lengths", "400,900", "--repeats", "1", "--json"]
    environment = os.environ | {"FOREWORD_KV_GIB": "1", "FOREWORD_MAX_MODEL_LEN": "1024"}
    process = await asyncio.create_subprocess_exec(
        *(*command, "--out", str(tmp_path / "results.jsonl")), env=environment, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    tiers = json.loads(out)["tiers"]
    assert [(tier["length"], tier["source"]) for tier in tiers] == [
        (length, source) for length in (400, 900) for source in ("computed", "warm", "files")
    ]
    for tier in tiers:
        assert (tier["cached_tokens"] > tier["length"] // 2) == (tier["source"] != "computed")
