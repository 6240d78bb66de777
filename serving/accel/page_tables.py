"""Tiles become virtual sequences: what a paged attention kernel reads instead of whole requests.

Every pair of a head and a tile of queries is a sequence of its own, whose page table lists only the pages that the tile
keeps, ascending. Its length is that of a sequence whose last page is filled up to the tile's last query. Kernels align
causal masks to the last key, so the mask is exact, and keys were rotated when they were written, so skipping pages
moves nothing. KV heads are folded into pages: page p of head h is the virtual page p * heads + h of a cache with one
head, which is the same memory seen with other strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.accel.policy import Tiling


@dataclass(frozen=True, slots=True)
class VirtualSequences:
    """Sequences for one call of a kernel, all int32.

    `starts` [sequences + 1]: where the queries of each begin; `lengths` [sequences]: keys that each reads, its own
    included; `tables` [sequences, most pages]: its virtual pages. `kept` is the number of pages read.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    kept: int


def virtual_sequences(kept: Tensor, pages: Tensor, kv_heads: int, tiles: Tiling) -> VirtualSequences:
    """The virtual sequences of one request, head after head, tile after tile.

    Args:
        kept: [heads, tiles, pages], bool; a tile's last visible page must be among its pages.
        pages: [pages], where the request's pages lie in the cache.
        kv_heads: of the cache; `heads` is a multiple of it, and neighbours share a KV head.
    """
    heads, count, _ = kept.shape
    rows = kept.view(heads * count, -1)
    counts = rows.sum(-1)
    width = int(counts.max())
    head = torch.arange(heads) // (heads // kv_heads)
    virtual = (pages * kv_heads + head[:, None]).to(torch.int32).repeat_interleave(count, 0)
    # Both masks are walked row by row, so each row's pages land in its own beginning.
    tables = torch.zeros(len(rows), width, dtype=torch.int32)
    tables.masked_scatter_(torch.arange(width) < counts[:, None], virtual.masked_select(rows))
    last_page = (tiles.ends - 1) // tiles.page
    lengths = (counts.view(heads, count) - 1) * tiles.page + tiles.ends - last_page * tiles.page
    starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
    torch.cumsum(tiles.lengths.repeat(heads), 0, dtype=torch.int32, out=starts[1:])
    return VirtualSequences(starts, lengths.flatten().to(torch.int32), tables, int(counts.sum()))


def joined(parts: Sequence[VirtualSequences]) -> VirtualSequences:
    """The sequences of several requests, one request after another."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.tables.shape[1] for part in parts)
    starts = [parts[0].starts]
    for part in parts[1:]:
        starts.append(part.starts[1:] + starts[-1][-1])
    return VirtualSequences(
        starts=torch.cat(starts),
        lengths=torch.cat([part.lengths for part in parts]),
        tables=torch.cat([torch.nn.functional.pad(part.tables, (0, width - part.tables.shape[1])) for part in parts]),
        kept=sum(part.kept for part in parts),
    )
