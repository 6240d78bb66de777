"""Attention written out, in float32 and one head and query at a time: what the backend must reproduce."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serving.accel.policy import Tiling


def dense_attention(query: Tensor, key: Tensor, value: Tensor, first: int, scale: float) -> Tensor:
    """Causal attention (Vaswani et al., 2017, arXiv:1706.03762), [tokens, query heads, head size] in float32.

    Args:
        query: [tokens, query heads, head size], from position `first`.
        key, value: [positions, KV heads, head size], from position 0.
    """
    seen = torch.arange(len(key)) <= first + torch.arange(len(query))[:, None]
    return _attention(query, key, value, seen.expand(query.shape[1], -1, -1), scale)


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, scale: float, tiles: Tiling) -> Tensor:
    """Causal attention over the kept pages of each tile only, [tokens, query heads, head size] in float32.

    Args:
        query: [tokens, query heads, head size].
        key, value: [positions, KV heads, head size], from position 0.
        kept: [heads, tiles, pages], bool; for each query head, or for each KV head.
    """
    positions = tiles.first + torch.arange(len(query))
    tile = positions // tiles.selector.tile - tiles.first // tiles.selector.tile
    by_query = kept.repeat_interleave(query.shape[1] // len(kept), 0)[:, tile]
    seen = by_query.repeat_interleave(tiles.page, 2)[..., : len(key)] & (torch.arange(len(key)) <= positions[:, None])
    return _attention(query, key, value, seen, scale)


def _attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    out = torch.empty(query.shape, dtype=torch.float32)
    for head in range(query.shape[1]):
        keys, values = key[:, head // group].float(), value[:, head // group].float()
        for token in range(len(query)):
            which = seen[head, token].nonzero()[:, 0]
            logits = keys[which] @ query[token, head].float() * scale
            weights = torch.exp(logits - logits.max())
            out[token, head] = weights @ values[which] / math.fsum(weights.tolist())
    return out
