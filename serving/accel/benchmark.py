"""Attention alone on this GPU, vLLM's kernel against ours: `python -m serving.accel.benchmark [--help]`.

One chunk of queries at the end of a prompt, random numbers, fixed budgets: what is kept has no meaning here, only its
amount. Times are medians of alternating runs, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from vllm.v1.attention.backends import fa_utils

from serving.accel.cuda_backend import DEFAULT, Scales, SparseFlashAttentionImpl, chosen_together, together
from serving.accel.policy import Selector, Tiling
from serving.accel.requests import Asked
from serving.accel.steps import SparseRow

_LAUNCH_CYCLES = 4_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=131_072, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=8_192, help="tokens of the step")
    parser.add_argument("--heads", default="32/8", help="query heads / KV heads")
    parser.add_argument("--size", type=int, default=128, help="of a head")
    parser.add_argument("--pages", default="16,128", help="tokens of a page")
    parser.add_argument("--densities", default="0.05,0.1", help="shares of the visible pages that are kept")
    parser.add_argument("--fp8", action="store_true", help="queries, keys and values in eight bits")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    heads, kv_heads = map(int, given.heads.split("/"))
    where = f"{given.chunk:,} queries at the end of {given.length:,} tokens"
    print(f"{torch.cuda.get_device_name()}, {where}, heads {heads}/{kv_heads}")
    print(f"{'page':>5} {'selector':42} {'stock':>7} {'kernel':>7} {'choice':>7} {'all':>7} {'x':>6} {'x all':>6}")
    selectors: Mapping[str, Selector] = {
        "tile=128": DEFAULT,
        "tile=128,span=32": replace(DEFAULT, span=32),
        "tile=128,span=32,group=32": replace(DEFAULT, span=32, group=32),
        "tile=128,heads=kv": replace(DEFAULT, heads="kv"),
        "tile=64,heads=kv": replace(DEFAULT, tile=64, heads="kv"),
        "alpha:0.02,tile=128": DEFAULT,
    }
    for page in map(int, given.pages.split(",")):
        for density in map(float, given.densities.split(",")):
            for name, selector in selectors.items():
                if not name.startswith("alpha"):
                    selector = replace(selector, rule="budget", value=density, late=density)
                    name = f"budget:{density},{name}"
                times = _times(given, heads, kv_heads, page, selector)
                stock, kernel, choice, whole = times
                row = f"{page:5} {name:42} {stock:7.3f} {kernel:7.3f} {choice:7.3f} {whole:7.3f}"
                print(f"{row} {stock / kernel:6.1f} {stock / whole:6.1f}", flush=True)


def _times(given: argparse.Namespace, heads: int, kv_heads: int, page: int, selector: Selector) -> list[float]:
    torch.manual_seed(0)
    device, size, length, chunk = torch.device("cuda"), given.size, given.length, given.chunk
    dtype = torch.float8_e4m3fn if given.fp8 else torch.bfloat16
    scale = size**-0.5
    impl = SparseFlashAttentionImpl(heads, size, scale, kv_heads, None, None, "fp8_e4m3" if given.fp8 else "auto")
    pages = length // page
    memory = torch.randn(pages, page, kv_heads, 2 * size, device=device, dtype=torch.bfloat16).to(dtype)
    cache = memory.transpose(1, 2)
    query = torch.randn(chunk, heads, size, device=device, dtype=torch.bfloat16).to(dtype)
    output = torch.empty(chunk, heads, size, device=device, dtype=torch.bfloat16)
    table = torch.randperm(pages, device=device).int()[None]
    one = torch.ones(1, device=device)
    scales = Scales(one, one, one, 1.0)
    tiles = Tiling(length - chunk, chunk, length, chosen_together(page), selector)
    row = SparseRow(Asked(length), 0, slice(0, chunk), tiles)
    rows = together([row], heads, kv_heads, device)
    buffers = rows.buffers = impl.buffers(query, page, rows, output)
    starts = torch.tensor([0, chunk], dtype=torch.int32, device=device)
    used = torch.tensor([length], dtype=torch.int32, device=device)
    descale = one.expand(1, kv_heads) if given.fp8 else None

    def stock() -> None:
        key, value = cache.transpose(1, 2).split(size, dim=-1)
        fa_utils.flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=output,
            max_seqlen_q=chunk,
            cu_seqlens_q=starts,
            max_seqlen_k=length,
            seqused_k=used,
            softmax_scale=scale,
            causal=True,
            block_table=table,
            fa_version=3,
            q_descale=descale,
            k_descale=descale,
            v_descale=descale,
        )

    return _alternating(
        given.repeats,
        stock,
        lambda: impl.read(cache, rows, buffers, scales),
        lambda: impl.choose(query, cache, table, rows, buffers, scales),
        lambda: impl.attend(query, cache, table, rows, output, scales),
    )


def _alternating(repeats: int, *what: Callable[[], None]) -> list[float]:
    """The median time of each, in milliseconds; the last runs first, because others read what it leaves."""
    for run in reversed(what):
        run()
    times: list[list[float]] = [[] for _ in what]
    for _ in range(repeats):
        for run, taken in zip(what, times, strict=True):
            begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            # In an engine the device has work while the host launches more; here it sleeps for that long.
            torch.cuda._sleep(_LAUNCH_CYCLES)
            begun.record()
            run()
            done.record()
            torch.cuda.synchronize()
            taken.append(begun.elapsed_time(done))
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    main()
