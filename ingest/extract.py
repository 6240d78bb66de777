"""Bytes of a file become numbered pages of text.

Runs in a worker process: a hostile file may crash it or hang it, never the service. Knows nothing of redaction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from pathlib import PurePath
from typing import Literal

import charset_normalizer
from pypdf import PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

from ingest.errors import DamagedFile, EmptyFile, EncryptedFile, NoText, UnsupportedType

MediaType = Literal["application/pdf", "text/plain", "text/markdown"]

_SUFFIXES: dict[str, MediaType] = {
    ".pdf": "application/pdf",
    ".txt": "text/plain",
    ".text": "text/plain",
    ".md": "text/markdown",
    ".markdown": "text/markdown",
}
# Viewers look for the header in the first kilobyte (ISO 32000-1, annex H.3.4.1 "header").
_PDF_HEADER_WITHIN = 1024
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")
_READING_S = 120.0
_BYTES_PER_S = 50_000
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_LABEL = re.compile(r"[A-Za-z]?-?(?:\d{1,4}|[ivxlcdm]{1,8}|[IVXLCDM]{1,8})")
_FULL_LINE = 0.7
_SENTENCE_ENDS = (".", "!", "?", ":", "。", "！", "？", "：")
_CJK_BREAK = re.compile("[\u3000-\u9fff\uf900-\ufaff\uff00-\uffef]{2}")
_RUNS_OF_BLANKS = re.compile(r"[ \t\u00a0]{3,}")


@dataclass(frozen=True, slots=True)
class Page:
    """One page: `number` counts from 1, `label` is what is printed on it when the file says so."""

    number: int
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Extracted:
    """All pages of a file, and the numbers of those that could not be read."""

    pages: tuple[Page, ...]
    unreadable: tuple[int, ...] = field(default=())


def media_type(name: str, data: bytes) -> MediaType:
    """The type of a file by its content, checked against its name.

    Raises:
        EmptyFile: there are no bytes.
        UnsupportedType: content and name do not agree on one of the supported types.
    """
    if not data.strip():
        raise EmptyFile(f"{name!r} is empty; choose a file with text in it")
    named = _SUFFIXES.get(PurePath(name).suffix.lower())
    looks_like_pdf = b"%PDF-" in data[:_PDF_HEADER_WITHIN]
    if named is None:
        raise UnsupportedType(f"{name!r} is not of a supported type; upload .txt, .md or .pdf files")
    if looks_like_pdf != (named == "application/pdf") or (not looks_like_pdf and _is_binary(data)):
        raise UnsupportedType(f"{name!r} does not contain what its name says; upload a real .txt, .md or .pdf file")
    return named


def reading_limit_s(data: bytes) -> float:
    """Seconds after which reading a file of this size has gone wrong: many times what it takes (docs/log.md)."""
    return _READING_S + len(data) / _BYTES_PER_S


def check(name: str, data: bytes) -> MediaType:
    """Refuse a file that can never be ingested, reading no more of it than that takes.

    Raises:
        FileRefused: one of its subclasses, naming the cause.
    """
    kind = media_type(name, data)
    pages = 0
    for page in _pages(name, kind, data):
        pages += 1
        if page is not None and page.text.strip():
            return kind
    if kind == "application/pdf":
        raise NoText(f"{name!r} has no text layer on any of its {pages:,} pages; run OCR on it and upload the result")
    raise NoText(f"{name!r} holds no text; choose a file with text in it")


def extract(name: str, kind: MediaType, data: bytes) -> Extracted:
    """Read every page. A page that cannot be read is reported, and the others are kept.

    Raises:
        FileRefused: nothing can be read at all.
    """
    pages: list[Page] = []
    unreadable: list[int] = []
    for number, page in enumerate(_pages(name, kind, data), start=1):
        if page is None:
            unreadable.append(number)
        else:
            pages.append(page)
    if not any(page.text.strip() for page in pages):
        raise NoText(f"{name!r} holds no text that can be read; mend it or save it anew and upload the result")
    return Extracted(tuple(pages), tuple(unreadable))


def _pages(name: str, kind: MediaType, data: bytes) -> Iterator[Page | None]:
    return _pdf_pages(name, data) if kind == "application/pdf" else _text_pages(data)


def _text_pages(data: bytes) -> Iterator[Page]:
    """Form feeds are the only page breaks of a text file; what lies between them may be long."""
    for number, part in enumerate(_decode(data).split("\f"), start=1):
        yield Page(number, str(number), _clean(part))


def _pdf_pages(name: str, data: bytes) -> Iterator[Page | None]:
    try:
        reader = PdfReader(BytesIO(data))
        # Many files are locked against copying with an owner password only; those open with an empty one.
        if reader.is_encrypted and not reader.decrypt(""):
            raise EncryptedFile(f"{name!r} needs a password; remove the protection and upload it again")
        count = len(reader.pages)
    except (DependencyError, FileNotDecryptedError) as error:
        raise EncryptedFile(
            f"{name!r} is encrypted in a way that cannot be opened ({error}); remove the protection and upload it again"
        ) from error
    except EncryptedFile:
        raise
    # A parser fed with arbitrary bytes raises far more than its own errors; each of them means the same here.
    except Exception as error:
        raise DamagedFile(
            f"{name!r} is damaged or cut off and cannot be opened ({type(error).__name__}); upload a whole copy of it"
        ) from error
    labels = _labels(reader, count)
    for index in range(count):
        try:
            text = unwrap(_clean(reader.pages[index].extract_text()))
        # One broken page must not cost the others.
        except Exception:
            yield None
        else:
            yield Page(index + 1, labels[index], text)


def unwrap(text: str) -> str:
    """Join the lines that a page layout has broken, so that sentences and names are whole again.

    A line was broken by the layout when it is nearly as long as the page is wide and does not end a sentence.
    """
    lines = text.split("\n")
    full = _FULL_LINE * max(map(len, lines))
    joined = lines[0]
    for previous, line in pairwise(lines):
        broken = len(previous) >= full and line.strip() and not previous.rstrip().endswith(_SENTENCE_ENDS)
        glue = "" if broken and _CJK_BREAK.search(previous[-1:] + line[:1]) else " " if broken else "\n"
        joined += glue + line
    return joined


def _labels(reader: PdfReader, count: int) -> list[str]:
    try:
        labels = reader.page_labels
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        labels = []
    if len(labels) != count:
        labels = [""] * count
    # A label is free text of the file and is not redacted, so only what looks like a page number is kept.
    return [label if _LABEL.fullmatch(label) else str(number) for number, label in enumerate(labels, start=1)]


def _is_binary(data: bytes) -> bool:
    return not data.startswith(_BYTE_ORDER_MARKS) and b"\x00" in data


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        best = charset_normalizer.from_bytes(data).best()
        return str(best) if best is not None else data.decode("utf-8", errors="replace")


def _clean(text: str) -> str:
    """Text that every later step can encode: no lone surrogates, no control characters, no runs of blanks."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _LONE_SURROGATES.sub("\ufffd", text)
    return _RUNS_OF_BLANKS.sub("  ", _UNPRINTABLE.sub("", text))
