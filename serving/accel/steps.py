"""A step of the engine is split: rows with sparse tiles on one side, everything else on the other. For every device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index

from serving.accel import channel, plugin
from serving.accel.policy import Selector, Tiling
from serving.accel.requests import UNREADABLE, Asked, Requests, follow


@dataclass(frozen=True, slots=True)
class SparseRow:
    """Row `number` of the batch, which has sparse tiles; `tokens` are its places in the batch."""

    asked: Asked
    number: int
    tokens: slice
    tiles: Tiling


def follow_runner(
    vllm_config: VllmConfig, selector: Selector, report: Callable[[channel.Sender, Asked], None]
) -> Requests:
    """Listen to the model runner of this process, and say that the backend is in use.

    Args:
        selector: of requests that do not say.
        report: sends what became of a request.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    if vllm_config.use_v2_model_runner:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    # Every rank chooses for its own heads; one of them tells.
    sender = channel.Sender(os.environ.get(channel.VARIABLE) if get_tensor_model_parallel_rank() == 0 else None)
    requests = Requests(
        sparse=plugin.switch() == "sparse", selector=selector, report=lambda asked: report(sender, asked)
    )
    follow(GPUModelRunner, requests)
    sender.send({"trace": plugin.HELLO, "selector": str(selector)})
    return requests


def introduce(layer_names: Sequence[str], vllm_config: VllmConfig, refusal: Callable[[Any], str | None]) -> str | None:
    """Tell the attention of each layer its number and whether it can be sparse.

    Args:
        refusal: why an attention is always read exactly, in a few fixed words, or None.

    Returns:
        why requests are always read exactly by these layers; with one layer that can be sparse they are not.
    """
    refusals = set()
    for name in layer_names:
        impl = vllm_config.compilation_config.static_forward_context[name].impl
        impl.layer = extract_layer_index(name)
        impl.layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        impl.refusal = refusal(impl)
        refusals.add(impl.refusal)
    return None if None in refusals else refusals.pop()


def sparse_rows(
    requests: Requests,
    starts: Sequence[int],
    ends: Sequence[int],
    page: int,
    refusal: Callable[[Asked], str | None],
    rows: int,
) -> list[SparseRow]:
    """The rows of the running step that are read sparsely. What a request reads exactly is counted here.

    Args:
        starts: [batch + 1], where the tokens of each row begin in the batch.
        ends: [batch], the position after the last token of each row in its request.
        page: tokens that are chosen as a whole.
        refusal: why a request cannot be read sparsely as it asked, in a few fixed words, or None.
        rows: layers times heads, for which a page of a dense tile counts.
    """
    sparse = []
    for number, end in enumerate(ends):
        if (asked := requests.row(number)) is None:
            continue
        tokens = slice(starts[number], starts[number + 1])
        tiles = _tiles(asked, tokens, end, page, refusal)
        if tiles is not None and asked.takes(tiles, rows):
            sparse.append(SparseRow(asked, number, tokens, tiles))
        if end >= asked.prompt_tokens:
            requests.ends(asked)
    return sparse


def _tiles(asked: Asked, tokens: slice, end: int, page: int, refusal: Callable[[Asked], str | None]) -> Tiling | None:
    count = tokens.stop - tokens.start
    if not asked.sparse or asked.refusal == UNREADABLE or end - count >= asked.prompt_tokens:
        return None
    # Another group of layers may still read it sparsely.
    if reason := refusal(asked):
        asked.refusal = reason
        return None
    return Tiling(end - count, count, asked.dense_from, page, asked.selector)
