"""Means of keys as they lie in the cache: written by hand in each order, and by vLLM's own kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from serving.accel.page_means import KeyOrder, find_key_order, span_means

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Of the means: sums are made in the type of the cache, and read as bfloat16 where it is an 8-bit one.
TOLERANCE = {
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.float8_e4m3fn: 8e-3,
    torch.float8_e5m2: 8e-3,
}
HEADS = 3

Write = Callable[[Tensor, Tensor], None]


def _keys(page: int, size: int, seed: int = 0) -> Tensor:
    """Of three pages and a half, [tokens, heads, head size]."""
    return torch.randn(3 * page + page // 2 + 5, HEADS, size, generator=torch.Generator().manual_seed(seed))


def _poisoned(page: int, size: int, dtype: torch.dtype) -> Tensor:
    """A cache of six pages that holds nothing but NaN."""
    return torch.full((6, HEADS, page, 2 * size), float("nan")).to(dtype)


def _by_hand(keys: Tensor, cache: Tensor, pages: list[int], order: KeyOrder) -> None:
    """One number after another, where the order says it is."""
    page, size = cache.shape[2], cache.shape[3] // 2
    flat = cache.view(*cache.shape[:2], -1)
    token = torch.arange(len(keys))[:, None]
    dim = torch.arange(size)
    inner = token % page
    if order == "transposed":
        place = dim * page + inner
    else:
        place = inner // 16 * 16 * size + dim // 2 * 32 + inner % 16 * 2 + dim % 2
    for head in range(HEADS):
        flat[torch.tensor(pages)[token // page], head, place] = keys[:, head].to(cache.dtype)


def _by_kernel(
    keys: Tensor, cache: Tensor, pages: list[int], isa: str, kv_cache_dtype: str = "auto", scale: float = 1.0
) -> None:
    from vllm import _custom_ops as ops

    page = cache.shape[2]
    token = torch.arange(len(keys))
    raw = cache if kv_cache_dtype == "auto" else cache.view(torch.uint8)
    key_cache, value_cache = raw.view(*cache.shape[:2], 2 * page, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys,
        torch.zeros_like(keys),
        key_cache,
        value_cache,
        torch.tensor(pages)[token // page] * page + token % page,
        isa,
        k_scale=scale,
        kv_cache_dtype=kv_cache_dtype,
    )


def _expected(stored: Tensor, page: int, span: int) -> Tensor:
    """Means of what has been written, [heads, head size, spans]; unwritten spans are zero."""
    means = torch.stack([part.double().mean(0) for part in stored.split(span)], -1)
    spans = -(-len(stored) // page) * page // span
    return torch.nn.functional.pad(means, (0, spans - means.shape[-1])).float()


def _check(keys: Tensor, cache: Tensor, span: int, order: KeyOrder, scale: float = 1.0) -> None:
    page, pages = cache.shape[2], torch.tensor(PAGES)
    before = cache.view(torch.uint8).clone()
    means = span_means(cache, pages, (len(keys) - 1) % page + 1, span, order, scale)
    stored = (keys / scale).to(cache.dtype).float() * scale
    assert means.dtype == torch.float32
    torch.testing.assert_close(
        means, _expected(stored, page, span), rtol=TOLERANCE[cache.dtype], atol=TOLERANCE[cache.dtype]
    )
    # The cache is read only.
    assert torch.equal(before, cache.view(torch.uint8))


# Neither the first page nor in order, as in a cache that has been in use.
PAGES = [4, 1, 5, 2]


@pytest.mark.parametrize("order", get_args(KeyOrder))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("page", "size", "span"), [(32, 64, 16), (64, 64, 8), (64, 128, 64), (128, 128, 16)])
def test_means_of_keys_written_by_hand(order: KeyOrder, dtype: torch.dtype, page: int, size: int, span: int) -> None:
    keys, cache = _keys(page, size), _poisoned(page, size, dtype)
    _by_hand(keys, cache, PAGES, order)
    _check(keys, cache, span, order)


@pytest.mark.parametrize("order", get_args(KeyOrder))
@pytest.mark.parametrize("filled", [1, 7, 8, 9, 31, 32])
def test_the_last_page_is_read_as_far_as_it_is_filled(order: KeyOrder, filled: int) -> None:
    keys, cache = _keys(32, 64)[: 3 * 32 + filled], _poisoned(32, 64, torch.float32)
    _by_hand(keys, cache, PAGES, order)
    _check(keys, cache, 8, order)


@pytest.mark.parametrize("span", [1, 4, 12, 48, 96])
def test_spans_of_a_page_that_is_no_power_of_two(span: int) -> None:
    keys, cache = _keys(96, 64), _poisoned(96, 64, torch.float32)
    _by_hand(keys, cache, PAGES, "transposed")
    _check(keys, cache, span, "transposed")


# What the engine's kernels can be asked for.
KERNELS: list[tuple[str, torch.dtype, str, KeyOrder]] = [
    ("vec", torch.bfloat16, "auto", "transposed"),
    ("vec", torch.float16, "auto", "transposed"),
    ("vec", torch.float32, "auto", "transposed"),
    ("vec", torch.bfloat16, "fp8_e4m3", "transposed"),
    ("vec", torch.float16, "fp8_e5m2", "transposed"),
    ("vec", torch.float32, "fp8_e4m3", "transposed"),
    ("vec16", torch.bfloat16, "auto", "transposed"),
    ("vec16", torch.float32, "auto", "transposed"),
    ("amx", torch.bfloat16, "auto", "paired"),
    ("amx", torch.float16, "auto", "paired"),
    ("amx", torch.bfloat16, "fp8_e4m3", "paired"),
    ("amx", torch.bfloat16, "fp8_e5m2", "paired"),
]


@pytest.mark.parametrize(("isa", "dtype", "kv_cache_dtype", "order"), KERNELS)
@pytest.mark.parametrize(("page", "size"), [(32, 64), (64, 128), (128, 64)])
def test_means_of_keys_written_by_the_kernel(
    isa: str, dtype: torch.dtype, kv_cache_dtype: str, order: KeyOrder, page: int, size: int
) -> None:
    # Writing needs no special registers, so every order can be written on every machine with AVX-512.
    scale = 1.0 if kv_cache_dtype == "auto" else 0.5
    cache = _poisoned(page, size, FP8.get(kv_cache_dtype, dtype))
    # Keys that the cache holds exactly: the kernel cuts off what it cannot hold, torch would round it.
    keys = _keys(page, size).to(cache.dtype).to(dtype) * scale
    _by_kernel(keys, cache, PAGES, isa, kv_cache_dtype, scale)
    _check(keys, cache, 16, order, scale)

    def write(keys: Tensor, cache: Tensor) -> None:
        _by_kernel(keys.to(dtype), cache, [0], isa, kv_cache_dtype)

    assert find_key_order(write, torch.zeros(1, 1, page, 2 * size, dtype=cache.dtype)) == order


def _in_order(order: KeyOrder) -> Write:
    def write(keys: Tensor, cache: Tensor) -> None:
        _one_head(keys, cache, order)

    return write


def _one_head(keys: Tensor, cache: Tensor, order: KeyOrder) -> None:
    page, size = cache.shape[2], cache.shape[3] // 2
    wide = torch.zeros(1, HEADS, page, 2 * size, dtype=cache.dtype)
    _by_hand(keys.expand(-1, HEADS, -1), wide, [0], order)
    cache.copy_(wide[:, :1])


def _plain(keys: Tensor, cache: Tensor) -> None:
    cache.view(-1)[: keys.numel()] = keys.flatten().to(cache.dtype)


def _values_first(keys: Tensor, cache: Tensor) -> None:
    cache.view(-1)[keys.numel() :] = keys[:, 0].T.flatten().to(cache.dtype)


def _nothing(keys: Tensor, cache: Tensor) -> None:
    pass


def _amx_of_float32(keys: Tensor, cache: Tensor) -> None:
    _by_kernel(keys, cache, [0], "amx")


@pytest.mark.parametrize(
    ("write", "order"),
    [
        pytest.param(_in_order("transposed"), "transposed", id="transposed"),
        pytest.param(_in_order("paired"), "paired", id="paired"),
        pytest.param(_plain, None, id="token after token"),
        pytest.param(_values_first, None, id="behind the values"),
        pytest.param(_nothing, None, id="not written"),
        pytest.param(_amx_of_float32, None, id="pairs of four bytes"),
    ],
)
def test_an_order_is_found_or_unknown(write: Write, order: KeyOrder | None) -> None:
    assert find_key_order(write, torch.zeros(1, 1, 32, 128)) == order


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_type_of_cache_holds_the_keys_that_find_the_order(dtype: torch.dtype) -> None:
    assert find_key_order(_in_order("paired"), torch.zeros(1, 1, 64, 256, dtype=dtype)) == "paired"


def test_pairs_are_not_looked_for_in_pages_that_have_none() -> None:
    assert find_key_order(_plain, torch.zeros(1, 1, 40, 10)) is None
