"""Bytes become pages: types, encodings, page breaks, PDFs good and bad, and what the refusals say."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from io import BytesIO

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pypdf import PageObject, PdfReader, PdfWriter
from pypdf.constants import PageLabelStyle

from ingest import extract as extract_module
from ingest.errors import DamagedFile, EmptyFile, EncryptedFile, FileRefused, NoText, UnsupportedType
from ingest.extract import MediaType, check, extract, media_type, unwrap
from tests.documents import (
    Report,
    as_markdown,
    as_pdf,
    as_text,
    empty,
    encrypted_pdf,
    not_a_pdf,
    owner_locked_pdf,
    pdf_with_ring_in_prev,
    report,
    scanned_pdf,
    truncated_pdf,
)

PDF: MediaType = "application/pdf"
TEXT: MediaType = "text/plain"
MARKDOWN: MediaType = "text/markdown"
CHINESE = "春天来了，花开了。这是一份关于机器维护的长篇报告。"
GERMAN = "Grüße aus Köln: die Maschine läuft schön über die Brücke."


def texts(data: bytes, name: str = "a.txt", kind: MediaType = TEXT) -> list[str]:
    return [page.text for page in extract(name, kind, data).pages]


def plain(text: str) -> str:
    return " ".join(text.split())


# --- types ---


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        pytest.param("a.txt", b"hello", TEXT, id="text"),
        pytest.param("A.TXT", b"hello", TEXT, id="name in capitals"),
        pytest.param("a.text", b"hello", TEXT, id="long suffix"),
        pytest.param("notes.v2.md", b"# hello", MARKDOWN, id="markdown"),
        pytest.param("a.markdown", b"# hello", MARKDOWN, id="markdown, long suffix"),
        pytest.param("a.pdf", b"%PDF-1.7\n", PDF, id="pdf"),
        pytest.param("a.pdf", b"\r\n" * 500 + b"%PDF-1.4\n", PDF, id="header within the first kilobyte"),
        pytest.param("a.txt", b"x" * 1024 + b"%PDF-1.4", TEXT, id="text that names the header late"),
        pytest.param("a.txt", "hello".encode("utf-16"), TEXT, id="zero bytes after a byte order mark"),
    ],
)
def test_type(name: str, data: bytes, kind: MediaType) -> None:
    assert media_type(name, data) == kind


@pytest.mark.parametrize(
    ("name", "data", "refusal"),
    [
        pytest.param("a.txt", empty(), EmptyFile, id="no bytes"),
        pytest.param("a.pdf", b" \n\t\r\n", EmptyFile, id="blanks only"),
        pytest.param("a.docx", b"PK", UnsupportedType, id="other suffix"),
        pytest.param("README", b"hello", UnsupportedType, id="no suffix"),
        pytest.param(".txt", b"hello", UnsupportedType, id="suffix as name"),
        pytest.param("a.pdf", b"hello", UnsupportedType, id="text called pdf"),
        pytest.param("a.md", as_pdf(["hello"]), UnsupportedType, id="pdf called markdown"),
        pytest.param("a.txt", not_a_pdf(), UnsupportedType, id="picture called text"),
        pytest.param("a.pdf", not_a_pdf(), UnsupportedType, id="picture called pdf"),
        pytest.param("a.pdf", b"x" * 1024 + b"%PDF-1.4", UnsupportedType, id="header too late"),
        pytest.param("a.txt", "hello".encode("utf-16-le"), UnsupportedType, id="utf-16 without its mark"),
    ],
)
def test_type_refused(name: str, data: bytes, refusal: type[FileRefused]) -> None:
    with pytest.raises(refusal):
        media_type(name, data)


# --- text files ---


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "cp1252"])
def test_german_in_any_encoding(encoding: str) -> None:
    assert texts(GERMAN.encode(encoding)) == [GERMAN]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
def test_chinese_in_any_encoding(encoding: str) -> None:
    assert texts(CHINESE.encode(encoding)) == [CHINESE]


def test_form_feeds_end_pages() -> None:
    pages = extract("a.txt", TEXT, b"one\ftwo\f\ffour").pages
    assert [page.text for page in pages] == ["one", "two", "", "four"]
    assert [(page.number, page.label) for page in pages] == [(1, "1"), (2, "2"), (3, "3"), (4, "4")]


def test_text_report_keeps_its_pages() -> None:
    pages = report(5).pages
    assert texts(as_text(pages)) == list(pages)


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        pytest.param(b"a\r\nb\rc\nd", "a\nb\nc\nd", id="line ends"),
        pytest.param(b"a\x01\x07\x0b\x1b\x7fb", "ab", id="control characters"),
        pytest.param("\ufeffa\x00b".encode(), "ab", id="NUL"),
        pytest.param(b"a \t   b  c", "a  b  c", id="runs of blanks"),
        pytest.param("a\u00a0\u00a0\u00a0b".encode(), "a  b", id="runs of hard blanks"),
        pytest.param(b"\ta\n\n\nb", "\ta\n\n\nb", id="empty lines and single tabs stay"),
    ],
)
def test_cleaning(raw: bytes, cleaned: str) -> None:
    assert texts(raw) == [cleaned]


@given(st.text(st.characters(codec=None), max_size=60))
@example("\ud800 lone \udfff")
@example("a\x00b")
def test_cleaned_text_can_be_encoded(text: str) -> None:
    cleaned = extract_module._clean(text)
    assert "\x00" not in cleaned
    assert cleaned.encode().decode() == cleaned


def test_a_text_is_not_cut_before_it_is_redacted() -> None:
    data = as_markdown(report(6).pages)
    assert texts(data, "a.md", MARKDOWN) == [data.decode()]


# --- PDF ---


@pytest.fixture(scope="module")
def long_pdf() -> tuple[Report, bytes]:
    long_report = report(40)
    return long_report, as_pdf(long_report.pages)


def test_pdf_report(long_pdf: tuple[Report, bytes]) -> None:
    long_report, data = long_pdf
    extracted = extract("report.pdf", PDF, data)
    assert [page.number for page in extracted.pages] == list(range(1, 41))
    assert [plain(page.text) for page in extracted.pages] == [plain(text) for text in long_report.pages]
    assert extracted.unreadable == ()


def test_pdf_sentences_are_whole_lines(long_pdf: tuple[Report, bytes]) -> None:
    long_report, data = long_pdf
    pages = texts(data, "report.pdf", PDF)
    assert all(planted.value in pages[planted.page - 1] for planted in long_report.planted)


def test_pdf_labels() -> None:
    writer = PdfWriter(clone_from=PdfReader(BytesIO(as_pdf(["one", "two", "three"]))))
    writer.set_page_label(0, 1, PageLabelStyle.LOWERCASE_ROMAN)
    writer.set_page_label(2, 2, PageLabelStyle.DECIMAL, start=7)
    buffer = BytesIO()
    writer.write(buffer)
    pages = extract("a.pdf", PDF, buffer.getvalue()).pages
    assert [(page.number, page.label) for page in pages] == [(1, "i"), (2, "ii"), (3, "7")]


def test_owner_password_is_no_hindrance() -> None:
    assert check("a.pdf", owner_locked_pdf()) == PDF
    assert texts(owner_locked_pdf(), "a.pdf", PDF) == ["This page is protected."]


def test_ring_of_tables_ends_quickly() -> None:
    started = time.monotonic()
    assert texts(pdf_with_ring_in_prev(), "a.pdf", PDF) == ["The table of this file points to itself."]
    assert time.monotonic() - started < 5


def test_broken_page_is_reported_and_the_others_are_kept(half_broken_pdf: bytes) -> None:
    extracted = extract("a.pdf", PDF, half_broken_pdf)
    assert extracted.unreadable == (2,)
    assert [(page.number, page.text) for page in extracted.pages] == [
        (1, "The first page is whole."),
        (3, "The third page is whole."),
    ]


def test_pdf_text_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageObject, "extract_text", lambda self: "a\x00b \ud835 c\r\nd")
    assert texts(as_pdf(["any"]), "a.pdf", PDF) == ["ab \ufffd c d"]


def test_no_page_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PageObject) -> str:
        raise RecursionError

    monkeypatch.setattr(PageObject, "extract_text", fail)
    with pytest.raises(NoText, match=re.escape("'a.pdf'")):
        extract("a.pdf", PDF, as_pdf(["one", "two"]))


@pytest.mark.parametrize("length", [10, 100, 400, 600])
def test_check_and_extract_agree_on_what_cannot_be_opened(length: int) -> None:
    data = as_pdf(["one", "two"])[:length]
    with pytest.raises(DamagedFile):
        check("a.pdf", data)
    with pytest.raises(DamagedFile):
        extract("a.pdf", PDF, data)


# --- lines ---

LONG = "The bearings of the pump were replaced by the night shift because the noise had become"


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("One line", "One line", id="one line"),
        pytest.param(f"{LONG}\nunbearable.", f"{LONG} unbearable.", id="broken sentence"),
        pytest.param(f"{LONG} Thomas\nWhitfield.", f"{LONG} Thomas Whitfield.", id="broken name"),
        pytest.param(f"1. Pumps\n{LONG}\nloud.", f"1. Pumps\n{LONG} loud.", id="heading stays"),
        pytest.param(f"{LONG}.\nThen it ran.", f"{LONG}.\nThen it ran.", id="a sentence ends with its line"),
        pytest.param(f"{LONG}:\n- grease\n- oil\nend", f"{LONG}:\n- grease\n- oil\nend", id="short lines stay"),
        pytest.param(f"{LONG}\n\nNext paragraph", f"{LONG}\n\nNext paragraph", id="empty line stays"),
        pytest.param(f"{LONG}\n   \nNext", f"{LONG}\n   \nNext", id="blank line stays"),
        pytest.param(
            "机器的轴承已经由夜班更换完毕因为噪音\n太大了。", "机器的轴承已经由夜班更换完毕因为噪音太大了。", id="cjk"
        ),
        pytest.param(
            "他们用的是一台很老的型号名称叫做 Corvan\n压机",
            "他们用的是一台很老的型号名称叫做 Corvan 压机",
            id="cjk and latin",
        ),
        pytest.param(
            "机器的轴承已经更换完毕。\n噪音消失了。", "机器的轴承已经更换完毕。\n噪音消失了。", id="cjk sentence ends"
        ),
    ],
)
def test_unwrap(text: str, joined: str) -> None:
    assert unwrap(text) == joined


@given(st.text(st.sampled_from("ab .\n句。"), max_size=200))
def test_unwrap_changes_line_breaks_only(text: str) -> None:
    def kept(value: str) -> str:
        return "".join(value.split())

    assert kept(unwrap(text)) == kept(text)


# --- refusals ---

REFUSED: list[tuple[str, Callable[[], object], type[FileRefused], str]] = [
    ("a.txt", lambda: media_type("a.txt", b""), EmptyFile, "choose a file"),
    ("a.exe", lambda: media_type("a.exe", b"MZ"), UnsupportedType, "upload .txt, .md or .pdf"),
    ("a.pdf", lambda: media_type("a.pdf", b"text"), UnsupportedType, "upload a real"),
    ("a.pdf", lambda: check("a.pdf", scanned_pdf(3)), NoText, "any of its 3 pages; run OCR"),
    ("a.pdf", lambda: extract("a.pdf", PDF, scanned_pdf(1)), NoText, "upload the result"),
    ("a.txt", lambda: check("a.txt", b"\xef\xbb\xbf"), NoText, "choose a file"),
    ("a.txt", lambda: check("a.txt", b"\x01\f\x02"), NoText, "choose a file"),
    ("a.pdf", lambda: check("a.pdf", encrypted_pdf("sesame")), EncryptedFile, "remove the protection"),
    ("a.pdf", lambda: extract("a.pdf", PDF, encrypted_pdf("sesame")), EncryptedFile, "remove the protection"),
    ("a.pdf", lambda: check("a.pdf", truncated_pdf()), DamagedFile, "upload a whole copy"),
    ("a.pdf", lambda: check("a.pdf", b"%PDF-1.7\nnothing else"), DamagedFile, "upload a whole copy"),
]


@pytest.mark.parametrize(
    ("name", "act", "refusal", "next_step"), REFUSED, ids=[f"{r[2].__name__}-{n}" for n, r in enumerate(REFUSED)]
)
def test_refusals_name_the_file_and_the_next_step(
    name: str, act: Callable[[], object], refusal: type[FileRefused], next_step: str
) -> None:
    with pytest.raises(refusal) as caught:
        act()
    assert repr(name) in str(caught.value)
    assert next_step in str(caught.value)


def test_a_strange_name_is_quoted() -> None:
    name = "it's\nodd.exe"
    with pytest.raises(UnsupportedType) as caught:
        media_type(name, b"MZ")
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)
