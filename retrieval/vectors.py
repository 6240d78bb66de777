"""The vectors of all chunks, in Chroma through LangChain. One process owns the folder."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest
from pathlib import Path, PurePath

import chromadb
from chromadb.api import ClientAPI
from chromadb.config import Settings
from chromadb.errors import ChromaError
from langchain_chroma import Chroma

from retrieval.embed import Embedder
from retrieval.errors import ReindexNeeded, StorageFailed
from retrieval.passage import Chunk, Hit

_COLLECTION = "chunks"
_FINGERPRINT = "embedding_fingerprint"
# Chroma's SQLite takes no more than 32,766 values in a statement, a few of them Chroma's own.
_DOCUMENTS_AT_ONCE = 10_000


class Vectors:
    """Adds, searches and deletes chunks by document; StorageFailed is raised when the folder fails meanwhile."""

    def __init__(self, folder: Path, embedder: Embedder) -> None:
        """Open the folder.

        Raises:
            ReindexNeeded: the folder's vectors were made by another embedding model.
            StorageFailed: the folder cannot be opened.
        """
        settings = Settings(anonymized_telemetry=False, is_persistent=True, persist_directory=str(folder))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._embedder = embedder
            self._client = chromadb.PersistentClient(str(folder), settings)
            # Chroma keeps the metadata of the first time; it cannot be given again.
            _refuse_other_model(self._client, embedder.fingerprint)
            self._store = Chroma(
                collection_name=_COLLECTION,
                client=self._client,
                embedding_function=embedder,
                collection_metadata={"hnsw:space": "cosine", _FINGERPRINT: embedder.fingerprint},
            )
        except (ChromaError, OSError, ValueError, RuntimeError) as error:
            raise StorageFailed(f"the vector store in {str(folder)!r} cannot be opened: {error}") from error

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Embed and store chunks of one document; a chunk that is there already is replaced."""
        vectors: list[Sequence[float]] = [*self._embedder.embed_documents([chunk.text for chunk in chunks])]
        with _translated(), _cleared_memory():
            self._client.get_collection(_COLLECTION).upsert(
                ids=[f"{chunk.document}:{chunk.number}" for chunk in chunks],
                embeddings=vectors,
                metadatas=[{"document": chunk.document, "number": chunk.number} for chunk in chunks],
                # The text is read from the catalogue, and Chroma's files would keep it after a deletion; LangChain
                # leaves out what has none.
                documents=[""] * len(chunks),
            )

    def search(self, vector: list[float], documents: Sequence[str], limit: int) -> list[Hit]:
        """The chunks of these documents nearest to a unit vector, best first."""
        batches = [documents[n : n + _DOCUMENTS_AT_ONCE] for n in range(0, len(documents), _DOCUMENTS_AT_ONCE)]
        hits = [hit for batch in batches for hit in self._nearest(vector, batch, limit)]
        return nlargest(limit, hits, key=lambda hit: hit.score)

    def _nearest(self, vector: list[float], documents: Sequence[str], limit: int) -> list[Hit]:
        with _translated():
            found = self._store.similarity_search_by_vector_with_relevance_scores(
                vector,
                k=limit,
                filter={"document": {"$in": list(documents)}},
            )
        # The collection measures cosine distance; LangChain hands it on as it is.
        return [Hit(item.metadata["document"], item.metadata["number"], 1.0 - distance) for item, distance in found]

    def delete(self, document: str) -> None:
        """Remove all chunks of a document."""
        with _translated():
            self._client.get_collection(_COLLECTION).delete(where={"document": document})

    def count(self, document: str | None = None) -> int:
        """How many chunks are stored, in all or of one document."""
        with _translated():
            collection = self._client.get_collection(_COLLECTION)
            if document is None:
                return collection.count()
            return len(collection.get(where={"document": document}, include=[])["ids"])

    def close(self) -> None:
        """Release the folder."""
        self._client.close()  # type: ignore[attr-defined]


@contextmanager
def _cleared_memory() -> Iterator[None]:
    """Memory that is allocated meanwhile is zero: Chroma's index writes what it has not filled yet to its files.

    There it would keep whatever text this process had in that memory before. Elsewhere than with glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    # M_PERTURB (mallopt(3)): fresh memory is filled with the complement of this byte.
    mallopt(-6, 0xFF)
    try:
        yield
    finally:
        mallopt(-6, 0)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (ChromaError, OSError) as error:
        raise StorageFailed(f"the vector store cannot be read or written: {error}") from error


def _refuse_other_model(client: ClientAPI, fingerprint: str) -> None:
    names = [collection.name for collection in client.list_collections()]
    if _COLLECTION not in names:
        return
    collection = client.get_collection(_COLLECTION)
    metadata = collection.metadata or {}
    # Version 0.1.0 kept no more than the last part of a model's name.
    stored, wanted = (
        (metadata[_FINGERPRINT], fingerprint)
        if _FINGERPRINT in metadata
        else (metadata.get("embedding_model"), PurePath(fingerprint).name)
    )
    if stored == wanted:
        return
    if collection.count() == 0:
        # A wrong setting may have made it, and must not bind the folder.
        client.delete_collection(_COLLECTION)
        return
    raise ReindexNeeded(
        f"the stored vectors were made by {stored!r}, but the embedding model is now {fingerprint!r}; "
        "set FOREWORD_EMBEDDING_MODEL back, or use another FOREWORD_DATA_DIR and ingest the documents again"
    )
