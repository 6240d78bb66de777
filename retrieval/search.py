"""From a question to passages: nearest chunks, joined into sections, in reading order, within a token budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from retrieval.catalogue import Catalogue
from retrieval.embed import Embedder
from retrieval.passage import Chunk, Section
from retrieval.vectors import Vectors

# With one question, what the second follow-up in a row hints at is lost; with more, the subject before clings.
_BEFORE = 2


def search(
    question: str,
    documents: Sequence[str],
    *,
    embedder: Embedder,
    vectors: Vectors,
    catalogue: Catalogue,
    count_tokens: Callable[[str], int],
    token_budget: int,
    limit: int,
    known: Sequence[Section] = (),
    before: Sequence[str] = (),
) -> list[Section]:
    """The best sections for a question.

    Args:
        question: redacted like the documents.
        documents: ids to search in, in the order their sections shall have.
        count_tokens: the language model's token count.
        token_budget: most tokens of all sections together; at least the best chunk is kept.
        limit: most chunks to consider.
        known: sections that need not be found again.
        before: questions that came before in a conversation, the last one last; a follow-up may only hint at what they
            named.

    Returns:
        Sections ordered by document and place, not by score.
    """
    hits = vectors.search(_query(question, before, embedder), documents, limit)
    scores = {(hit.document, hit.number): hit.score for hit in hits}
    ranked = [(chunk, scores[chunk.document, chunk.number]) for chunk in catalogue.chunks(list(scores))]
    kept: list[tuple[Chunk, float]] = []
    left = token_budget
    for chunk, score in ranked:
        if any(section.holds(chunk) for section in known):
            continue
        left -= count_tokens(chunk.text)
        if left < 0 and kept:
            break
        kept.append((chunk, score))
    return join(kept, documents, count_tokens)


def _query(question: str, before: Sequence[str], embedder: Embedder) -> list[float]:
    """Halfway between the question and the question with what came before: a follow-up finds what it hints at, and a
    change of subject still finds its own (docs/log.md)."""
    if not before:
        return embedder.embed_query(question)
    sum_ = np.sum(embedder.embed_documents([question, "\n".join([*before[-_BEFORE:], question])]), axis=0)
    return [float(value) for value in sum_ / np.linalg.norm(sum_)]


def join(
    chunks: Sequence[tuple[Chunk, float]], documents: Sequence[str], count_tokens: Callable[[str], int]
) -> list[Section]:
    """Join chunks that touch or overlap on a page, and put the sections in reading order. Pure."""
    order = {document: place for place, document in enumerate(documents)}
    sections: list[Section] = []
    for chunk, score in sorted(chunks, key=lambda pair: (order[pair[0].document], pair[0].page, pair[0].start)):
        last = sections[-1] if sections else None
        if last and (last.document, last.page) == (chunk.document, chunk.page) and chunk.start <= last.end + 1:
            gap = " " * (chunk.start - last.end)
            text = last.text + gap + chunk.text[max(0, last.end - chunk.start) :]
            sections[-1] = Section(
                chunk.document,
                chunk.page,
                last.start,
                max(last.end, chunk.end),
                text,
                max(last.score, score),
                count_tokens(text),
            )
        else:
            sections.append(
                Section(chunk.document, chunk.page, chunk.start, chunk.end, chunk.text, score, count_tokens(chunk.text))
            )
    return sections
