"""Redacted text becomes pages, and pages become chunks small enough to embed that know their page and place. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from langchain_text_splitters import RecursiveCharacterTextSplitter

from ingest.extract import Page
from ingest.redact import PLACEHOLDER
from retrieval.passage import Chunk

# Cut at the largest unit that fits; the full-width stops make Chinese text, which has no spaces, fall at sentences.
_SEPARATORS = ["\n\n", "\n", "。", "！", "？", "；", ". ", "! ", "? ", "; ", "，", ", ", " ", ""]
# About what a printed page holds.
_PAGE_CHARACTERS = 3000
_PAGE_ENDS = ("\n\n", "\n", "。", ". ", ";", "；", ",", "，", "\t", " ")


def paginate(pages: Sequence[Page]) -> list[Page]:
    """Pages of a printed page's size, numbered anew, from a text that has no pages of its own.

    Args:
        pages: the parts of the text, redacted; each begins a page.
    """
    texts = [text for page in pages for text in _cut(page.text)]
    return [Page(number, str(number), text) for number, text in enumerate(texts, start=1)]


def _cut(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PAGE_CHARACTERS:
        end = _page_end(text, start)
        yield text[start:end]
        start = end
    yield text[start:]


def _page_end(text: str, start: int) -> int:
    """The best place to end the page that begins at `start`, in its second half, and never inside a placeholder."""
    end = start + _PAGE_CHARACTERS
    for mark in _PAGE_ENDS:
        found = text.rfind(mark, start + _PAGE_CHARACTERS // 2, end)
        if found != -1:
            return found + len(mark)
    nearby = PLACEHOLDER.finditer(text, start + _PAGE_CHARACTERS // 2, end + _PAGE_CHARACTERS // 2)
    return next((match.start() for match in nearby if match.start() < end < match.end()), end)


def chunk_pages(
    document: str,
    pages: Sequence[Page],
    *,
    count_tokens: Callable[[str], int],
    chunk_tokens: int,
    overlap_tokens: int,
) -> list[Chunk]:
    """Cut each page into chunks of at most `chunk_tokens` tokens.

    Args:
        document: id of the document.
        pages: its pages, redacted.
        count_tokens: the embedding model's token count, so that no chunk is longer than its window.
        chunk_tokens: most tokens of a chunk.
        overlap_tokens: tokens that neighbours may share.

    Returns:
        Chunks numbered from 0 through the document; `pages[i].text[chunk.start:chunk.end] == chunk.text`.
    """
    splitter = RecursiveCharacterTextSplitter(
        separators=_SEPARATORS,
        keep_separator="end",
        chunk_size=chunk_tokens,
        chunk_overlap=overlap_tokens,
        length_function=count_tokens,
    )
    chunks: list[Chunk] = []
    for page in pages:
        for start, end in _places(page.text, splitter.split_text(page.text)):
            chunks.append(Chunk(document, len(chunks), page.number, start, end, page.text[start:end]))
    return chunks


def _places(text: str, pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where each piece lies in the text; the splitter's own index takes the overlap for characters and misses some.

    A piece begins where the one before it ended, after blanks that were dropped, or earlier when the two overlap.
    """
    covered = 0
    for piece in pieces:
        rest = text[covered:]
        latest = covered + len(rest) - len(rest.lstrip())
        start = text.rfind(piece, 0, latest + len(piece))
        # In a text that repeats itself a piece may match later than it was cut; the last ones then bring nothing new.
        if start + len(piece) > covered:
            covered = start + len(piece)
            yield start, covered
