"""What volumes bring, measured on a running service with the scripted engine."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from eval.asking import Answered
from eval.cli import cli
from eval.errors import BadUsage, NotMeasured
from eval.facts import Fact
from eval.results import Results
from eval.tables import volumes_table
from eval.tasks.handbook import Handbook, handbook
from eval.volumes import Asked, Volumes, compare, measure_volumes
from tests.conftest import Service

SILENT = "The documents do not say."


def answered(
    right: float = 1.0, ttft: float | None = 1.0, *, volume: int | None = None, path: str = "exact"
) -> Answered:
    mode = "retrieve" if volume is None else "volume"
    return Answered("text", right, right == 1, right > 0, mode, volume, path, 1000, 900, ttft)


def served(page: int, *, right: float = 1.0, ttft: float | None = 0.1, filled: float | None = 2.0) -> Asked:
    warm = answered(right, ttft, volume=1, path="warm")
    return Asked(Fact("?", ("!",), page), warm, answered(0.0), answered(ttft=filled, path="sparse"))


def test_answers_are_compared() -> None:
    unserved = Asked(Fact("?", ("!",), 9), answered(0.0, 9.0), answered(1.0, 9.0), None)
    found = compare([served(1), served(2, ttft=0.2, filled=4.0), served(3, ttft=None), unserved], seed=0)
    assert (found.asked, found.served) == (4, 3)
    auto, retrieve, filled = found.ways
    assert (auto.name, auto.n, auto.held, auto.right, auto.cited) == ("auto", 4, 0.75, 0.75, 0.75)
    assert auto.paths == {"exact": 1, "warm": 3}
    # Times are those of the questions that a volume answered.
    assert auto.ttft == pytest.approx(0.15)
    assert (retrieve.n, retrieve.right, retrieve.ttft, retrieve.paths) == (4, 0.25, 1.0, {"exact": 4})
    assert (filled.n, filled.right, filled.ttft, filled.paths) == (3, 1.0, 2.0, {"sparse": 3})
    assert (found.right.estimate, found.cited.estimate, found.right.n) == (0.5, 0.5, 4)
    assert found.ttft is not None
    assert found.ttft.estimate == pytest.approx(0.05)
    assert found.ttft.n == 2


def test_where_no_volume_answers_there_is_no_time_to_compare() -> None:
    found = compare([Asked(Fact("?", ("!",), 9), answered(), answered(), None)], seed=0)
    assert (found.served, found.ttft, [way.name for way in found.ways]) == (0, None, ["auto", "retrieve"])
    assert [way.ttft for way in found.ways] == [None, None]
    table = volumes_table(Volumes(300, 100_000, 20, 3, 60.0, 1, found))
    assert "3 of 20 volumes warm after 60 s; 1 questions, 1 left out" in table
    assert "answered from a warm volume: 0 of 1 (0%)" in table
    assert table.endswith("TTFT, auto over filled: -")


@pytest.fixture(scope="module")
def book() -> Handbook:
    return handbook(Random(4), "en", pages=12, facts=3)


@pytest.fixture
def eager(service: Service) -> Iterator[Service]:
    """Documents are read when they arrive, into a window of a few pages."""
    service.services.warmer._enabled = True
    with service.scripted(window=4096, kv_windows=32):
        yield service
    service.services.warmer._enabled = False


async def _measure(service: Service, name: str, data: str, facts: list[Fact], results: Results) -> tuple[Volumes, int]:
    steps: list[None] = []
    measured = await measure_volumes(
        service.services,
        name,
        data.encode(),
        facts,
        wait=20,
        seed=0,
        results=results,
        say=lambda _: None,
        step=lambda: steps.append(None),
    )
    return measured, len(steps)


async def test_a_document_is_asked_three_ways(
    eager: Service, book: Handbook, results: Results, lines: io.StringIO
) -> None:
    eager.engine.enqueue("What is slow once.")
    for fact in book.facts:
        eager.engine.enqueue(f"It is {fact.gold[0]}.")
        eager.engine.enqueue(SILENT)
        eager.engine.enqueue(f"It is not {fact.gold[0]}5.")
    absent = Fact("Who?", ("nobody at all",), 12)
    facts = [*book.facts, absent]
    measured, steps = await _measure(eager, "handbook.txt", "\f".join(book.pages), facts, results)
    assert (measured.pages, measured.left_out, steps) == (12, 1, 3)
    assert measured.warm == measured.volumes > 2
    found = measured.comparison
    assert (found.asked, found.served) == (3, 3)
    auto, retrieve, filled = found.ways
    assert (auto.held, auto.right, auto.cited, auto.paths) == (1.0, 1.0, 1.0, {"warm": 3})
    assert (retrieve.held, retrieve.right, retrieve.cited, retrieve.paths) == (2 / 3, 0.0, 0.0, {"exact": 3})
    assert (filled.right, filled.paths) == (0.0, {"exact": 3})
    assert auto.prompt_tokens is not None
    assert retrieve.prompt_tokens is not None
    assert filled.prompt_tokens is not None
    assert abs(filled.prompt_tokens - auto.prompt_tokens) < 0.05 * auto.prompt_tokens
    assert retrieve.prompt_tokens < auto.prompt_tokens / 3
    assert auto.computed_tokens is not None
    assert auto.computed_tokens < 400
    written = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["kind"] for line in written] == ["question"] * 3
    assert [line["fact"]["page"] for line in written] == [fact.page for fact in book.facts]
    assert written[0]["auto"]["text"] == f"It is {book.facts[0].gold[0]}."


async def test_a_document_that_fits_the_window_has_no_volumes(eager: Service, results: Results) -> None:
    with pytest.raises(BadUsage, match=r"'short\.txt' has 3 tokens and no volumes in the window of 4,096"):
        await _measure(eager, "short.txt", "Pumps leak", [Fact("What leaks?", ("pumps",), 1)], results)


async def test_a_document_without_any_answer_is_told(eager: Service, results: Results) -> None:
    with pytest.raises(NotMeasured, match="no page holds"):
        await _measure(eager, "other.txt", "Valves leak", [Fact("What leaks?", ("pumps",), 1)], results)


async def test_a_file_of_another_kind_is_told(eager: Service, results: Results) -> None:
    with pytest.raises(BadUsage, match=r"not taken: 'picture\.png' is not of a supported type"):
        await _measure(eager, "picture.png", "text", [Fact("What leaks?", ("pumps",), 1)], results)


async def test_a_fact_on_a_page_that_does_not_exist_is_one_sentence_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREWORD_ENGINE", "scripted")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("Pumps leak.\fValves do not.")
    (tmp_path / "facts.jsonl").write_text('{"question": "What leaks?", "gold": ["pumps"], "page": 3}\n')
    command = "volumes --file report.txt --facts facts.jsonl".split()
    result = await asyncio.to_thread(CliRunner().invoke, cli, command)
    assert result.exit_code == 2, result.output
    assert "'What leaks?' is to be on page 3, and 'report.txt' has 2 pages" in result.stderr
    assert "Traceback" not in result.stderr
