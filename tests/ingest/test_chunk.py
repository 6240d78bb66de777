"""Texts become pages, and pages become chunks that fit the embedding model, know their place and leave nothing out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingest.chunk import chunk_pages, paginate
from ingest.extract import Page
from ingest.redact import PLACEHOLDER
from retrieval.embed import Embedder, TokenCounter
from retrieval.passage import Chunk
from tests.documents import report


def words(text: str) -> int:
    return len(text.split())


def cut(*texts: str, count: Callable[[str], int] = words, size: int = 20, overlap: int = 5) -> list[Chunk]:
    pages = [Page(number, str(number), text) for number, text in enumerate(texts, start=1)]
    return chunk_pages("d", pages, count_tokens=count, chunk_tokens=size, overlap_tokens=overlap)


def uncovered(text: str, chunks: list[Chunk]) -> str:
    """What of the text is in no chunk."""
    left = list(text)
    for chunk in chunks:
        left[chunk.start : chunk.end] = " " * (chunk.end - chunk.start)
    return "".join(left).strip()


def assert_sound(text: str, chunks: list[Chunk], count: Callable[[str], int], size: int) -> None:
    assert all(text[chunk.start : chunk.end] == chunk.text for chunk in chunks)
    assert all(0 < count(chunk.text) <= size for chunk in chunks)
    assert uncovered(text, chunks) == ""
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    # In reading order, and each brings something new.
    assert all(a.start <= b.start and a.end < b.end for a, b in pairwise(chunks))


# Few different words, so that a text repeats itself and a chunk could be found in the wrong place.
PROSE = st.lists(
    st.sampled_from(["a", "of", "internationalization", "machine. ", "\n\n", "\n", "句子。", "，", "  "]), max_size=120
).map(" ".join)


@given(PROSE, st.integers(2, 30), st.data())
# Overlaps of few tokens and many characters: the splitter's own index loses these.
@example("internationalization betas alpha " * 40, 30, None)
def test_chunks_are_sound(text: str, size: int, data: st.DataObject | None) -> None:
    overlap = data.draw(st.integers(0, size // 4)) if data else 8
    assert_sound(text, cut(text, size=size, overlap=overlap), words, size)


@given(st.text(st.sampled_from("ab \n."), max_size=150), st.integers(4, 40))
def test_characters_as_tokens(text: str, size: int) -> None:
    """The hardest case: no unit is small enough but the single character."""
    assert_sound(text, cut(text, count=len, size=size, overlap=size // 4), len, size)


@pytest.fixture(scope="module")
def counter(embedder: Embedder) -> TokenCounter:
    return TokenCounter(embedder.tokenizer_json)


@settings(max_examples=50)
@given(text=st.one_of(PROSE, st.text(max_size=400)))
def test_real_tokens(counter: TokenCounter, text: str) -> None:
    chunks = cut(text, count=counter, size=24, overlap=6)
    assert all(text[chunk.start : chunk.end] == chunk.text for chunk in chunks)
    assert all(counter(chunk.text) <= 24 for chunk in chunks)
    assert uncovered(text, chunks) == ""


def test_report(counter: TokenCounter) -> None:
    pages = report(3).pages
    chunks = cut(*pages, count=counter, size=128, overlap=16)
    for number, text in enumerate(pages, start=1):
        own = [chunk for chunk in chunks if chunk.page == number]
        assert uncovered(text, own) == ""
        assert all(text[chunk.start : chunk.end] == chunk.text for chunk in own)
        assert all(counter(chunk.text) <= 128 for chunk in own)


def test_numbers_run_through_the_document_and_pages_are_not_mixed() -> None:
    chunks = cut("one two three", "", "   \n", "four five", size=2, overlap=0)
    assert [(chunk.number, chunk.page, chunk.text) for chunk in chunks] == [
        (0, 1, "one two"),
        (1, 1, "three"),
        (2, 4, "four five"),
    ]
    assert {chunk.document for chunk in chunks} == {"d"}


def test_neighbours_overlap() -> None:
    text = " ".join(f"w{number}" for number in range(30))
    first, second, *_ = cut(text, size=10, overlap=3)
    assert first.text.split()[-3:] == second.text.split()[:3]
    assert second.start < first.end


@pytest.mark.parametrize(
    ("text", "first"),
    [
        pytest.param("a b c\n\nd e f", "a b c", id="paragraph"),
        pytest.param("a b c\nd e f", "a b c", id="line"),
        pytest.param("a b c. d e f", "a b c.", id="sentence"),
        pytest.param("a b c? d e f", "a b c?", id="question"),
    ],
)
def test_cuts_at_the_largest_unit(text: str, first: str) -> None:
    assert cut(text, size=4, overlap=0)[0].text == first


def test_chinese_is_cut_after_its_stops() -> None:
    text = "春天来了。花开了！你看见了吗？我看见了。"
    assert [chunk.text for chunk in cut(text, count=len, size=7, overlap=0)] == [
        "春天来了。",
        "花开了！",
        "你看见了吗？",
        "我看见了。",
    ]


def test_no_pages() -> None:
    assert cut() == []


# --- pages ---

PAGE = 3000


def paged(*texts: str) -> list[str]:
    pages = paginate([Page(number, str(number), text) for number, text in enumerate(texts, start=1)])
    assert [(page.number, page.label) for page in pages] == [(n, str(n)) for n in range(1, len(pages) + 1)]
    return [page.text for page in pages]


@given(
    st.lists(
        st.sampled_from(
            ["word ", "a sentence ends. ", "line\n", "paragraph\n\n", "句子。", "x" * 700, " ", "<PERSON_3f9a1c>" * 70]
        ),
        max_size=80,
    ).map("".join)
)
@example("x" * (3 * PAGE))
@example(" " * (2 * PAGE + 1))
@example("<PERSON_3f9a1c>" * 900)
def test_pagination_loses_nothing_and_cuts_no_placeholder(text: str) -> None:
    pages = paged(text)
    assert "".join(pages) == text
    assert all(0 < len(page) <= PAGE for page in pages) or text == ""
    # Only where nothing can be cut is a page shorter than half.
    assert all(len(page) > PAGE // 2 for page in pages[:-1])
    assert sum(len(PLACEHOLDER.findall(page)) for page in pages) == len(PLACEHOLDER.findall(text))


@pytest.mark.parametrize("place", range(PAGE - 20, PAGE + 3))
def test_a_placeholder_at_the_end_of_a_page_stays_whole(place: int) -> None:
    text = "x" * place + "<PERSON_3f9a1c>" + "y" * 100
    assert "".join(paged(text)) == text
    assert any("<PERSON_3f9a1c>" in page for page in paged(text))


@pytest.mark.parametrize("mark", ["\n\n", "\n", "。", ". ", " "], ids=["paragraph", "line", "cjk", "sentence", "word"])
def test_pages_end_at_the_best_mark(mark: str) -> None:
    # The word mark is everywhere, so a page that ends elsewhere has preferred something better.
    first, *_ = paged(("ab " * 800 + "end" + mark) * 3)
    assert first == "ab " * 800 + "end" + mark or mark == " "
    assert first.endswith(mark)


def test_each_part_begins_a_page() -> None:
    assert paged("one", "", "x" * (PAGE + 1), "four") == ["one", "", "x" * PAGE, "x", "four"]
