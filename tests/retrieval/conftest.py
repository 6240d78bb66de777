"""The real embedding model, loaded once, and stores in empty folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from retrieval.catalogue import Catalogue
from retrieval.embed import Embedder
from retrieval.vectors import Vectors

# The same examples in every run, and no failures on a machine that is merely slow.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    """The real MiniLM."""
    return Embedder()


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'catalogue.sqlite3'}")
    yield catalogue
    catalogue.close()


@pytest.fixture
def vectors(tmp_path: Path, embedder: Embedder) -> Iterator[Vectors]:
    vectors = Vectors(tmp_path / "vectors", embedder)
    yield vectors
    vectors.close()
