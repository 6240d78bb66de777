"""Pages of text become chunks small enough to embed, each knowing its page and its place in it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        add_start_index=True,
    )
    chunks: list[Chunk] = []
    for page in pages:
        for piece in splitter.create_documents([page.text]):
            start = piece.metadata["start_index"]
            chunks.append(
                Chunk(
                    document=document,
                    number=len(chunks),
                    page=page.number,
                    start=start,
                    end=start + len(piece.page_content),
                    text=piece.page_content,
                )
            )
    return chunks
