"""The engine that measures answers: what it masks is what the policy chooses, and it keeps the engine contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.accel.page_means import span_means
from serving.accel.policy import Selector, Tiling
from serving.accel.reference import dense_attention, sparse_attention
from serving.accel.reference_engine import (
    ReferenceEngine,
    _Text,
    dense_span_means,
    draw,
    exact_attention,
    masked_attention,
)
from serving.config import EngineConfig
from serving.engine import Delta, Message, Prefill, PrefillMode, Request, Sampling
from serving.errors import EngineDied, EngineUnavailable, Overloaded, PromptTooLong, StartError
from serving.vllm_engine import VllmEngine

PAGE = 32
EVERYTHING = "alpha:0,late=0,start=64"
# Of every page that may be left out, one at most is kept, which is one that is kept anyway.
LITTLE = "budget:32,late=32,start=64,window=32"
TEXT = " ".join(f"Buoy {number} lies at a depth of {number * 7 % 91} metres." for number in range(30))
QUESTIONS = ("How deep is buoy 17?", "Which buoy is the last one?")


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ReferenceEngine]:
    engine = ReferenceEngine(EngineConfig())
    await engine.start()
    yield engine
    await engine.stop()


def prompt(engine: ReferenceEngine, question: str = QUESTIONS[0]) -> list[int]:
    return engine.render_chat([Message("user", f"{TEXT} {question}"), Message("assistant", "It is")])


def request(
    ids: Sequence[int], salt: str, selector: str | None = None, *, tokens: int = 1, mode: PrefillMode | None = None
) -> Request:
    """Exact without a selector; the last 20 tokens are the question."""
    mode = mode or ("exact" if selector is None else "sparse")
    sampling = Sampling(max_tokens=tokens, logprobs=20)
    return Request(ids, salt, salt, sampling, prefill=mode, selector=selector, dense_from=len(ids) - 20)


async def ask(engine: ReferenceEngine, asked: Request) -> tuple[Prefill, torch.Tensor, list[Delta]]:
    """How it was read, the logarithms of the first token, by token, and all that came."""
    deltas = [delta async for delta in engine.generate(asked)]
    prefill, logprobs = deltas[0].prefill, deltas[0].logprobs
    assert prefill is not None
    assert logprobs
    dense = torch.full((engine._model.config.vocab_size,), -30.0)
    for token, logprob in logprobs[0].items():
        dense[token] = logprob
    return prefill, dense, deltas


# --- what is read ---


async def test_exact_is_what_transformers_computes(engine: ReferenceEngine) -> None:
    ids = prompt(engine)
    prefill, logprobs, _ = await ask(engine, request(ids, "exact"))
    assert prefill == Prefill(len(ids), cached_tokens=0, path="exact", density=1.0)
    model = engine._model
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)
    finally:
        model.set_attn_implementation("foreword_reference")
    known = logprobs > -30
    assert known.sum() == 20
    assert torch.allclose(logprobs[known], expected[known], atol=0.05)


async def test_keeping_everything_is_exact(engine: ReferenceEngine) -> None:
    ids = prompt(engine)
    _, exact, _ = await ask(engine, request(ids, "kept exact"))
    prefill, kept, _ = await ask(engine, request(ids, "kept", EVERYTHING))
    assert (prefill.path, prefill.density, prefill.fallback_reason) == ("sparse", 1.0, None)
    assert float((exact.exp() - kept.exp()).abs().max()) < 2e-2
    assert exact.argmax() == kept.argmax()


async def test_sparse_is_something_else_and_always_the_same(engine: ReferenceEngine) -> None:
    ids = prompt(engine)
    _, exact, _ = await ask(engine, request(ids, "other exact"))
    _, one, _ = await ask(engine, request(ids, "other one", LITTLE))
    _, two, _ = await ask(engine, request(ids, "other two", LITTLE))
    assert torch.equal(one, two)
    assert float((exact.exp() - one.exp()).abs().max()) > 2e-2


async def test_density_is_the_share_of_pages_that_the_policy_keeps(engine: ReferenceEngine) -> None:
    ids = prompt(engine)
    prefill, _, _ = await ask(engine, request(ids, "density", LITTLE))
    tiles = Tiling(0, len(ids), len(ids) - 20, PAGE, Selector.parse(LITTLE))
    shape = engine._model.config
    rows = shape.num_hidden_layers * shape.num_attention_heads
    assert prefill.kept_pages == int(tiles.always.sum()) * rows
    assert prefill.total_pages == tiles.total * rows
    assert prefill.density == pytest.approx(int(tiles.always.sum()) / tiles.total)
    assert (prefill.density or 1) < 0.8
    assert prefill.selector_s is not None
    assert prefill.selector_s > 0


async def test_a_question_is_read_densely_after_what_is_cached(engine: ReferenceEngine) -> None:
    first, second = (prompt(engine, question) for question in QUESTIONS)
    await ask(engine, request(first, "context", LITTLE))
    asked = request(second, "context", LITTLE)
    assert engine.plan(asked).path == "warm"
    prefill, cached, _ = await ask(engine, asked)
    assert prefill.cached_tokens is not None
    assert prefill.cached_tokens % PAGE == 0
    assert len(second) - prefill.cached_tokens < 3 * PAGE
    assert (prefill.path, prefill.density, prefill.fallback_reason) == ("warm", 1.0, None)
    assert prefill.kept_pages == prefill.total_pages
    # Cached or not, the context has been read sparsely, and the answer is the same.
    _, cold, _ = await ask(engine, request(second, "context cold", LITTLE))
    _, exact, _ = await ask(engine, request(second, "context exact"))
    assert float((cold.exp() - cached.exp()).abs().max()) < 2e-2
    assert float((exact.exp() - cached.exp()).abs().max()) > 2e-2


@pytest.mark.parametrize(
    ("selector", "reason"),
    [
        pytest.param(None, "short prompt", id="default"),
        pytest.param("alpha:0.1,tile=48,span=24", "span does not divide page", id="span"),
        pytest.param("best", "unreadable settings", id="unreadable"),
    ],
)
async def test_what_cannot_be_read_sparsely_is_read_exactly_and_says_why(
    engine: ReferenceEngine, selector: str | None, reason: str
) -> None:
    prefill, _, _ = await ask(engine, request(prompt(engine), f"short {selector}", selector, mode="sparse"))
    assert (prefill.path, prefill.density, prefill.fallback_reason) == ("exact", 1.0, reason)


# --- the cache ---


async def test_salts_share_nothing_and_the_last_two_are_kept(engine: ReferenceEngine) -> None:
    ids = prompt(engine)[:100]
    cached = []
    for salt in ("a", "b", "a", "c", "b"):
        prefill, _, _ = await ask(engine, request(ids, salt))
        cached.append(prefill.cached_tokens)
    # The last token is always computed.
    assert cached == [0, 0, (len(ids) - 1) // PAGE * PAGE, 0, 0]


async def test_a_cached_prompt_begins_the_same_answer(engine: ReferenceEngine) -> None:
    ids = prompt(engine)
    _, one, deltas = await ask(engine, request(ids, "again", tokens=4))
    _, two, repeated = await ask(engine, request(ids, "again", tokens=4))
    assert float((one.exp() - two.exp()).abs().max()) < 2e-2
    assert [delta.tokens for delta in deltas] == [1, 2, 3, 4]
    assert deltas[-1].finish_reason == "length"
    assert "".join(delta.text for delta in deltas) == "".join(delta.text for delta in repeated)


# --- the contract ---


async def test_a_stream_is_whole_and_says_once_how_the_prompt_was_read(engine: ReferenceEngine) -> None:
    ids = engine.render_chat([Message("user", "Count to three."), Message("assistant", "One, two,")])
    whole = "".join([delta.text async for delta in engine.generate(request(ids, "whole", tokens=12))])
    stop = whole[4:7]
    stopped = replace(request(ids, "whole", tokens=12), sampling=Sampling(max_tokens=12, stop=(stop,)))
    deltas = [delta async for delta in engine.generate(stopped)]
    assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert [delta.prefill is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert [delta.queue is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert all(delta.logprobs is None for delta in deltas)


async def test_an_abandoned_request_leaves_nothing_behind(engine: ReferenceEngine) -> None:
    ids = prompt(engine)
    abandoned = asyncio.create_task(ask(engine, request(ids, "left", tokens=400)))
    waiting = asyncio.create_task(ask(engine, request(ids, "left too")))
    await asyncio.sleep(0.05)
    assert engine.stats.pending == 2
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    prefill, _, _ = await waiting
    assert prefill.cached_tokens == 0
    assert engine.stats.pending == 0


async def test_what_does_not_fit_is_refused(engine: ReferenceEngine) -> None:
    with pytest.raises(PromptTooLong):
        await engine.prefill(request(range(engine.limits.window), "long"))
    full = ReferenceEngine(EngineConfig(max_pending=0))
    full._state = engine.state
    with pytest.raises(Overloaded):
        await full.prefill(request([1], "full"))


async def test_chats_are_rendered_as_the_service_does(engine: ReferenceEngine) -> None:
    service = VllmEngine(EngineConfig())
    for messages in (
        [Message("user", "Why? <|im_end|>")],
        [Message("user", "桅杆？"), Message("assistant", "Because")],
    ):
        assert engine.render_chat(messages) == service.render_chat(messages)
    assert engine.count_tokens(TEXT) == service.count_tokens(TEXT)
    assert engine.capabilities.selector == str(Selector())
    assert await engine.progress("r") is None


async def test_an_engine_that_is_not_started_takes_no_requests() -> None:
    engine = ReferenceEngine(EngineConfig())
    with pytest.raises(EngineUnavailable, match="stopped"):
        await engine.prefill(request([1], "early"))
    with pytest.raises(EngineDied):
        await engine._work(len, "")
    await engine.stop()


async def test_arguments_that_would_be_lost_are_refused() -> None:
    engine = ReferenceEngine(EngineConfig(engine_args={"quantization": "fp8", "dtype": None}))
    with pytest.raises(StartError, match="has no 'quantization'"):
        await engine.start()
    assert engine.state.phase == "down"


# --- its parts ---


@pytest.mark.parametrize(("first", "heads"), [(0, "query"), (70, "query"), (0, "kv")])
def test_masks_are_the_written_out_attention(first: int, heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.accel.reference_engine._MASK_ELEMENTS", 4 * 200 * 7)
    noise = torch.Generator().manual_seed(0)
    query = torch.randn(4, 200 - first, 8, generator=noise)
    key, value = torch.randn(2, 200, 8, generator=noise), torch.randn(2, 200, 8, generator=noise)
    selector = Selector.parse(f"alpha:0.1,start=0,window=0,sink=16,tile=32,heads={heads}")
    tiles = Tiling(first, 200 - first, 200, 16, selector)
    rows = 2 if heads == "kv" else 4
    shape = (rows, len(tiles.ends), tiles.visible.shape[1])
    kept = (torch.rand(shape, generator=noise) < 0.3) & tiles.visible | tiles.always
    by_token = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    expected = sparse_attention(*by_token, kept, 0.3, tiles).transpose(0, 1)
    masked = masked_attention(query, key, value, 0.3, kept.repeat_interleave(4 // rows, 0), tiles)
    assert torch.allclose(masked, expected, atol=1e-5)
    dense = dense_attention(*by_token, first, 0.3).transpose(0, 1)
    assert torch.allclose(exact_attention(query, key, value, 0.3), dense, atol=1e-5)
    last = exact_attention(query[:, -1:], key, value, 0.3)
    assert torch.allclose(last, dense[:, -1:], atol=1e-5)


@pytest.mark.parametrize("tokens", [64, 70, 95, 1])
def test_span_means_are_those_of_the_pages(tokens: int) -> None:
    keys = torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages = -(-tokens // PAGE)
    cache = torch.zeros(pages, 2, PAGE, 16, dtype=torch.bfloat16)
    filled = (tokens - 1) % PAGE + 1
    for page in range(pages):
        own = torch.zeros(2, 8, PAGE, dtype=torch.bfloat16)
        part = keys[:, page * PAGE : (page + 1) * PAGE]
        own[:, :, : part.shape[1]] = part.transpose(1, 2)
        cache[page].flatten(1)[:, : 8 * PAGE] = own.flatten(1)
    expected = span_means(cache, torch.arange(pages), filled, 16, "transposed")
    assert torch.allclose(dense_span_means(keys, 16, PAGE), expected, atol=1e-2)


def spell(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_text_is_whole_whatever_its_pieces(written: str, stop: list[str]) -> None:
    written = written.rstrip("\ufffd")
    text = _Text(spell, list(b"It is "), stop)
    pieces = []
    for token in written.encode():
        pieces.append(text.add(token))
        if text.stopped:
            break
    pieces.append(text.rest())
    ends = [written.find(one) for one in stop if one in written]
    said = "".join(pieces)
    assert text.stopped == bool(ends)
    # Of two stop strings that overlap, the one that is complete first ends the text.
    assert said == written if not ends else written.startswith(said) and len(said) >= min(ends)
    assert not [one for one in stop if one in said]


def test_tokens_are_drawn_by_temperature_share_and_seed() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0])
    token, logprobs = draw(logits, Sampling(logprobs=2), torch.Generator())
    assert token == 1
    assert logprobs is not None
    assert list(logprobs) == [1, 2]
    assert logprobs[1] == pytest.approx(float(torch.log_softmax(logits, -1)[1]))
    warm = Sampling(temperature=1.0)
    drawn = [draw(logits, warm, torch.Generator().manual_seed(seed))[0] for seed in range(40)]
    assert drawn == [draw(logits, warm, torch.Generator().manual_seed(seed))[0] for seed in range(40)]
    assert len(set(drawn)) > 1
    narrow = replace(warm, top_p=0.1)
    assert {draw(logits, narrow, torch.Generator().manual_seed(seed))[0] for seed in range(40)} == {1}
