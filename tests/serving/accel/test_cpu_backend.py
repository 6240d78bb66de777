"""The backend on real kernels and caches, without an engine; whatever must not be read is NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.accel.channel import SELECTOR
from serving.accel.policy import group_means, keep, page_shares
from serving.accel.reference import dense_attention, sparse_attention
from serving.accel.requests import Asked, Requests
from tests.serving.accel.batches import Prompt, alike, announce, describe_llama, exact, places, sparse, table

pytestmark = pytest.mark.usefixtures("vllm_attention")

SELECTOR_TEXT = "alpha:0.9,late=0.9,tile=32,group=16,span=16,sink=0,window=32,start=64"
SCALE = 0.3
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PAGES = 64

# (relative, absolute) differences to attention in float32: the output's rounding and little else.
TOLERANCE = {torch.float32: (4e-6, 4e-6), torch.float16: (5e-4, 1e-5), torch.bfloat16: (4e-3, 1e-5)}
if torch.cpu._is_amx_tile_supported():
    # Its weights are rounded to bfloat16, too.
    TOLERANCE[torch.bfloat16] = (8e-3, 8e-3)


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype = torch.bfloat16
    kv_cache: str = "auto"
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    page: int = 32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}-{self.kv_cache}-{self.heads}/{self.kv_heads}-{self.size}-page{self.page}"


SHAPES = [
    Shape(),
    Shape(page=64),
    Shape(page=128),
    Shape(size=128),
    Shape(heads=9, kv_heads=3),
    Shape(heads=8, kv_heads=2, size=128, page=64),
    Shape(heads=4, kv_heads=4),
    Shape(torch.float16),
    Shape(torch.float16, heads=9, kv_heads=3, size=128, page=128),
    Shape(torch.float32),
    Shape(torch.float32, heads=9, kv_heads=3, size=128, page=64),
    Shape(torch.float32, heads=4, kv_heads=4, page=128),
    Shape(kv_cache="fp8_e4m3"),
    Shape(kv_cache="fp8_e5m2", size=128, page=64),
    Shape(torch.float16, "fp8_e4m3", heads=9, kv_heads=3),
    Shape(torch.float32, "fp8_e4m3", page=128),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


_sparse = partial(sparse, selector=SELECTOR_TEXT)


@cache
def _tokens(shape: Shape, id: str) -> tuple[Tensor, Tensor, Tensor]:
    return alike(id, shape.heads, shape.kv_heads, shape.size, shape.dtype, FP8.get(shape.kv_cache))


class Model:
    """Layers that share a cache, and the metadata builder of their group."""

    def __init__(self, folder: Path, requests: Requests, shape: Shape, *layers: dict[str, Any], count: int = 1) -> None:
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from serving.accel.cpu_backend import SparseCPUAttentionBackend, SparseCPUMetadataBuilder

        describe_llama(folder, shape.heads, shape.kv_heads, shape.size, count)
        model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype=shape.dtype)
        memory = CacheConfig(block_size=shape.page, cache_dtype=shape.kv_cache)
        config = VllmConfig(model_config=model, cache_config=memory, device_config=DeviceConfig("cpu"))
        self.shape, self.requests = shape, requests
        self.layers: dict[str, Any] = {}
        for number, settings in enumerate(layers or [{}] * count):
            name = f"model.layers.{number}.self_attn.attn"
            with set_current_vllm_config(config):
                self.layers[name] = Attention(
                    shape.heads,
                    shape.size,
                    SCALE,
                    shape.kv_heads,
                    cache_config=memory,
                    prefix=name,
                    attn_backend=SparseCPUAttentionBackend,
                    **settings,
                )
        self.spec = FullAttentionSpec(
            block_size=shape.page, num_kv_heads=shape.kv_heads, head_size=shape.size, dtype=shape.dtype
        )
        if shape.kv_cache in FP8:
            for layer in self.layers.values():
                layer._k_scale_float, layer._v_scale_float = 0.5, 0.25
        self.config = config
        SparseCPUMetadataBuilder.requests = requests
        self.builder = self.group(*self.layers)
        dtype = FP8.get(shape.kv_cache, shape.dtype)
        self._typed = torch.full((PAGES, shape.kv_heads, shape.page, 2 * shape.size), float("nan")).to(dtype)
        self.cache = self._typed.view(torch.uint8) if shape.kv_cache in FP8 else self._typed
        # Pages are handed out in no order; the first is nobody's, because tables are filled up with it.
        self._free = (1 + torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(5))).tolist()
        self._pages: dict[str, list[int]] = {}
        self._written: dict[str, int] = {}

    def group(self, *names: str) -> Any:
        """A builder for these layers."""
        from serving.accel.cpu_backend import SparseCPUMetadataBuilder

        return SparseCPUMetadataBuilder(self.spec, list(names), self.config, torch.device("cpu"))

    @property
    def impl(self) -> Any:
        return next(iter(self.layers.values())).impl

    def begin(self, rows: Sequence[Prompt], causal: bool = True, known: bool = True) -> Any:
        """A step begins: what vLLM tells builders of it. The cache then holds the rows' tokens."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        if known:
            announce(self.requests, rows)
        tables = [self._write(row) for row in rows]
        starts, ends = places(rows)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=ends,
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(row.tokens for row in rows),
            max_seq_len=int(ends.max()),
            block_table_tensor=table(tables),
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
            causal=causal,
        )

    def _write(self, row: Prompt) -> list[int]:
        page = self.shape.page
        table = self._pages.setdefault(row.id, [])
        while len(table) * page < row.end:
            table.append(self._free.pop())
            # Kernels multiply what lies behind a sequence with zero, so it must be finite, but may be anything.
            self._typed[table[-1]] = torch.tensor(200).to(self._typed.dtype)
        _, key, value = _tokens(self.shape, row.id)
        places = torch.arange(self._written.get(row.id, 0), row.end)
        slots = torch.tensor(table)[places // page] * page + places % page
        layer = next(iter(self.layers.values()))
        self.impl.do_kv_cache_update(layer, key[places], value[places], self.cache, slots)
        self._written[row.id] = row.end
        return table

    def query(self, rows: Sequence[Prompt], padding: int = 0) -> Tensor:
        """Of the whole batch; padding is NaN."""
        queries = [_tokens(self.shape, row.id)[0][row.first : row.end] for row in rows]
        return torch.nn.functional.pad(torch.cat(queries), (0, 0, 0, 0, 0, padding), value=float("nan"))

    def forward(self, metadata: Any, query: Tensor, layer: Any = None, of: Any = None) -> Tensor:
        """Into a buffer of NaN. `of`: the class whose forward is called, ours if not given."""
        layer = layer or next(iter(self.layers.values()))
        output = torch.full_like(query, float("nan"))
        key = torch.full((len(query), self.shape.kv_heads, self.shape.size), float("nan"), dtype=query.dtype)
        forward = (of or type(layer.impl)).forward
        forward(layer.impl, layer, query, key, key, self.cache, metadata, output)
        return output

    def step(self, rows: Sequence[Prompt], padding: int = 0) -> list[Tensor]:
        """Each row's output."""
        metadata = self.builder.build(0, self.begin(rows))
        output = self.forward(metadata, self.query(rows, padding))
        assert output[len(output) - padding :].isnan().all()
        self.requests.end()
        return list(output.split([*(row.tokens for row in rows), padding]))[: len(rows)]

    def stock(self, rows: Sequence[Prompt], causal: bool = True) -> Tensor:
        """What vLLM's own backend answers."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

        metadata = CPUAttentionMetadataBuilder.build(self.builder, 0, self.begin(rows, causal, known=False))
        return self.forward(metadata, self.query(rows), of=CPUAttentionBackendImpl)

    def asked(self, id: str) -> Asked:
        self.requests.order((id,))
        asked = self.requests.row(0)
        assert asked is not None
        return asked


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    from serving.accel.cpu_backend import SparseCPUMetadataBuilder

    monkeypatch.setattr(SparseCPUMetadataBuilder, "requests", None)
    return Requests(sparse=False, report=lambda asked: None)


@pytest.fixture
def make(tmp_path: Path, requests: Requests) -> Callable[..., Model]:
    return lambda shape=SHAPES[0], *layers, count=1: Model(tmp_path, requests, shape, *layers, count=count)


Make = Callable[..., Model]


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(tiles, kept) of every choice that layers make."""
    from serving.accel.cpu_backend import SparseCPUAttentionImpl

    made: list[Any] = []
    choose = SparseCPUAttentionImpl._choose

    def spy(self: Any, layer: Any, query: Tensor, cache: Tensor, pages: Tensor, tiles: Any) -> Tensor:
        kept = choose(self, layer, query, cache, pages, tiles)
        made.append((tiles, kept))
        return kept

    monkeypatch.setattr(SparseCPUAttentionImpl, "_choose", spy)
    return made


def _dense(shape: Shape, row: Prompt) -> Tensor:
    query, key, value = _tokens(shape, row.id)
    return dense_attention(query[row.first : row.end], key[: row.end], value[: row.end], row.first, SCALE)


def _with_pages(shape: Shape, row: Prompt, tiles: Any, kept: Tensor) -> Tensor:
    query, key, value = _tokens(shape, row.id)
    return sparse_attention(query[row.first : row.end], key[: row.end], value[: row.end], kept, SCALE, tiles)


def _close(output: Tensor, expected: Tensor) -> None:
    relative, absolute = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.float(), expected.float(), rtol=relative, atol=absolute)


