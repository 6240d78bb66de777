"""From a question to sections: the nearest chunks, within the budget, joined and in reading order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.catalogue import Catalogue, Document, StoredPage
from retrieval.embed import Embedder
from retrieval.passage import Chunk, Section
from retrieval.search import join, search
from retrieval.vectors import Vectors

Search = Callable[..., list[Section]]


def words(text: str) -> int:
    return len(text.split())


# --- joining ---

PAGE = "zero one two three four five six seven eight nine"


def piece(start: int, end: int, *, document: str = "a", page: int = 1, number: int = 0) -> Chunk:
    return Chunk(document, number, page, start, end, PAGE[start:end])


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        pytest.param((0, 8), (5, 12), [(0, 12)], id="overlap"),
        pytest.param((0, 8), (8, 12), [(0, 12)], id="touch"),
        pytest.param((0, 8), (9, 12), [(0, 12)], id="one blank between"),
        pytest.param((0, 8), (10, 12), [(0, 8), (10, 12)], id="more between"),
        pytest.param((0, 12), (5, 8), [(0, 12)], id="inside"),
        pytest.param((0, 8), (0, 12), [(0, 12)], id="same start"),
        pytest.param((5, 8), (5, 8), [(5, 8)], id="twice the same"),
    ],
)
def test_neighbours_are_joined(first: tuple[int, int], second: tuple[int, int], joined: list[tuple[int, int]]) -> None:
    for pair in ([(piece(*first), 0.5), (piece(*second), 0.9)], [(piece(*second), 0.9), (piece(*first), 0.5)]):
        sections = join(pair, ["a"], words)
        assert [(section.start, section.end) for section in sections] == joined
        assert [section.text for section in sections] == [PAGE[start:end] for start, end in joined]
        assert [section.tokens for section in sections] == [words(section.text) for section in sections]
        assert max(section.score for section in sections) == 0.9


def test_pages_and_documents_are_not_mixed() -> None:
    chunks = [(piece(0, 8), 0.1), (piece(5, 12, page=2), 0.2), (piece(5, 12, document="b"), 0.3)]
    sections = join(chunks, ["a", "b"], words)
    assert [(section.document, section.page, section.score) for section in sections] == [
        ("a", 1, 0.1),
        ("a", 2, 0.2),
        ("b", 1, 0.3),
    ]


def test_order_is_of_reading_and_not_of_score() -> None:
    chunks = [
        (piece(0, 4, document="b"), 0.9),
        (piece(20, 24, page=10), 0.8),
        (piece(30, 34, page=2), 0.7),
        (piece(0, 4, page=2), 0.6),
    ]
    # The caller's order of documents counts, not the alphabet's; page 10 comes after page 2.
    assert [(s.document, s.page, s.start) for s in join(chunks, ["b", "a"], words)] == [
        ("b", 1, 0),
        ("a", 2, 0),
        ("a", 2, 30),
        ("a", 10, 20),
    ]


def test_nothing_to_join() -> None:
    assert join([], ["a"], words) == []


PIECES = st.builds(
    lambda start, length, page, document: piece(start, min(start + length, 49), page=page, document=document),
    st.integers(0, 48),
    st.integers(1, 15),
    st.integers(1, 2),
    st.sampled_from(["a", "b"]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(PIECES, st.floats(-1, 1)), max_size=12), st.randoms(use_true_random=False))
def test_joining_keeps_every_character_and_says_it_once(pieces: list[tuple[Chunk, float]], rng: Random) -> None:
    sections = join(pieces, ["b", "a"], words)
    places = [(section.document == "a", section.page, section.start) for section in sections]
    assert places == sorted(places)
    for page in {(chunk.document, chunk.page) for chunk, _ in pieces}:
        own = [section for section in sections if (section.document, section.page) == page]
        # More than a blank lies between two sections, else they would be one.
        assert all(before.end + 1 < after.start for before, after in pairwise(own))
        covered = {place for s in own for place in range(s.start, s.end)}
        for chunk, _ in pieces:
            if (chunk.document, chunk.page) == page:
                assert covered >= set(range(chunk.start, chunk.end))
    for section in sections:
        assert len(section.text) == section.end - section.start
        own_scores = [
            score
            for chunk, score in pieces
            if (chunk.document, chunk.page) == (section.document, section.page)
            and section.start <= chunk.start < section.end
        ]
        assert section.score == max(own_scores)
        # A single character left out between two chunks is given as a blank.
        for place, character in enumerate(section.text, start=section.start):
            assert character in (PAGE[place], " ")
    shuffled = list(pieces)
    rng.shuffle(shuffled)
    assert join(shuffled, ["b", "a"], words) == sections


# --- searching ---

LIBRARY = {
    # Documents and their pages; each sentence is a chunk.
    "ships": ("The ferry sails at noon. Its hull was painted green.", "The captain of the ferry drinks black tea."),
    "bread": ("Knead the dough for ten minutes. The oven must be very hot.",),
    "ferries": ("A second ferry sails at midnight.",),
}


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory, embedder: Embedder) -> Iterator[Search]:
    """The search over the library; its stores are only read."""
    folder: Path = tmp_path_factory.mktemp("library")
    vectors = Vectors(folder / "vectors", embedder)
    catalogue = Catalogue(f"sqlite:///{folder / 'catalogue.sqlite3'}")
    for id, texts in LIBRARY.items():
        pages = [StoredPage(id, number, str(number), text, words(text)) for number, text in enumerate(texts, start=1)]
        chunks: list[Chunk] = []
        for page in pages:
            start = 0
            for sentence in page.text.replace(". ", ".|").split("|"):
                chunks.append(Chunk(id, len(chunks), page.number, start, start + len(sentence), sentence))
                start += len(sentence) + 1
        catalogue.add(Document(id, f"{id}.txt", "default", "text/plain", 1, id, datetime(2026, 1, 1, tzinfo=UTC)))
        catalogue.store(id, pages, chunks, {})
        vectors.add(chunks)
    # What the vectors still know and the catalogue does not: a document that is being deleted, or not stored yet.
    vectors.add([Chunk("ghost", 0, 1, 0, 20, "The ferry sails at noon.")])

    def find(
        question: str, documents: list[str], token_budget: int = 1000, limit: int = 10, before: Sequence[str] = ()
    ) -> list[Section]:
        return search(
            question,
            documents,
            embedder=embedder,
            vectors=vectors,
            catalogue=catalogue,
            count_tokens=words,
            token_budget=token_budget,
            limit=limit,
            before=before,
        )

    yield find
    vectors.close()
    catalogue.close()


def test_best_section_comes_with_its_place_and_score(find: Search, embedder: Embedder) -> None:
    (section,) = find("How hot is the oven?", list(LIBRARY), limit=1)
    assert (section.document, section.page, section.text) == ("bread", 1, "The oven must be very hot.")
    assert LIBRARY["bread"][0][section.start : section.end] == section.text
    assert section.tokens == 6
    vectors = embedder.embed_documents(["How hot is the oven?", section.text])
    assert section.score == pytest.approx(sum(a * b for a, b in zip(*vectors, strict=True)), abs=1e-5)


def test_everything_is_whole_pages_in_order(find: Search) -> None:
    """With room for all, the pages come back as they were, in the order of the scope."""
    for scope in (["ferries", "ships", "bread"], ["bread", "ferries", "ships"]):
        sections = find("When does the ferry sail?", scope)
        assert [(s.document, s.page, s.text) for s in sections] == [
            (id, number, text) for id in scope for number, text in enumerate(LIBRARY[id], start=1)
        ]


@pytest.mark.parametrize("scope", [["bread"], ["ships", "bread"], ["ferries"]])
def test_only_the_scope_is_searched(find: Search, scope: list[str]) -> None:
    assert {section.document for section in find("When does the ferry sail?", scope)} == set(scope)


def test_empty_scope(find: Search) -> None:
    assert find("When does the ferry sail?", []) == []


def test_chunks_that_the_catalogue_does_not_know_are_left_out(find: Search) -> None:
    sections = find("The ferry sails at noon.", ["ghost", "ships"])
    assert {section.document for section in sections} == {"ships"}
    assert find("The ferry sails at noon.", ["ghost"]) == []


QUESTION = "When does the ferry sail?"


@pytest.fixture(scope="module")
def best(find: Search) -> list[list[Section]]:
    """The sections of the best chunk, of the two best and so on."""
    return [find(QUESTION, list(LIBRARY), limit=limit) for limit in range(1, 7)]


@pytest.mark.parametrize("budget", [0, 4, 5, 6, 10, 11, 16, 20, 29, 100])
def test_budget(find: Search, best: list[list[Section]], budget: int) -> None:
    sections = find(QUESTION, list(LIBRARY), token_budget=budget)
    # As many of the best as fit, none skipped; and one at least.
    fitting = [found for found in best if sum(section.tokens for section in found) <= budget]
    assert sections == (fitting[-1] if fitting else best[0])


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 50])
def test_limit(find: Search, limit: int) -> None:
    sections = find("When does the ferry sail?", list(LIBRARY), limit=limit)
    sentences = sum(section.text.count(".") for section in sections)
    assert sentences == min(limit, 6)


TEA, HULL, DOUGH = "The captain of the ferry drinks black tea.", "Its hull was painted green.", "Knead the dough"


@pytest.mark.parametrize(
    ("before", "question", "right"),
    [
        pytest.param(["What does the captain of the ferry drink?"], "And what colour is it?", TEA, id="a hint"),
        pytest.param(["Who is the captain?", "What does he drink?"], "Does he like it?", TEA, id="a hint at a hint"),
        pytest.param(["What does the captain drink?"], "How long must I knead the dough?", DOUGH, id="another subject"),
        pytest.param(["How long must I knead the dough?"], "How was the hull painted?", HULL, id="and back"),
    ],
)
def test_a_follow_up_finds_what_it_hints_at(find: Search, before: list[str], question: str, right: str) -> None:
    (best,) = find(question, list(LIBRARY), limit=1, before=before)
    assert best.text.startswith(right)
