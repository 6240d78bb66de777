"""Means of neighbouring keys, read from the pages of the cache; nothing is remembered between steps.

The CPU kernels store a page's keys in an order of their own, which depends on the instruction set. The order is not
assumed but found out: a page is written with the engine's own kernel and read back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

# transposed: [head size, tokens]. paired: [tokens / 16, head size / 2, 16, 2], for the tile registers of AMX.
KeyOrder = Literal["transposed", "paired"]

_PAIRED_TOKENS = 16


def find_key_order(write: Callable[[Tensor, Tensor], None], cache: Tensor) -> KeyOrder | None:
    """The order in which keys are stored, or None when it is none that is known.

    Args:
        write: stores keys [tokens, 1, head size] in float32 as the first page of the cache.
        cache: [1, 1, tokens, 2 * head size], as the engine makes it, for this purpose.
    """
    tokens, size = cache.shape[2], cache.shape[3] // 2
    # Small whole numbers, which every type of the cache holds exactly.
    keys = torch.arange(tokens * size).view(tokens, 1, size).mul(7919).remainder(8).float()
    write(keys, cache)
    orders: tuple[KeyOrder, ...] = get_args(KeyOrder)
    for order in orders:
        if order == "paired" and (tokens % _PAIRED_TOKENS or size % 2):
            continue
        if torch.equal(_keys(cache, torch.tensor([0]), order).float(), keys.permute(1, 2, 0)[None]):
            return order
    return None


def span_means(cache: Tensor, pages: Tensor, filled: int, span: int, order: KeyOrder, scale: float = 1.0) -> Tensor:
    """Means of every `span` neighbouring keys of a request.

    Args:
        cache: [pages, KV heads, page size, 2 * head size]; the first half of a page and head holds its keys.
        pages: [pages of the request], int64, where its pages lie in the cache.
        filled: tokens of the last page that have been written; what lies behind them is never read.
        span: divides the page size.
        scale: what stored keys are multiplied with, for quantised caches.

    Returns:
        [KV heads, head size, pages * page size / span] in float32. The last written span may be shorter; spans that
        have not been written are zero.
    """
    page, spans = cache.shape[2], cache.shape[2] // span
    keys = _keys(cache, pages, order)
    if filled < page:
        keys[-1, :, :, filled:] = 0
    # A product with a small matrix is several times faster than a mean over the last axis.
    means = (keys.view(-1, page) @ _averaging(page, span, keys.dtype)).view(*keys.shape[:-1], spans)
    means = means.permute(1, 2, 0, 3).reshape(cache.shape[1], -1, len(pages) * spans).float()
    if rest := filled % span:
        means[:, :, (len(pages) - 1) * spans + filled // span] *= span / rest
    return means if scale == 1.0 else means.mul_(scale)


def _keys(cache: Tensor, pages: Tensor, order: KeyOrder) -> Tensor:
    """A copy of the pages' keys, [pages, KV heads, head size, tokens], in a type that can be computed with."""
    _, heads, tokens, twice = cache.shape
    keys = cache.flatten(2)[:, :, : tokens * twice // 2].index_select(0, pages)
    if keys.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        keys = keys.bfloat16()
    if order == "transposed":
        return keys.view(-1, heads, twice // 2, tokens)
    paired = keys.view(-1, heads, tokens // _PAIRED_TOKENS, twice // 4, _PAIRED_TOKENS, 2)
    return paired.permute(0, 1, 3, 5, 2, 4).reshape(-1, heads, twice // 2, tokens)


@lru_cache(maxsize=16)
def _averaging(page: int, span: int, dtype: torch.dtype) -> Tensor:
    """[page, page / span]: what a row of a page's keys is multiplied with to get its means."""
    return torch.eye(page // span, dtype=dtype).repeat_interleave(span, 0) / span