# Lengths that end in the middle of a tile, a page and a group, and at their ends.
RAGGED = [
    _sparse("whole", 0, 301),
    exact("exact", 0, 150),
    exact("decoding", 199, 200, prompt=150),
    _sparse("chunk", 224, 288, prompt=350),
    _sparse("short query, long context", 300, 313, prompt=400),
    _sparse("decoding after sparse", 310, 311, prompt=300),
    _sparse("too short", 0, 70),
    exact("exact chunk", 130, 180),
]
SPARSE = [row for row in RAGGED if row.id in ("whole", "chunk", "short query, long context")]


@each_shape
@pytest.mark.parametrize("heads", ["query", "kv"])
def test_a_mixed_batch_is_what_the_reference_says(make: Make, choices: list[Any], shape: Shape, heads: str) -> None:
    rows = [replace(row, extra_args={**row.extra_args, SELECTOR: f"{SELECTOR_TEXT},heads={heads}"}) for row in RAGGED]
    model = make(shape)
    outputs = model.step(rows, padding=3)
    chosen = {row.id: choice for row, choice in zip(SPARSE, choices, strict=True)}
    assert any(kept.sum() < tiles.total * len(kept) for tiles, kept in choices)
    for row, output in zip(rows, outputs, strict=True):
        if row.id in chosen:
            tiles, kept = chosen[row.id]
            assert len(kept) == (shape.kv_heads if heads == "kv" else shape.heads)
            expected = _with_pages(shape, row, tiles, kept)
        else:
            expected = _dense(shape, row)
        _close(output, expected)


