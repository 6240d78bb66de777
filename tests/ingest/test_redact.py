"""Personal data leaves the text, found by the real Presidio; placeholders are stable and keyed."""

from __future__ import annotations

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import pytest
import tldextract
from hypothesis import example, given
from hypothesis import strategies as st

from ingest import redact as redact_module
from ingest.errors import IngestError
from ingest.redact import (
    ENTITIES,
    PACKAGED_NER,
    PLACEHOLDER,
    Analyzer,
    Redactor,
    Span,
    join_pages,
    load_key,
    pieces,
    placeholder,
    presidio,
    replace_spans,
    resolve,
)
from tests.documents import PLANTED, report

KEY = b"k" * 32


@pytest.fixture(scope="module")
def redactor(analyzer: Analyzer) -> Redactor:
    return Redactor(analyzer, KEY)


class Pattern:
    """An analyzer that finds one pattern: Presidio would take minutes for hundreds of long texts."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)

    def find(self, text: str) -> list[Span]:
        return [Span(*match.span(), "PERSON", 1.0) for match in self._pattern.finditer(text)]


# --- what Presidio finds ---


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_values_are_gone(redactor: Redactor, kind: str) -> None:
    planted_report = report(40)
    planted = [entry for entry in planted_report.planted if entry.kind == kind]
    assert len(planted) == PLANTED[kind][0]
    for entry in planted:
        paragraph = next(p for p in planted_report.pages[entry.page - 1].split("\n\n") if entry.value in p)
        result = redactor.redact(paragraph)
        # Not even a piece of it is left: no word of a name, no group of digits.
        for part in re.split(r"[\s-]+", entry.value):
            assert not re.search(rf"\b{re.escape(part)}\b", result.text)
        assert result.entities[kind] == 1


def test_long_text(redactor: Redactor) -> None:
    """Five pieces and more; every planted value is found once."""
    planted_report = report(46)
    text = "\n\n".join(planted_report.pages)
    assert len(text) > 100_000
    result = redactor.redact(text)
    assert not [entry.value for entry in planted_report.planted if entry.value in result.text]
    assert result.entities == {kind: count for kind, (count, _) in PLANTED.items()}
    # The rest is as it was.
    assert PLACEHOLDER.sub("", result.text).count("\n\n") == text.count("\n\n")
    assert all(fact.answer in result.text for fact in planted_report.facts)


def test_redacting_again_changes_nothing(redactor: Redactor) -> None:
    once = redactor.redact("\n\n".join(report(3).pages)).text
    assert PLACEHOLDER.search(once)
    assert redactor.redact(once).text == once


@pytest.mark.parametrize(
    "text", ["", " \n", "The pump runs in November near Halden."], ids=["empty", "blank", "harmless"]
)
def test_nothing_to_redact(redactor: Redactor, text: str) -> None:
    result = redactor.redact(text)
    assert result.text == text
    assert not result.entities


def test_an_entity_across_a_boundary_is_found_once(redactor: Redactor) -> None:
    """Slid over the first boundary character by character; empty lines before it cost Presidio nothing."""
    for value, kind in (("Thomas Whitfield", "PERSON"), ("anna.lindgren@example.com", "EMAIL_ADDRESS")):
        expected = placeholder(KEY, kind, value)
        for place in range(20_000 - len(value) - 2, 20_003):
            before, after = "\n" * (place - 15) + "Please contact ", " today.\n" + "\n" * 300
            result = redactor.redact(before + value + after)
            assert result.text == before + expected + after, place
            assert result.entities == {kind: 1}, place


def test_words_are_not_cut_at_a_boundary(redactor: Redactor) -> None:
    """Half a word may pass for a name."""
    sentence = "Please contact the workshop before the work begins. "
    for place in range(19_990 - len(sentence), 20_001, 3):
        text = "\n" * place + sentence + "\n" * 300
        assert redactor.redact(text).text == text, place


@pytest.mark.parametrize("boundary", [20_000, 39_800, 59_600])
def test_every_boundary_and_every_offset(boundary: int) -> None:
    redactor = Redactor(Pattern(r"\bsecret-\d+\b"), KEY)
    for place in range(boundary - 230, boundary + 30):
        text = "x" * (place - 1) + " secret-12345 " + "y" * 20_500
        result = redactor.redact(text)
        assert "secret" not in result.text, place
        assert result.entities == {"PERSON": 1}, place


@given(st.integers(0, 2000), st.integers(1, 300), st.integers(10, 60))
def test_pieces_cover_the_text(length: int, gap: int, overlap: int) -> None:
    text = "".join(" " if place % gap == 0 else "x" for place in range(length))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redact_module, "_PIECE", 200)
        patch.setattr(redact_module, "_OVERLAP", overlap)
        found = list(pieces(text))
    assert found[0][0] == 0
    assert found[-1][1] == length
    assert all(end - start <= 200 for start, end in found)
    assert all(before[1] - after[0] >= overlap for before, after in pairwise(found))


# --- pages ---


@pytest.mark.parametrize(
    ("pages", "clean"),
    [
        pytest.param(
            ("Please contact Robert", "Callahan at the desk."),
            ("Please contact {0}", " at the desk."),
            id="over a break",
        ),
        pytest.param(
            ("Please contact Robert ", "", "\nCallahan at the desk."),
            ("Please contact {0}", "", " at the desk."),
            id="over an empty page",
        ),
        pytest.param(
            ("Please contact Robert Callahan", "at the desk."),
            ("Please contact {0}", "at the desk."),
            id="at the end of a page",
        ),
        pytest.param(
            ("The desk.", "Robert Callahan was there."), ("The desk.", "{0} was there."), id="at the start of a page"
        ),
    ],
)
def test_a_name_and_its_pages(analyzer: Analyzer, pages: tuple[str, ...], clean: tuple[str, ...]) -> None:
    texts, entities = replace_spans(pages, analyzer.find(join_pages(pages)), KEY)
    name = placeholder(KEY, "PERSON", "Robert Callahan")
    assert texts == [page.format(name) for page in clean]
    assert entities == {"PERSON": 1}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        pytest.param("Call +49 221", "1234567 today.", "PHONE_NUMBER", id="phone"),
        pytest.param("His card is 4111 1111", "1111 1111 now.", "CREDIT_CARD", id="card"),
    ],
)
def test_numbers_over_a_break(analyzer: Analyzer, before: str, after: str, kind: str) -> None:
    texts, entities = replace_spans([before, after], analyzer.find(join_pages([before, after])), KEY)
    assert entities == {kind: 1}
    assert not re.search(r"\b1{4}\b|\d{7}|\b221\b", " ".join(PLACEHOLDER.sub("", text) for text in texts))


@given(st.lists(st.text(st.sampled_from("ab"), max_size=9), min_size=1, max_size=6), st.data())
def test_replacing_takes_the_spans_and_nothing_else(pages: list[str], data: st.DataObject) -> None:
    """The oracle goes character by character."""
    whole = join_pages(pages)
    places = st.integers(0, max(0, len(whole) - 1))
    ends = st.lists(st.tuples(places, st.integers(1, 12))) if whole else st.just([])
    spans = [Span(a, min(a + n, len(whole)), "PERSON", 1.0) for a, n in data.draw(ends)]
    expected = [""] * len(pages)
    page, left = 0, len(pages[0])
    starts = {span.start: span for span in resolve(spans)}
    covered = {place for span in spans for place in range(span.start, span.end)}
    for place, character in enumerate(whole):
        if place in starts:
            expected[page] += placeholder(KEY, "PERSON", whole[place : starts[place].end])
        if left == 0:
            page, left = page + 1, len(pages[page + 1])
            continue
        left -= 1
        expected[page] += "" if place in covered else character
    assert replace_spans(pages, spans, KEY)[0] == expected


# --- placeholders ---


def test_same_value_same_placeholder_across_calls(redactor: Redactor, analyzer: Analyzer) -> None:
    first = redactor.redact("Please contact Robert Callahan at the service desk.").text
    second = redactor.redact("The inspection was signed by Robert Callahan.").text
    assert PLACEHOLDER.findall(first) == PLACEHOLDER.findall(second) == [placeholder(KEY, "PERSON", "Robert Callahan")]
    other = Redactor(analyzer, b"another key").redact("The inspection was signed by Robert Callahan.").text
    assert PLACEHOLDER.findall(other) != PLACEHOLDER.findall(second)


@pytest.mark.parametrize(
    "spelling",
    [
        "robert callahan",
        "ROBERT CALLAHAN",
        "Robert  Callahan",
        "Robert\nCallahan",
        " Robert Callahan\t",
        "Robert Callahan's",
        "Robert Callahan’s",
        "Robert Callahan'",
    ],
)
def test_spelling_does_not_matter(spelling: str) -> None:
    assert placeholder(KEY, "PERSON", spelling) == placeholder(KEY, "PERSON", "Robert Callahan")


def test_a_genitive_names_the_same_person(redactor: Redactor) -> None:
    """A question about somebody's report must meet the name as the document has it."""
    text = redactor.redact("Margaret Ellison's report was read by Margaret Ellison.").text
    assert set(PLACEHOLDER.findall(text)) == {placeholder(KEY, "PERSON", "Margaret Ellison")}
    assert "Ellison" not in text


