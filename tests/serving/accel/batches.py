"""Batches of requests as vLLM hands them to attention backends, for tests of all of these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from serving.accel.channel import DENSE_FROM, PREFILL, SELECTOR, TRACE
from serving.accel.policy import Tiling
from serving.accel.requests import Requests


@dataclass(frozen=True)
class Prompt:
    """Of a request: `first` tokens lie in the cache already, the step reads those up to `end`."""

    id: str
    first: int
    end: int
    prompt: int
    extra_args: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.end - self.first


def sparse(id: str, first: int, end: int, prompt: int | None = None, *, selector: str) -> Prompt:
    prompt = prompt or end
    asked = {PREFILL: "sparse", SELECTOR: selector, DENSE_FROM: prompt - 20, TRACE: id}
    return Prompt(id, first, end, prompt, asked)


def exact(id: str, first: int, end: int, prompt: int | None = None) -> Prompt:
    return Prompt(id, first, end, prompt or end, {PREFILL: "exact"})


def announce(requests: Requests, rows: Sequence[Prompt]) -> None:
    """A step of these rows begins, and all of them are new, unless they are known already."""
    new = [
        SimpleNamespace(
            req_id=row.id,
            prompt_token_ids=[0] * row.prompt,
            sampling_params=SimpleNamespace(extra_args=row.extra_args),
        )
        for row in rows
    ]
    requests.begin(SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=()))
    requests.order(tuple(row.id for row in rows))


def places(rows: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Where the tokens of each row begin in the batch, and where each row ends in its request."""
    starts = torch.tensor([0, *(row.tokens for row in rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return starts, torch.tensor([row.end for row in rows], dtype=torch.int32)


def table(tables: Sequence[Sequence[int]]) -> Tensor:
    """Page tables of several rows, filled up with page 0."""
    width = max(map(len, tables)) + 1
    return torch.tensor([[*pages, *[0] * (width - len(pages))] for pages in tables]).int()


def alike(
    id: str, heads: int, kv_heads: int, size: int, dtype: torch.dtype, eight_bits: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a request; neighbours are alike, so that there is something to choose from.

    Args:
        eight_bits: a type that holds the numbers exactly; kernels cut off what it cannot hold.
    """
    noise = torch.Generator().manual_seed(sum(map(ord, id)))
    length = 800

    def make(heads: int, alike: float) -> Tensor:
        common = torch.randn(length // 16, heads, size, generator=noise).repeat_interleave(16, 0)
        own = torch.randn(length, heads, size, generator=noise)
        made = (alike * common + (1 - alike) * own).to(dtype)
        return made if eight_bits is None else made.to(eight_bits).to(dtype)

    return make(heads, 0.9), make(kv_heads, 0.9), make(kv_heads, 0.0)


def describe_llama(folder: Path, heads: int, kv_heads: int, size: int, layers: int = 1) -> None:
    """Write a model's configuration; there are no weights."""
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": heads * size,
        "head_dim": size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": 64,
    }
    (folder / "config.json").write_text(json.dumps(described))


def virtual_sequences(tiles: Tiling, heads: int, kv_heads: int) -> list[tuple[int, int]]:
    """Tile and choosing head of each virtual sequence on a GPU, in their order."""
    backwards = range(tiles.count - 1, -1, -1)
    tail = [tile for tile in backwards if tiles.ends[tile] > tiles.dense_from]
    others = [tile for tile in backwards if tile not in tail]
    each = heads // kv_heads
    return [(tile, head) for tile in tail for head in range(heads)] + [
        (tile, first + head) for first in range(0, heads, each) for tile in others for head in range(each)
    ]
