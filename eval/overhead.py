"""What the service adds before the first text, measured over real HTTP with the scripted engine.

Everything but the model is real: server, redaction, retrieval, prompt, streaming. The engine answers at once, so the
time left is the service's own: `ttft - engine_ttft - redact - retrieve`.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.server import running
from app.settings import load_settings

_WORDS = (
    "pump valve north station pressure report depot inspection winter schedule filter engine storage quarter "
    "cable bridge signal contract supply meter repair section water turbine control budget review harbour"
).split()
_PAGES = 6
_WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Row:
    """Medians and 95th percentile over the questions of one mode, in milliseconds."""

    mode: str
    n: int
    prompt_tokens: int
    overhead_p50_ms: float
    overhead_p95_ms: float
    redact_p50_ms: float
    retrieve_p50_ms: float


async def measure_overhead(questions: int) -> list[Row]:
    """Ask `questions` different questions about one document, whole and by retrieval."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(port=0, engine="scripted", data_dir=Path(folder))
        async with running(settings) as (url, _), httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            await _upload(http, draw)
            return [await _measure(http, mode, questions, draw) for mode in ("whole", "retrieve")]


async def _upload(http: httpx.AsyncClient, draw: random.Random) -> None:
    text = "\f".join(" ".join(_sentence(draw) for _ in range(35)) for _ in range(_PAGES))
    accepted = (await http.post("/v1/documents", files={"files": ("report.txt", text.encode())})).raise_for_status()
    url = accepted.json()["documents"][0]["status_url"]
    async with http.stream("GET", f"{url}/events") as events:
        async for _ in events.aiter_lines():
            pass
    if (await http.get(url)).json()["status"] != "ready":
        raise RuntimeError("the document that is asked about was not ingested")


async def _measure(http: httpx.AsyncClient, mode: str, questions: int, draw: random.Random) -> Row:
    answers = []
    for _ in range(_WARM_UP + questions):
        body = {"question": f"What about {_sentence(draw)}", "mode": mode, "stream": False}
        answers.append((await http.post("/v1/ask", json=body)).raise_for_status().json())
    answers = answers[_WARM_UP:]
    overheads = sorted(_overhead(answer["timings"]) for answer in answers)
    return Row(
        mode=mode,
        n=questions,
        prompt_tokens=round(statistics.median(answer["usage"]["prompt_tokens"] for answer in answers)),
        overhead_p50_ms=1000 * statistics.median(overheads),
        overhead_p95_ms=1000 * overheads[int(0.95 * len(overheads))],
        redact_p50_ms=1000 * statistics.median(answer["timings"]["redact"] for answer in answers),
        retrieve_p50_ms=1000 * statistics.median(answer["timings"]["retrieve"] for answer in answers),
    )


def _overhead(timings: dict[str, Any]) -> float:
    return float(timings["ttft"] - timings["engine_ttft"] - timings["redact"] - timings["retrieve"])


def _sentence(draw: random.Random) -> str:
    words = [draw.choice(_WORDS) for _ in range(12)]
    return f"{' '.join(words).capitalize()} {draw.randrange(10, 99)}."