def test_others_differ() -> None:
    assert placeholder(KEY, "PERSON", "Robert Callahan") != placeholder(KEY, "PERSON", "Roberta Callahan")
    assert placeholder(KEY, "PERSON", "10.0.0.1") != placeholder(KEY, "IP_ADDRESS", "10.0.0.1")
    assert placeholder(KEY, "PERSON", "Robert Callahan") != placeholder(b"other", "PERSON", "Robert Callahan")


def test_placeholder_is_no_plain_digest() -> None:
    """Without the key, nobody can try values against it."""
    value, shown = "robert callahan", placeholder(KEY, "PERSON", "robert callahan")
    for text in (value, f"PERSON:{value}", value.title()):
        assert sha256(text.encode()).hexdigest()[:6] not in shown
    assert PLACEHOLDER.fullmatch(shown)


# --- overlaps ---

SPANS = st.builds(
    lambda start, length, entity, score: Span(start, start + length, entity, score),
    st.integers(0, 60),
    st.integers(1, 20),
    st.sampled_from(ENTITIES),
    st.sampled_from([0.4, 0.6, 1.0]),
)


@given(st.lists(SPANS, max_size=20))
@example([])
@example([Span(0, 9, "PERSON", 0.4), Span(2, 4, "US_SSN", 1.0), Span(8, 12, "PERSON", 0.4)])
def test_resolved_spans_cover_all_and_overlap_never(spans: list[Span]) -> None:
    resolved = resolve(spans)
    assert all(a.end <= b.start for a, b in pairwise(resolved))
    covered = {place for span in spans for place in range(span.start, span.end)}
    assert {place for span in resolved for place in range(span.start, span.end)} == covered
    for whole in resolved:
        parts = [span for span in spans if whole.start <= span.start < whole.end]
        assert whole.score == max(span.score for span in parts)
        assert whole.entity in {span.entity for span in parts if span.score == whole.score}


