"""Results files in memory."""

from __future__ import annotations

import io

import pytest

from eval.results import Results


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def results(lines: io.StringIO) -> Results:
    return Results(lines)
