"""Pages of text become chunks small enough to embed, each knowing its page and its place in it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from langchain_text_splitters import RecursiveCharacterTextSplitter

from ingest.extract import Page
from retrieval.passage import Chunk

# Cut at the largest unit that fits; the full-width stops make Chinese text, which has no spaces, fall at sentences.
_SEPARATORS = ["\n\n", "\n", "。", "！", "？", "；", ". ", "! ", "? ", "; ", "，", ", ", " ", ""]


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