def _asks(rows: Sequence[Prompt], selector: str) -> list[Prompt]:
    """The same rows with another selector."""
    return [replace(row, extra_args={**row.extra_args, SELECTOR: selector}) for row in rows]


@each_shape
@pytest.mark.parametrize("heads", ["query", "kv"])
def test_with_every_page_kept_it_is_the_stock_kernel(make: Make, shape: Shape, heads: str) -> None:
    rows = _asks(RAGGED, f"alpha:0,late=0,tile=32,group=16,span=16,start=64,heads={heads}")
    model = make(shape)
    output = torch.cat(model.step(rows))
    assert model.asked("whole").was_sparse
    _close(output, model.stock(rows))


@each_shape
def test_the_choice_is_made_from_the_keys_in_the_cache(make: Make, choices: list[Any], shape: Shape) -> None:
    make(shape).step(RAGGED)
    for row, (tiles, kept) in zip(SPARSE, choices, strict=True):
        query, key, _ = _tokens(shape, row.id)
        spans = key[: row.end].float().split(tiles.selector.span)
        means = torch.stack([span.mean(0) for span in spans], -1)
        means = torch.nn.functional.pad(means, (0, tiles.hidden.shape[-1] - len(spans)))
        shares = page_shares(group_means(query[row.first : row.end], tiles), means, SCALE, tiles)
        threshold = tiles.selector.value * shares.amax(-1, keepdim=True)
        # Means are as exact as the cache's type; nothing else may differ.
        doubtful = (shares / threshold - 1).abs() < (1e-4 if shape.dtype == torch.float32 else 3e-2)
        expected = keep(shares, tiles.selector.value, tiles)
        assert torch.equal(kept | doubtful, expected | doubtful)
        assert doubtful.float().mean() < 0.1


def test_some_layers_are_late(make: Make, choices: list[Any]) -> None:
    rows = [_sparse("whole", 0, 301, selector=SELECTOR_TEXT.replace("late=0.9", "late=0"))]
    model = make(SHAPES[0], count=3)
    metadata = model.builder.build(0, model.begin(rows))
    for layer in model.layers.values():
        model.forward(metadata, model.query(rows), layer)
    (tiles, first), (_, second), (_, late) = choices
    assert torch.equal(first, second)
    assert torch.equal(late, tiles.visible.expand_as(late))
    asked = model.asked("whole")
    # Over layers and query heads.
    assert asked.kept_pages == sum(int(kept.sum()) for _, kept in choices) < asked.total_pages
    assert asked.total_pages == 3 * SHAPES[0].heads * tiles.total
    assert asked.selector_s > 0


