"""Vectors in the real Chroma: found by meaning within the documents asked for, scored by cosine, deleted for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import chromadb
import numpy as np
import pytest
from chromadb.config import Settings
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_chroma import Chroma

from retrieval.embed import Embedder
from retrieval.errors import ReindexNeeded, StorageFailed
from retrieval.passage import Chunk, Hit
from retrieval.vectors import Vectors

TEXTS = {
    "ships": ("The ferry sails at noon.", "Its hull was painted green.", "The captain drinks black tea."),
    "bread": ("Knead the dough for ten minutes.", "The oven must be very hot."),
    "fox": ("A fox crossed the snow at night.",),
}


def chunks_of(document: str) -> list[Chunk]:
    return [
        Chunk(document, number, 1, 100 * number, 100 * number + len(text), text)
        for number, text in enumerate(TEXTS[document])
    ]


@pytest.fixture
def filled(vectors: Vectors) -> Vectors:
    for document in TEXTS:
        vectors.add(chunks_of(document))
    return vectors


def keys(hits: list[Hit]) -> list[tuple[str, int]]:
    return [(hit.document, hit.number) for hit in hits]


def test_every_chunk_is_nearest_to_itself(filled: Vectors, embedder: Embedder) -> None:
    for document, texts in TEXTS.items():
        for number, text in enumerate(texts):
            best = filled.search(embedder.embed_query(text), list(TEXTS), 1)
            assert keys(best) == [(document, number)]
            assert best[0].score == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("question", "best"),
    [
        ("When does the boat leave?", ("ships", 0)),
        ("How long must I work the flour and water?", ("bread", 0)),
        ("Which animal was seen in winter?", ("fox", 0)),
    ],
)
def test_questions_find_their_answers(
    filled: Vectors, embedder: Embedder, question: str, best: tuple[str, int]
) -> None:
    assert keys(filled.search(embedder.embed_query(question), list(TEXTS), 3))[0] == best


def test_score_is_the_cosine_and_the_best_come_first(filled: Vectors, embedder: Embedder) -> None:
    """The oracle multiplies the vectors itself."""
    question = embedder.embed_query("What colour is the ship?")
    expected = {
        (document, number): float(np.dot(embedder.embed_query(text), question))
        for document, texts in TEXTS.items()
        for number, text in enumerate(texts)
    }
    hits = filled.search(question, list(TEXTS), 100)
    assert keys(hits) == sorted(expected, key=lambda key: -expected[key])
    assert [hit.score for hit in hits] == pytest.approx([expected[key] for key in keys(hits)], abs=1e-5)


@pytest.mark.parametrize(
    ("documents", "limit", "found"),
    [
        pytest.param(["bread"], 10, {("bread", 0), ("bread", 1)}, id="one document"),
        pytest.param(["bread", "fox"], 10, {("bread", 0), ("bread", 1), ("fox", 0)}, id="two documents"),
        pytest.param(["fox", "nobody"], 10, {("fox", 0)}, id="one unknown document"),
        pytest.param(["nobody"], 10, set(), id="unknown document"),
        pytest.param([], 10, set(), id="no document"),
    ],
)
def test_only_the_documents_asked_for(
    filled: Vectors, embedder: Embedder, documents: list[str], limit: int, found: set[tuple[str, int]]
) -> None:
    # The question is about ships, so that without the filter ships would come first.
    hits = filled.search(embedder.embed_query("The ferry sails at noon."), documents, limit)
    assert set(keys(hits)) == found


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_limit(filled: Vectors, embedder: Embedder, limit: int) -> None:
    assert len(filled.search(embedder.embed_query("ferry"), list(TEXTS), limit)) == limit


def test_empty_store(vectors: Vectors, embedder: Embedder) -> None:
    assert vectors.search(embedder.embed_query("ferry"), ["ships"], 5) == []
    assert (vectors.count(), vectors.count("ships")) == (0, 0)
    vectors.delete("ships")


def test_counts(filled: Vectors) -> None:
    assert filled.count() == 6
    assert {document: filled.count(document) for document in (*TEXTS, "nobody")} == {
        "ships": 3,
        "bread": 2,
        "fox": 1,
        "nobody": 0,
    }


def test_adding_again_replaces(filled: Vectors, embedder: Embedder) -> None:
    filled.add([Chunk("fox", 0, 1, 0, 9, "An accountant signed the invoice.")])
    assert filled.count() == 6
    hits = filled.search(embedder.embed_query("An accountant signed the invoice."), ["fox"], 5)
    assert keys(hits) == [("fox", 0)]
    assert hits[0].score == pytest.approx(1.0, abs=1e-5)


def test_delete_takes_one_document(filled: Vectors, embedder: Embedder) -> None:
    filled.delete("ships")
    filled.delete("nobody")
    assert {document: filled.count(document) for document in TEXTS} == {"ships": 0, "bread": 2, "fox": 1}
    hits = filled.search(embedder.embed_query("The ferry sails at noon."), list(TEXTS), 10)
    assert set(keys(hits)) == {("bread", 0), ("bread", 1), ("fox", 0)}
    filled.add(chunks_of("ships"))
    assert filled.count("ships") == 3


def test_everything_is_there_after_reopening(tmp_path: Path, embedder: Embedder) -> None:
    first = Vectors(tmp_path / "deep" / "folder", embedder)
    first.add(chunks_of("ships"))
    first.add(chunks_of("fox"))
    first.delete("fox")
    first.close()
    second = Vectors(tmp_path / "deep" / "folder", embedder)
    assert (second.count(), second.count("ships")) == (3, 3)
    hits = second.search(embedder.embed_query(TEXTS["ships"][1]), ["ships", "fox"], 10)
    assert keys(hits)[0] == ("ships", 1)
    # The measure is kept with the collection.
    assert hits[0].score == pytest.approx(1.0, abs=1e-5)
    second.close()


def test_vectors_of_another_model_are_refused(tmp_path: Path, embedder: Embedder) -> None:
    """The other models are only named here, so nothing of them is loaded."""
    folder = tmp_path / "vectors"
    first = Vectors(folder, embedder)
    first.add(chunks_of("ships"))
    first.close()
    for other in ("somebody/bge-small", "somebody/all-MiniLM-L6-v2"):
        with pytest.raises(ReindexNeeded, match=f"'all-MiniLM-L6-v2'.*'{other}'.*FOREWORD_DATA_DIR"):
            Vectors(folder, Embedder(other))
    # The refusal changed nothing.
    second = Vectors(folder, embedder)
    assert second.count() == 3
    second.close()


def test_a_model_without_vectors_binds_nothing(tmp_path: Path, embedder: Embedder) -> None:
    """A wrong setting is put right without another data folder."""
    folder = tmp_path / "vectors"
    Vectors(folder, Embedder("nobody/no-such-model")).close()
    mended = Vectors(folder, embedder)
    mended.add(chunks_of("ships"))
    assert keys(mended.search(embedder.embed_query(TEXTS["ships"][0]), ["ships"], 1)) == [("ships", 0)]
    mended.close()
    with pytest.raises(ReindexNeeded):
        Vectors(folder, Embedder("nobody/no-such-model"))


def filled_by_version_0_1_0(folder: Path, embedder: Embedder, model: str) -> None:
    """As it stored chunks: with their text, and with the last part of the model's name."""
    store = Chroma(
        collection_name="chunks",
        client=chromadb.PersistentClient(
            str(folder), Settings(anonymized_telemetry=False, is_persistent=True, persist_directory=str(folder))
        ),
        embedding_function=embedder,
        collection_metadata={"hnsw:space": "cosine", "embedding_model": model},
    )
    store.add_texts(
        texts=list(TEXTS["ships"]),
        metadatas=[{"document": "ships", "number": number} for number in range(3)],
        ids=[f"ships:{number}" for number in range(3)],
    )
    store._client.close()


