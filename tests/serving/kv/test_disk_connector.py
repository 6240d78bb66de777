"""The disk tier in the real engine, in float32, where the same pages give the same numbers."""

from __future__ import annotations

import asyncio
import random
import shutil
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from serving.config import EngineConfig
from serving.kv.files import KvFiles, namespace
from serving.kv.settings import KEEP, transfer_config
from serving.model import prepare_packaged
from serving.vllm_engine import VllmEngine
from tests.conftest import fill, small_disk

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK = 32
# The whole cache, with the one that vLLM sets aside: little, so that prompts put each other out.
BLOCKS = 101
WAIT_S = 10.0


@dataclass(frozen=True)
class Answered:
    cached: int
    tokens: list[int]
    first: dict[int, float]

    def says(self, other: Answered) -> bool:
        """Whether it is the same answer, to the last bit."""
        return (self.tokens, self.first) == (other.tokens, other.first)

    def is_close_to(self, other: Answered) -> bool:
        """Whether it is the same answer as that of steps cut elsewhere, which sum in another order."""
        return self.tokens == other.tokens and self.first == pytest.approx(other.first, abs=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, large enough that every token of the prompt shows in the answer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    packaged = prepare_packaged(EngineConfig().models_dir.expanduser())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(packaged / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "kv"


async def start(model: Path, root: Path) -> VllmEngine:
    arguments = {
        "dtype": "float32",
        "num_gpu_blocks_override": BLOCKS,
        "kv_transfer_config": transfer_config(root, 2**30, "a model"),
    }
    engine = VllmEngine(EngineConfig(str(model), max_model_len=2048, token_budget=256, kv_gib=1, engine_args=arguments))
    await engine.start()
    return engine


async def ask(
    engine: VllmEngine, prompt: Sequence[int], salt: str | None = None, max_tokens: int = 8, **extra: Any
) -> Answered:
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    assert engine._llm is not None
    id = uuid.uuid4().hex
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=5, extra_args=extra)
    async for output in engine._llm.generate(tokens_input(list(prompt), cache_salt=salt or id), params, id):
        last = output
    (answer,) = last.outputs
    first = {token: entry.logprob for token, entry in answer.logprobs[0].items()}
    return Answered(last.num_cached_tokens, list(answer.token_ids), first)


def prompt(name: str, tokens: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(100, 40_000) for _ in range(tokens)]


def whole(tokens: int) -> int:
    """Tokens of the whole blocks that can be loaded."""
    return (tokens - 1) // BLOCK * BLOCK


def on_disk(root: Path, salt: str) -> list[Path]:
    return sorted(root.glob(f"*/{namespace(salt)}/*.kv"))


async def written(root: Path, salt: str, blocks: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(on_disk(root, salt)) < blocks:
            await asyncio.sleep(0.02)
    assert len(on_disk(root, salt)) == blocks


async def put_out(engine: VllmEngine) -> None:
    """Fill the cache with something else."""
    for _ in range(2):
        await ask(engine, prompt(uuid.uuid4().hex, 1900), max_tokens=1)


@dataclass(frozen=True)
class Before:
    """What the first engine said, read from nothing (`cold`) and from memory (`warm`), by salt."""

    cold: dict[str, Answered]
    warm: dict[str, Answered]


LENGTHS = {
    "long": 1500,
    "even": 640,
    "torn": 700,
    "rubbish": 300,
    "removed": 200,
    "sparse": 700,
    "first": 1568,
    "second": 1568,
}


@pytest.fixture(scope="module")
async def before(model: Path, root: Path) -> Before:
    """An engine that reads and keeps prompts, and is stopped."""
    engine = await start(model, root)
    try:
        cold, warm = {}, {}
        for salt, length in LENGTHS.items():
            cold[salt] = await ask(engine, prompt(salt, length), salt, **{KEEP: 1})
            warm[salt] = await ask(engine, prompt(salt, length), salt)
            await written(root, salt, length // BLOCK)
        await ask(engine, prompt("begun", 320), "begun", **{KEEP: 1})
        cold["begun"] = await ask(engine, prompt("begun", 320) + prompt("more", 300))
        # What was in memory before it was to be kept.
        await ask(engine, prompt("late", 500), "late")
        cold["late"] = await ask(engine, prompt("late", 500), "late", **{KEEP: 1})
        await written(root, "late", 500 // BLOCK)
        await ask(engine, prompt("forgotten", 500), "forgotten")
        await ask(engine, prompt("also sparse", 700), "also sparse", foreword_prefill="sparse", **{KEEP: 1})
        return Before(cold, warm)
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
async def engine(model: Path, root: Path, before: Before) -> AsyncIterator[VllmEngine]:
    """The engine after a restart."""
    engine = await start(model, root)
    try:
        yield engine
    finally:
        await engine.stop()


def test_only_what_is_asked_for_is_stored(before: Before, root: Path) -> None:
    assert KvFiles(root, 0).namespaces() == {namespace(salt) for salt in [*LENGTHS, "begun", "late"]}


@pytest.mark.parametrize("salt", ["long", "even"])
async def test_a_prompt_outlives_a_restart_and_eviction(engine: VllmEngine, before: Before, salt: str) -> None:
    tokens = prompt(salt, LENGTHS[salt])
    for _ in range(2):
        loaded = await ask(engine, tokens, salt)
        assert loaded.cached == before.warm[salt].cached == whole(len(tokens))
        assert loaded.says(before.warm[salt])
        assert loaded.is_close_to(before.cold[salt])
        await put_out(engine)


async def test_what_was_in_memory_before_it_was_kept(engine: VllmEngine, before: Before) -> None:
    loaded = await ask(engine, prompt("late", 500), "late")
    assert loaded.cached == whole(500)
    assert loaded.says(before.cold["late"])


async def test_a_longer_prompt_loads_what_there_is_of_it(engine: VllmEngine, before: Before) -> None:
    loaded = await ask(engine, prompt("begun", 320) + prompt("more", 300), "begun")
    assert loaded.cached == 320
    assert loaded.is_close_to(before.cold["begun"])


async def test_what_is_loaded_follows_what_is_in_memory(engine: VllmEngine, before: Before) -> None:
    await put_out(engine)
    await ask(engine, prompt("even", 640)[:100], "even")
    loaded = await ask(engine, prompt("even", 640), "even")
    assert loaded.cached == whole(640)
    assert loaded.says(before.warm["even"])


async def test_another_salt_finds_nothing(engine: VllmEngine, before: Before) -> None:
    other = await ask(engine, prompt("long", 1500), "another")
    assert other.cached == 0
    assert other.says(before.cold["long"])
    assert (await ask(engine, prompt("forgotten", 500), "forgotten")).cached == 0


async def test_a_sparse_prompt_is_not_loaded(engine: VllmEngine) -> None:
    sparse = await ask(engine, prompt("sparse", 700), "sparse", foreword_prefill="sparse")
    assert sparse.cached == 0


async def test_a_torn_file_is_computed_anew_and_stored_again(engine: VllmEngine, before: Before, root: Path) -> None:
    torn = on_disk(root, "torn")[3]
    data = bytearray(torn.read_bytes())
    data[len(data) // 2] ^= 1
    torn.write_bytes(data)
    answered = await ask(engine, prompt("torn", 700), "torn", **{KEEP: 1})
    assert answered.is_close_to(before.cold["torn"])
    await written(root, "torn", 700 // BLOCK)
    await put_out(engine)
    loaded = await ask(engine, prompt("torn", 700), "torn")
    assert loaded.cached == whole(700)
    assert loaded.is_close_to(before.cold["torn"])


async def test_rubbish_is_computed_anew(engine: VllmEngine, before: Before, root: Path) -> None:
    for path in on_disk(root, "rubbish"):
        path.write_bytes(b"rubbish")
    answered = await ask(engine, prompt("rubbish", 300), "rubbish")
    assert answered.says(before.cold["rubbish"])
    assert len(on_disk(root, "rubbish")) == 300 // BLOCK - 1


async def test_a_removed_prompt_is_not_loaded(engine: VllmEngine, before: Before, root: Path) -> None:
    KvFiles(root, 0).remove(namespace("removed"))
    answered = await ask(engine, prompt("removed", 200), "removed")
    assert answered.cached == 0
    assert answered.says(before.cold["removed"])


def preemptions() -> float:
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


async def test_loads_share_steps_with_others_and_survive_preemption(engine: VllmEngine) -> None:
    salts = ["first", "second"]
    alone = [await ask(engine, prompt(salt, 1568), max_tokens=50) for salt in salts]
    await put_out(engine)
    before = preemptions()
    third = ask(engine, prompt("third", 600), max_tokens=20)
    together = await asyncio.gather(third, *(ask(engine, prompt(salt, 1568), salt, max_tokens=50) for salt in salts))
    assert preemptions() > before
    for mine, other in zip(together[1:], alone, strict=True):
        assert mine.cached == whole(1568)
        assert mine.is_close_to(other)
    assert together[0].is_close_to(await ask(engine, prompt("third", 600), max_tokens=20))


async def test_an_abandoned_load_leaves_the_engine_well(engine: VllmEngine, before: Before) -> None:
    await put_out(engine)
    asking = [asyncio.create_task(ask(engine, prompt("long", 1500), "long")) for _ in range(3)]
    await asyncio.sleep(0.01)
    for task in asking[:2]:
        task.cancel()
    loaded = await asking[2]
    assert loaded.says(before.warm["long"])
    assert [task.cancelled() for task in asking] == [True, True, False]


async def test_a_full_disk_stops_the_writing_and_nothing_else(engine: VllmEngine, root: Path) -> None:
    tokens = prompt("full", 500)
    keeper = KvFiles(root, 2**30)
    # It covers what is there already.
    with small_disk(root, 4):
        assert keeper.look().state == "ok"
        filler = fill(root)
        answered = await ask(engine, tokens, "full", **{KEEP: 1})
        assert answered.is_close_to(await ask(engine, tokens))
        assert (await ask(engine, tokens, "full")).cached == whole(500)
        assert keeper.look().state == "full"
        assert on_disk(root, "full") == []
        filler.unlink()
        assert keeper.look().state == "ok"