@pytest.mark.parametrize("heads", ["query", "kv"])
def test_pages_are_counted_for_query_heads(make: Make, choices: list[Any], heads: str) -> None:
    model = make()
    model.step(_asks([_sparse("whole", 0, 301)], f"{SELECTOR_TEXT},heads={heads}"))
    ((tiles, kept),) = choices
    asked = model.asked("whole")
    assert asked.kept_pages == int(kept.sum()) * SHAPES[0].heads // len(kept)
    assert asked.total_pages == tiles.total * SHAPES[0].heads


def _in_chunks(model: Model, borders: Sequence[int], total: int) -> Tensor:
    """The output of a prompt that is read in chunks."""
    chunks = zip([0, *borders], [*borders, total], strict=True)
    return torch.cat([model.step([_sparse("prompt", first, end, total)])[0] for first, end in chunks])


BORDERS = {
    "256": list(range(256, 700, 256)),
    "512": [512],
    "8192": [],
    "prefix in the cache": [416],
    "beside others": [32, 96, 224, 480, 672],
}


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
@pytest.mark.parametrize("shape", [Shape(), Shape(page=128), Shape(torch.float32, heads=9, kv_heads=3)], ids=str)
def test_chunks_choose_as_the_whole_prompt_does(
    tmp_path: Path, requests: Requests, choices: list[Any], shape: Shape, borders: list[int]
) -> None:
    whole = _in_chunks(Model(tmp_path, requests, shape), [], 700)
    ((_, expected),) = choices
    choices.clear()
    requests.begin(SimpleNamespace(scheduled_new_reqs=[], finished_req_ids={"prompt"}))
    parts = _in_chunks(Model(tmp_path, requests, shape), borders, 700)
    for tiles, kept in choices:
        first = tiles.first // tiles.selector.tile
        pages = kept.shape[-1]
        assert torch.equal(kept, expected[:, first : first + kept.shape[1], :pages])
        assert not expected[:, first : first + kept.shape[1], pages:].any()
    _close(parts, whole)


def test_chunks_that_cut_tiles_are_what_the_reference_says(make: Make, choices: list[Any]) -> None:
    model = make(Shape(torch.float32))
    output = _in_chunks(model, [97, 101, 350, 351], 400)
    row = _sparse("prompt", 0, 400)
    dense = _dense(model.shape, row)
    for tiles, kept in choices:
        chunk = replace(row, first=tiles.first, end=tiles.first + tiles.tokens)
        dense[chunk.first : chunk.end] = _with_pages(model.shape, chunk, tiles, kept)
    _close(output, dense)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([exact("a", 0, 301), exact("b", 199, 200)], id="exact"),
        pytest.param([_sparse("a", 0, 64), exact("b", 0, 30)], id="too short"),
        pytest.param([_sparse("a", 310, 311, prompt=300), _sparse("b", 290, 300)], id="decode and dense tail"),
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_step_without_a_sparse_tile_is_bitwise_the_stock_backend_s(
    make: Make, rows: list[Prompt], dtype: torch.dtype
) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    model = make(Shape(dtype))
    metadata = model.builder.build(0, model.begin(rows))
    assert type(metadata) is CPUAttentionMetadata
    assert torch.equal(model.forward(metadata, model.query(rows)), model.stock(rows))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_other_rows_of_a_sparse_step_are_bitwise_the_stock_backend_s(make: Make, dtype: torch.dtype) -> None:
    others = [row for row in RAGGED if row not in SPARSE]
    model = make(Shape(dtype))
    alone = [output for row, output in zip(RAGGED, model.step(RAGGED), strict=True) if row in others]
    assert torch.equal(torch.cat(alone), model.stock(others))


def test_rows_of_nobody_are_read_exactly(make: Make) -> None:
    model = make()
    rows = [_sparse("a", 0, 301)]
    metadata = model.builder.build(0, model.begin(rows, known=False))
    assert torch.equal(model.forward(metadata, model.query(rows)), model.stock(rows))