def test_a_folder_of_version_0_1_0_is_used_on(tmp_path: Path, embedder: Embedder) -> None:
    filled_by_version_0_1_0(tmp_path, embedder, "all-MiniLM-L6-v2")
    vectors = Vectors(tmp_path, embedder)
    vectors.add(chunks_of("bread"))
    hits = vectors.search(embedder.embed_query(TEXTS["ships"][1]), ["ships", "bread"], 10)
    assert keys(hits)[0] == ("ships", 1)
    assert len(hits) == 5
    vectors.delete("ships")
    assert (vectors.count(), vectors.count("bread")) == (2, 2)
    vectors.close()


def test_a_folder_of_version_0_1_0_knows_a_model_by_its_last_name(tmp_path: Path, embedder: Embedder) -> None:
    filled_by_version_0_1_0(tmp_path, embedder, "bge-small")
    Vectors(tmp_path, Embedder("somebody/bge-small")).close()
    for other in (embedder, Embedder("somebody/bge-large")):
        with pytest.raises(ReindexNeeded, match="'bge-small'"):
            Vectors(tmp_path, other)


def test_no_text_is_kept(tmp_path: Path, embedder: Embedder) -> None:
    """Chroma does not overwrite what is deleted, and the text is read from the catalogue anyway."""
    vectors = Vectors(tmp_path, embedder)
    vectors.add(chunks_of("ships"))
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"ships" in stored
    assert b"ferry" not in stored
    vectors.close()