@given(st.lists(SPANS, max_size=20))
def test_order_does_not_matter_for_what_is_covered(spans: list[Span]) -> None:
    assert [(s.start, s.end) for s in resolve(spans)] == [(s.start, s.end) for s in resolve(spans[::-1])]


# --- the key ---


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    file = tmp_path / "new" / "redaction.key"
    key = load_key(file)
    assert len(key) == 32
    assert load_key(file) == key == file.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["redaction.key"]
    assert load_key(tmp_path / "other.key") != key


def test_nobody_reads_half_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service and its worker may both be the first to ask; an empty key would protect nothing."""
    file = tmp_path / "redaction.key"
    threads = 8
    barrier = Barrier(threads)
    urandom = os.urandom

    def slow(size: int) -> bytes:
        barrier.wait(timeout=10)
        return urandom(size)

    monkeypatch.setattr(os, "urandom", slow)
    with ThreadPoolExecutor(threads) as pool:
        keys = set(pool.map(load_key, [file] * threads))
    assert keys == {file.read_bytes()}
    assert len(file.read_bytes()) == 32


# --- no network ---


def test_suffix_list_is_never_fetched(analyzer: Analyzer) -> None:
    assert tldextract.tldextract.TLD_EXTRACTOR.suffix_list_urls == ()
    assert presidio() is analyzer


# --- other models ---


@pytest.mark.parametrize("model", ["no_such_model", "/no/such/folder"])
def test_a_model_that_cannot_be_loaded_is_told_in_one_line(model: str) -> None:
    with pytest.raises(
        IngestError, match=f"{model!r} cannot be loaded .*FOREWORD_NER_MODEL.*{PACKAGED_NER!r}"
    ) as caught:
        presidio(model)
    assert "\n" not in str(caught.value)


def test_the_packaged_model_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact_module, "PACKAGED_NER", "no_such_package_anywhere")
    with pytest.raises(IngestError, match="FOREWORD_NER_MODEL"):
        presidio("no_such_package_anywhere")
