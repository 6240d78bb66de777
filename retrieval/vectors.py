"""The vectors of all chunks, in Chroma through LangChain. One process owns the folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import chromadb
from chromadb.api import ClientAPI
from chromadb.config import Settings
from chromadb.errors import ChromaError
from langchain_chroma import Chroma

from retrieval.embed import Embedder
from retrieval.errors import ReindexNeeded, StorageFailed
from retrieval.passage import Chunk, Hit

_COLLECTION = "chunks"


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
            self._client = chromadb.PersistentClient(str(folder), settings)
            # Chroma keeps the metadata of the first time; it cannot be given again.
            _refuse_other_model(self._client, embedder.fingerprint)
            self._store = Chroma(
                collection_name=_COLLECTION,
                client=self._client,
                embedding_function=embedder,
                collection_metadata={"hnsw:space": "cosine", "embedding_model": embedder.fingerprint},
            )
        except (ChromaError, OSError, ValueError, RuntimeError) as error:
            raise StorageFailed(f"the vector store in {str(folder)!r} cannot be opened: {error}") from error

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Embed and store chunks of one document; a chunk that is there already is replaced."""
        with _translated():
            self._store.add_texts(
                texts=[chunk.text for chunk in chunks],
                metadatas=[{"document": chunk.document, "number": chunk.number} for chunk in chunks],
                ids=[f"{chunk.document}:{chunk.number}" for chunk in chunks],
            )

    def search(self, vector: list[float], documents: Sequence[str], limit: int) -> list[Hit]:
        """The chunks of these documents nearest to a unit vector, best first."""
        if not documents:  # Chroma takes no empty list
            return []
        with _translated():
            found = self._store.similarity_search_by_vector_with_relevance_scores(
                vector, k=limit, filter={"document": {"$in": list(documents)}}
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
def _translated() -> Iterator[None]:
    try:
        yield
    except (ChromaError, OSError) as error:
        raise StorageFailed(f"the vector store cannot be read or written: {error}") from error


def _refuse_other_model(client: ClientAPI, fingerprint: str) -> None:
    names = [collection.name for collection in client.list_collections()]
    if _COLLECTION not in names:
        return
    stored = (client.get_collection(_COLLECTION).metadata or {}).get("embedding_model")
    if stored != fingerprint:
        raise ReindexNeeded(
            f"the stored vectors were made by {stored!r}, but the embedding model is now {fingerprint!r}; "
            "set FOREWORD_EMBEDDING_MODEL back, or use another FOREWORD_DATA_DIR and ingest the documents again"
        )