def test_more_documents_than_a_statement_takes_values(filled: Vectors, embedder: Embedder) -> None:
    """The real limit of the real Chroma: 40,000 documents, and the three that there are stand in different batches."""
    others = [f"d_{number:016x}" for number in range(40_000)]
    scope = ["ships", *others[:15_000], "bread", *others[15_000:], "fox"]
    question = embedder.embed_query("What colour is the ship?")
    for limit in (1, 4, 100):
        assert filled.search(question, scope, limit) == filled.search(question, list(TEXTS), limit)


@pytest.mark.parametrize("place", ["file", "file/below", "garbage"])
def test_unusable_folder(tmp_path: Path, embedder: Embedder, place: str) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "chroma.sqlite3").write_bytes(b"garbage" * 1000)
    with pytest.raises(StorageFailed, match=f"the vector store in '.*{place}' cannot be opened"):
        Vectors(tmp_path / place, embedder)


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "delete"]), st.sampled_from(sorted(TEXTS))), min_size=1, max_size=6
    )
)
def test_any_order_of_adding_and_deleting(worn: Vectors, embedder: Embedder, steps: list[tuple[str, str]]) -> None:
    """Chroma ends as a plain dictionary would; the store is used on from example to example."""
    for document in TEXTS:
        worn.delete(document)
    expected: dict[str, int] = dict.fromkeys(TEXTS, 0)
    for action, document in steps:
        if action == "add":
            worn.add(chunks_of(document))
        else:
            worn.delete(document)
        expected[document] = len(TEXTS[document]) if action == "add" else 0
    assert {document: worn.count(document) for document in TEXTS} == expected
    hits = worn.search(embedder.embed_query("ferry"), list(TEXTS), 10)
    assert sorted(keys(hits)) == sorted(
        (document, number) for document in TEXTS for number in range(expected[document])
    )


@pytest.fixture(scope="module")
def worn(tmp_path_factory: pytest.TempPathFactory, embedder: Embedder) -> Iterator[Vectors]:
    """A store that is used again and again."""
    vectors = Vectors(tmp_path_factory.mktemp("worn"), embedder)
    yield vectors
    vectors.close()


_OLD_TEXT = """
import sys
from pathlib import Path
from retrieval.embed import Embedder
from retrieval.passage import Chunk
from retrieval.vectors import Vectors

vectors = Vectors(Path(sys.argv[1]), Embedder())
vectors.add([Chunk("ships", 0, 1, 0, 5, "ferry")])
vectors.close()
"""


def test_what_was_in_memory_is_not_written(tmp_path: Path) -> None:
    """Of Chroma's index only a part is filled at first, and all of it is written."""
    # glibc then fills what it hands out with a byte of ours, as if old text stood there.
    environment = os.environ | {"MALLOC_PERTURB_": str(0xFF ^ ord("Z"))}
    subprocess.run([sys.executable, "-c", _OLD_TEXT, str(tmp_path)], env=environment, check=True, timeout=120)
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*.bin"))
    assert len(stored) > 100_000
    assert b"Z" * 16 not in stored
