"""Facts of a file, and of generated handbooks."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from app.volumes import headings
from eval.errors import BadUsage
from eval.facts import Fact, read_facts
from eval.measures import contains
from eval.tasks.handbook import Handbook, handbook, most_facts
from eval.tasks.words import Language
from ingest.chunk import paginate
from ingest.extract import Page
from retrieval.catalogue import StoredPage

GOOD = {"question": "Where?", "gold": ["here", "there"], "page": 7}


def test_facts_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text(f'{json.dumps(GOOD)}\n\n{{"question": "谁?", "gold": ["王"], "page": 1}}\n', "utf-8")
    assert read_facts(file) == [Fact("Where?", ("here", "there"), 7), Fact("谁?", ("王",), 1)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        pytest.param("Where? here", "is no JSON", id="no JSON"),
        pytest.param("[1]", "it is [1]", id="no object"),
        pytest.param(json.dumps(GOOD | {"page": 0}), "page is 0: Input should be greater", id="page"),
        pytest.param(
            json.dumps(GOOD | {"page": "7"}), "page is '7': Input should be a valid integer", id="page's type"
        ),
        pytest.param(json.dumps(GOOD | {"gold": "here"}), "gold is 'here': Input should be a valid list", id="gold"),
        pytest.param(json.dumps(GOOD | {"gold": []}), "gold is []", id="no gold"),
        pytest.param(json.dumps(GOOD | {"gold": [" "]}), "empty question or an empty gold string", id="empty gold"),
        pytest.param(json.dumps(GOOD | {"answer": "here"}), "answer is 'here': Extra inputs", id="unknown field"),
        pytest.param('{"question": "Where?", "page": 7}', "gold is {", id="missing field"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(BadUsage) as error:
        read_facts(file)
    assert "line 2 of " in str(error.value)
    assert told in str(error.value)


def test_facts_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="cannot be read"):
        read_facts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BadUsage, match="hold no line"):
        read_facts(tmp_path / "empty.jsonl")


def made(language: Language, seed: int = 0, pages: int = 60) -> Handbook:
    return handbook(Random(seed), language, pages=pages, facts=20)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_handbook_tells_each_fact_once_on_its_page(language: Language) -> None:
    book = made(language)
    assert len(book.pages) == 60
    assert len({fact.page for fact in book.facts}) == len({fact.question for fact in book.facts}) == 20
    for fact in book.facts:
        assert contains(book.pages[fact.page - 1], fact.gold) == 1
        assert contains(fact.question, fact.gold) == 0
    codes = [fact for fact in book.facts if len(fact.gold[0]) == 5 and fact.gold[0].isdigit()]
    assert codes
    for fact in codes:
        assert [n for n, page in enumerate(book.pages, start=1) if fact.gold[0] in page] == [fact.page]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pages_of_a_handbook_stay_as_they_are_and_have_an_outline(language: Language) -> None:
    book = made(language)
    pages = [Page(n, str(n), text) for n, text in enumerate(book.pages, start=1)]
    assert [page.text for page in paginate(pages)] == list(book.pages)
    found = headings([StoredPage("d", page.number, page.label, page.text, 1) for page in pages])
    chapters = [heading for heading in found if heading.level == 1]
    sections = [heading for heading in found if heading.level == 2]
    assert (chapters[0].page, chapters[0].title.split()[0]) == (1, "1")
    assert len(chapters) * 2 < len(sections)
    assert all(heading.top for heading in found)


def test_a_seed_decides_a_handbook() -> None:
    assert made("en", seed=1) == made("en", seed=1)
    assert made("en", seed=1) != made("en", seed=2)


def test_a_handbook_has_room_for_a_fact_on_every_other_page() -> None:
    assert (most_facts(20), most_facts(10_000)) == (10, 48)
    assert len(handbook(Random(0), "en", pages=96, facts=48).facts) == 48
