"""A user's own data: every format, every way in which a file can be wrong, and what redaction does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import eval.datasets
from eval.arms import parse_arms
from eval.datasets import Dataset, Redact, read_dataset, within
from eval.errors import BadUsage
from eval.measures import contains
from eval.quality import load_suite, run_quality
from eval.results import Results
from serving.scripted_engine import Script
from tests.eval.reading_engine import opener

PLAIN = {"question": "Which locker?", "answer": "47", "context": "The key is in locker 47."}
CHOICE = {
    "_id": "x1",
    "question": "Who keeps the key?",
    **{f"choice_{letter}": name for letter, name in zip("ABCD", ("Ann", "Bob", "Cy", "Di"), strict=True)},
    "answer": "B",
    "context": "Bob keeps the key.",
}


def annotated(**given: Any) -> dict[str, Any]:
    return {"answer": {"free_form_answer": "", "extractive_spans": [], "yes_no": None, "unanswerable": False, **given}}


PAPER = {
    "title": "On keys",
    "full_text": [
        {"section_name": "Introduction", "paragraphs": ["Keys are old.", "Locks are older."]},
        {"section_name": None, "paragraphs": ["They rust."]},
    ],
    "qas": [
        {
            "question": "What is old?",
            "answers": [annotated(extractive_spans=["Keys", "Locks"]), annotated(free_form_answer="keys")],
        },
        {"question": "Do they rust?", "answers": [annotated(yes_no=True), annotated(unanswerable=True)]},
        {"question": "Who paid?", "answers": [annotated(unanswerable=True)]},
    ],
}


def written(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def read(folder: Path, name: str, content: str | bytes, redact: Redact | None = None) -> Dataset:
    return read_dataset(written(folder, name, content), redact=redact)


def test_lines_that_share_a_context_share_it(tmp_path: Path) -> None:
    other = {"question": "What is there?", "answers": ["the key", "a key"], "document": PLAIN["context"], "source": "s"}
    lines = "\n".join(json.dumps({**one, "licence": "CC0"}) for one in (PLAIN, other))
    data = read(tmp_path, "mine.jsonl", f"\ufeff{lines}\n\n")
    assert (data.name, data.licence, data.source) == ("mine", "CC0", "s")
    [context] = data.contexts
    assert (context.id, context.language) == ("mine-0", "en")
    first, second = context.questions
    assert (first.gold, first.others, first.lead) == (("47",), (), "")
    assert (second.gold, second.others) == (("the key",), (("a key",),))


def test_csv(tmp_path: Path) -> None:
    data = read(tmp_path, "mine.csv", 'question,answers,context\n"Which, then?",47|48,"第一页。\f第二页。"\n')
    [context] = data.contexts
    assert context.language == "zh"
    assert [excerpt.page for excerpt in context.sources[0].excerpts] == [1, 2]
    assert (context.questions[0].gold, context.questions[0].others) == (("47",), (("48",),))


@pytest.mark.parametrize("lines", [False, True])
def test_longbench(lines: bool, tmp_path: Path) -> None:
    content = json.dumps(CHOICE) if lines else json.dumps([CHOICE], indent=1)
    [context] = read(tmp_path, "lb.jsonl" if lines else "lb.json", content).contexts
    [question] = context.questions
    assert (question.gold, question.judged) == (("B",), "letter")
    assert "(A) Ann\n(B) Bob\n(C) Cy\n(D) Di" in question.text


def test_qasper(tmp_path: Path) -> None:
    [context] = read(tmp_path, "papers.json", json.dumps({"1": PAPER})).contexts
    [source] = context.sources
    assert (source.name, [excerpt.page for excerpt in source.excerpts]) == ("On keys", [1, 2])
    spans, yes, unknown = context.questions
    assert (spans.gold, spans.others) == (("Keys", "Locks"), (("keys",),))
    assert (yes.gold, yes.others) == (("Yes",), ())
    assert unknown.judged == "refusal"


def test_what_the_user_says_of_licence_and_source_stands(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", json.dumps({**PLAIN, "license": "MIT"}))
    data = read_dataset(file, redact=None, licence="CC0", source="here")
    assert (data.licence, data.source) == ("CC0", "here")


LINE = json.dumps(PLAIN)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        pytest.param("a.jsonl", f"{LINE}\n{{", "line 2 of .*no JSON", id="bad line"),
        pytest.param("a.jsonl", f"{LINE}\n[1]", "line 2 of .*it is a list", id="no object"),
        pytest.param("a.jsonl", '{"question": "q", "answer": "a"}', "line 1 .*lacks the key 'document'", id="no key"),
        pytest.param("a.jsonl", json.dumps({**PLAIN, "answer": " "}), "'answer' is empty", id="empty answer"),
        pytest.param("a.jsonl", json.dumps({**PLAIN, "answers": []}), "'answers' is no list", id="no answers"),
        pytest.param("a.jsonl", json.dumps({**CHOICE, "answer": "E"}), "none of A, B, C and D", id="no letter"),
        pytest.param("a.jsonl", "\n", "line 1 .*holds no question", id="empty"),
        pytest.param("a.jsonl", f"{LINE}\n".encode() + b"\xff", "line 2 of .*not UTF-8", id="encoding"),
        pytest.param("a.json", '[\n{"a": 1},\n]', "line 3 of .*no JSON", id="bad JSON"),
        pytest.param("a.json", f'[\n{LINE},\n\n{{"question": "q"}}]', "line 4 of .*lacks the key", id="entry"),
        pytest.param("a.json", "7", "it holds a int", id="no list"),
        pytest.param("a.json", '{\n"1":\n{"qas": []}}', "line 3 of .*lacks the key 'full_text'", id="paper"),
        pytest.param(
            "a.json", json.dumps({"1": {**PAPER, "full_text": 7}}), "not built as QASPER's", id="strange paper"
        ),
        pytest.param("a.json", json.dumps({"1": {**PAPER, "qas": []}}), "no text or no question", id="empty paper"),
        pytest.param("a.csv", "q,answer,context\n", "line 1 .*header has 'q', 'answer', 'context'", id="header"),
        pytest.param("a.csv", "question,answer,context\nq,a,c\nq,a\n", "line 3 .*not the 3 fields", id="fields"),
        pytest.param("a.csv", 'question,answer,context\nq,a,"c', "line 2 .*no CSV", id="quote"),
        pytest.param("a.csv", f"question,answer,context\nq,a,{'c' * 300}", "line 2 .*no CSV .*limit", id="huge"),
        pytest.param("a.csv", "", "line 1 .*the header has nothing", id="empty CSV"),
    ],
)
def test_wrong_files_are_told(
    name: str, content: str | bytes, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval.datasets, "_LARGEST_FIELD", 200)
    with pytest.raises(BadUsage, match=told) as raised:
        read(tmp_path, name, content)
    assert name in str(raised.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="cannot be read"):
        read_dataset(tmp_path / "none.jsonl", redact=None)


def redact(text: str) -> str:
    """Knows the name in a sentence only, as recognisers do."""
    return text.replace("Ann Lee", "<PERSON_3f9a1c>") if "keeps" in text else text


def test_everything_is_redacted_alike(tmp_path: Path) -> None:
    line = {
        "question": "What is ann lee's key?",
        "answers": ["Ann Lee", "by Ann Lee"],
        "context": "So Ann Lee keeps it.",
    }
    choice = {**CHOICE, "choice_A": "Ann Lee", "context": "Here Ann Lee keeps it."}
    data = read(tmp_path, "a.jsonl", f"{json.dumps(line)}\n{json.dumps(choice)}", redact)
    plain, letters = data.contexts
    assert plain.sources[0].excerpts[0].text == "So <PERSON_3f9a1c> keeps it."
    [question] = plain.questions
    assert question.text == "What is <PERSON_3f9a1c>'s key?"
    assert (question.gold, question.others) == (("<PERSON_3f9a1c>",), (("by <PERSON_3f9a1c>",),))
    assert contains("It is <PERSON_3f9a1c>.", question.gold) == 1
    assert "Ann Lee" not in letters.questions[0].text
    assert letters.questions[0].gold == ("B",)


def test_what_does_not_fit_is_counted_and_not_cut(tmp_path: Path) -> None:
    longer = {**PLAIN, "context": "word " * 900}
    data = read(tmp_path, "a.jsonl", f"{LINE}\n{json.dumps(longer)}")
    fitting = within(data, 1000, lambda sources, _: len(sources[0].excerpts[0].text.split()) + 50)
    assert (len(fitting.contexts), fitting.skipped, fitting.contexts[0].length) == (1, 1, 512)
    with pytest.raises(BadUsage, match="no context of 'a' fits the window of 10 tokens"):
        within(data, 10, lambda *_: 11)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("The correct answer is (B).", 1), ("B", 1), ("(B) Bob", 1), ("A. Ann", 0), ("Bob", 0), ("A bob", 0)],
)
async def test_letters_are_scored(answer: str, score: float, tmp_path: Path, results: Results) -> None:
    assert await scored(json.dumps(CHOICE), answer, tmp_path, results) == [score]


@pytest.mark.parametrize(
    ("answer", "scores"),
    [("keys", [1, 0, 0]), ("Locks.", [0.5, 0, 0]), ("Yes", [0, 1, 0]), ("The documents do not say.", [0, 0, 1])],
)
async def test_any_annotator_will_do(answer: str, scores: list[float], tmp_path: Path, results: Results) -> None:
    assert await scored(json.dumps({"1": PAPER}), answer, tmp_path, results) == scores


async def scored(content: str, answer: str, folder: Path, results: Results) -> list[float]:
    data = read(folder, "a.json", content if content.startswith('{"1"') else f"[{content}]")
    long = {**PLAIN, "context": "word " * 9000}
    too_long = read(folder, "b.jsonl", json.dumps(long)).contexts
    own = Dataset(data.name, (*data.contexts, *too_long))
    report = await run_quality(
        parse_arms("exact"),
        load_suite("quick"),
        opener(Script(), answer=answer),
        seed=0,
        results=results,
        step=lambda: None,
        own=own,
    )
    assert report.skipped == ("1 of the contexts of 'a' are longer than the window",)
    assert not report.failures
    return [one.score for one in report.answers]
