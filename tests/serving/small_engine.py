"""Asking the small real engine that tests share, and what to ask it."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.engine import Message, Prefill, Request, Sampling
from serving.vllm_engine import VllmEngine


@dataclass(frozen=True)
class Answered:
    text: str
    prefill: Prefill
    first: dict[int, float]


async def ask(
    engine: VllmEngine, prompt: Sequence[int], salt: str | None = None, max_tokens: int = 12, **fields: Any
) -> Answered:
    id = uuid.uuid4().hex
    request = Request(prompt, id, salt or id, Sampling(max_tokens=max_tokens, logprobs=5), **fields)
    deltas = [delta async for delta in engine.generate(request)]
    prefill, logprobs = deltas[0].prefill, deltas[0].logprobs
    assert prefill is not None
    assert logprobs
    return Answered("".join(delta.text for delta in deltas), prefill, dict(logprobs[0]))


def prompt(engine: VllmEngine, buoys: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    text = " ".join(f"Buoy number {n} lies at a depth of {draw.randrange(20, 90)} metres." for n in range(buoys))
    question = f"{text} The spare key is in locker {draw.randrange(10, 99)}. Where is the spare key?"
    return engine.render_chat([Message("user", question)])


def close(left: Answered, right: Answered, tolerance: float = 1e-3) -> bool:
    common = left.first.keys() & right.first.keys()
    return len(common) >= 4 and all(abs(left.first[token] - right.first[token]) < tolerance for token in common)