def test_without_metadata_nothing_is_done(make: Make) -> None:
    model = make()
    assert model.forward(None, model.query([exact("a", 0, 5)])).isnan().all()


REFUSED: dict[str, dict[str, Any]] = {
    "sliding window": {"per_layer_sliding_window": 64},
    "soft cap": {"logits_soft_cap": 5.0},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "attention sinks": {"sinks": torch.zeros(4, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize(("reason", "settings"), REFUSED.items(), ids=REFUSED)
def test_layers_that_are_no_plain_causal_attention(make: Make, reason: str, settings: dict[str, Any]) -> None:
    rows = [_sparse("a", 0, 301)]
    model = make(SHAPES[0], settings)
    output = torch.cat(model.step(rows))
    assert torch.equal(output, model.stock(rows))
    assert model.asked("a").report()["fallback_reason"] == reason


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("refused", [0, 1])
def test_layers_of_a_group_that_are_sparse_beside_others(make: Make, settings: dict[str, Any], refused: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    each: list[dict[str, Any]] = [{}, {}]
    each[refused] = settings
    model = make(SHAPES[0], *each)
    rows = [_sparse("a", 0, 301)]
    metadata, query = model.builder.build(0, model.begin(rows)), model.query(rows)
    for number, layer in enumerate(model.layers.values()):
        output = model.forward(metadata, query, layer)
        stock = model.forward(metadata, query, layer, of=CPUAttentionBackendImpl)
        assert torch.equal(output, stock) == (number == refused)
    assert model.asked("a").report()["fallback_reason"] is None


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_groups_of_layers_do_not_refuse_for_each_other(make: Make, order: list[int]) -> None:
    model = make(SHAPES[0], {}, REFUSED["sliding window"])
    rows = [_sparse("a", 0, 301)]
    groups = [model.group(name) for name in model.layers]
    common = model.begin(rows)
    built = {number: groups[number].build(0, common) for number in order}
    assert [getattr(built[number], "split", None) is not None for number in (0, 1)] == [True, False]
    assert model.asked("a").report()["fallback_reason"] is None


@pytest.mark.parametrize(
    ("selector", "causal", "reason"),
    [
        pytest.param(f"{SELECTOR_TEXT},tile=48,span=24", True, "span does not divide page", id="span"),
        pytest.param(f"{SELECTOR_TEXT},tile=64,span=64", True, "span does not divide page", id="larger span"),
        pytest.param("best:1", True, "unreadable settings", id="settings"),
        pytest.param(SELECTOR_TEXT, False, "not causal", id="not causal"),
        pytest.param(SELECTOR_TEXT.replace("start=64", "start=1000"), True, "short prompt", id="short"),
    ],
)
def test_requests_that_are_read_exactly(make: Make, selector: str, causal: bool, reason: str) -> None:
    rows = [_sparse("a", 0, 301, selector=selector)]
    model = make()
    metadata = model.builder.build(0, model.begin(rows, causal))
    output = model.forward(metadata, model.query(rows))
    assert torch.equal(output, model.stock(rows, causal))
    assert model.asked("a").report()["fallback_reason"] == reason


def test_a_cache_in_an_unknown_order_is_read_exactly(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.accel import cpu_backend

    monkeypatch.setattr(cpu_backend, "find_key_order", lambda write, cache: None)
    model = make()
    model.step([_sparse("a", 0, 301)])
    assert model.asked("a").report()["fallback_reason"] == "unknown order of keys"


def test_layers_that_share_another_s_cache_have_no_keys(make: Make) -> None:
    model = make()
    metadata, query = model.builder.build(0, model.begin(RAGGED)), model.query(RAGGED)
    (layer,) = model.layers.values()
    output = torch.full_like(query, float("nan"))
    model.impl.forward(layer, query, None, None, model.cache, metadata, output)
    assert torch.equal(output, model.forward(metadata, query))


def test_a_request_is_reported_when_its_prompt_is_read(
    tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[dict[str, Any]] = []
    requests = Requests(sparse=False, report=lambda asked: reports.append(asked.report()))
    model = Model(tmp_path, requests, SHAPES[0])
    for first, end, expected in [(0, 256, 0), (256, 300, 0), (300, 350, 1), (350, 351, 1)]:
        model.step([_sparse("a", first, end, 350), exact("b", 0, 20)])
        assert len(reports) == expected
    (report,) = reports
    assert (report["trace"], report["path"], report["fallback_reason"]) == ("a", "sparse", None)
    assert 0 < report["kept_pages"] < report["total_pages"]
