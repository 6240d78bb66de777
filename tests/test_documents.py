"""The documents that other tests read are what they claim to be."""

from __future__ import annotations

from io import BytesIO

import pytest
from pypdf import PasswordType, PdfReader
from pypdf.errors import FileNotDecryptedError, PyPdfError

from tests.documents import (
    FACTS,
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

SENTENCES = {answer: sentence for sentence, _, answer in FACTS}


@pytest.fixture(scope="module")
def long_report() -> Report:
    return report()


def _plain(text: str) -> str:
    return " ".join(text.split())


def _read(data: bytes) -> list[str]:
    return [_plain(page.extract_text()) for page in PdfReader(BytesIO(data)).pages]


def test_report_has_the_promised_shape(long_report: Report) -> None:
    assert len(long_report.pages) == 40
    assert len(set(long_report.pages)) == 40
    assert all(2000 < len(text) < 2600 for text in long_report.pages)
    assert len(long_report.facts) >= 10
    assert {1, 40} <= {fact.page for fact in long_report.facts}
    assert len(long_report.planted) >= 20
    assert len({planted.value for planted in long_report.planted}) == len(long_report.planted)


def test_report_depends_on_its_arguments_only(long_report: Report) -> None:
    assert report() == long_report
    assert as_pdf(report().pages) == as_pdf(long_report.pages)
    assert report(seed=1).pages != long_report.pages
    assert len(report(pages=1).pages) == 1


def test_pdf_text_comes_back_page_by_page(long_report: Report) -> None:
    pages = _read(as_pdf(long_report.pages))
    assert pages == [_plain(text) for text in long_report.pages]
    for fact in long_report.facts:
        assert fact.answer in SENTENCES[fact.answer]
        assert SENTENCES[fact.answer] in pages[fact.page - 1]
    for planted in long_report.planted:
        assert [number for number, text in enumerate(pages, start=1) if planted.value in text] == [planted.page]


def test_text_and_markdown_keep_every_page(long_report: Report) -> None:
    assert as_text(long_report.pages).decode().split("\f") == list(long_report.pages)
    markdown = as_markdown(long_report.pages).decode()
    assert markdown.count("## Page ") == 40
    assert all(text in markdown for text in long_report.pages)


def test_scanned_pages_have_no_text() -> None:
    assert _read(scanned_pdf(pages=2)) == ["", ""]


def test_encrypted_pdf_needs_its_password() -> None:
    reader = PdfReader(BytesIO(encrypted_pdf("sesame")))
    assert reader.decrypt("") is PasswordType.NOT_DECRYPTED
    with pytest.raises(FileNotDecryptedError):
        reader.pages[0].extract_text()
    assert reader.decrypt("sesame") is not PasswordType.NOT_DECRYPTED
    assert "protected" in reader.pages[0].extract_text()


def test_owner_locked_pdf_opens_without_a_password() -> None:
    reader = PdfReader(BytesIO(owner_locked_pdf()))
    assert reader.is_encrypted
    assert "protected" in reader.pages[0].extract_text()


def test_truncated_pdf_is_damaged() -> None:
    with pytest.raises(PyPdfError):
        _read(truncated_pdf())


def test_table_is_its_own_predecessor() -> None:
    data = pdf_with_ring_in_prev()
    start = data.index(b"\nxref\n") + 1
    assert b"/Prev %d >>" % start in data
    assert b"startxref\n%d\n" % start in data


def test_other_bytes_are_no_pdf() -> None:
    assert not_a_pdf().startswith(b"\x89PNG")
    assert empty() == b""
