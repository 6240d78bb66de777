"""A user's own questions and documents as contexts of the quality run: LongBench v2, QASPER, JSON lines or CSV.

Everything that is read goes through `redact` before it is sent or reported: contexts, questions, choices and gold
strings alike. A name is recognised in a sentence more surely than alone, so what was replaced in a context is replaced
in its questions and gold strings, too. Messages name files, lines and keys, and never what a document says.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.prompt import Excerpt, Source
from eval.errors import BadUsage
from eval.tasks.task import Context, Question
from eval.tasks.words import Language
from ingest.redact import PLACEHOLDER

Redact = Callable[[str], str]

_CHOICES = ("A", "B", "C", "D")
_CHOOSE = 'Answer with "The correct answer is" and one letter.'
_ANSWER = 64
# Whole documents are fields; what is larger than this is no question about a document.
_LARGEST_FIELD = 2**26
_CHINESE = re.compile(r"[\u3400-\u9fff]")
# Between two placeholders; anything shorter may stand inside a value, too.
_TELLING = 4
_SHORTEST_BUCKET = 512


@dataclass(frozen=True, slots=True)
class Dataset:
    """A file's contexts; `licence` and `source` as the file or the user tells them; `skipped` did not fit a window."""

    name: str
    contexts: tuple[Context, ...]
    licence: str | None = None
    source: str | None = None
    skipped: int = 0


def read_dataset(
    path: Path, *, redact: Redact | None, licence: str | None = None, source: str | None = None
) -> Dataset:
    """Read a file; its format is told by its name and its keys.

    LongBench v2 has `_id, question, choice_A` to `choice_D, answer, context`; QASPER maps ids to papers with `title,
    full_text, qas`; the rest has `question`, `answer` or `answers` (a list; in CSV with `|` between), and `context` or
    `document`. Rows with the same context share it.

    Args:
        redact: takes personal data out; None only when the user wants the text as it is.
        licence: in the place of the file's own `licence` or `license`; `source` likewise.

    Raises:
        BadUsage: it cannot be read; the message has the file and the line.
    """
    where = _Where(path)
    records = list(_records(where, _text(where)))
    if not records:
        raise where.wrong(1, "it holds no question")
    # Questions repeat their context, and finding names in it takes seconds.
    clean = None if redact is None else lru_cache(maxsize=1024)(redact)
    contexts: dict[tuple[Source, ...], Context] = {}
    for line, record in records:
        try:
            read = _paper(record) if "qas" in record else _row(record)
        except _Wrong as error:
            raise where.wrong(line, str(error)) from error
        sources, questions = _redacted(read, clean)
        # `length` is set by `within`, which can count tokens.
        there = contexts.get(sources) or Context(
            f"{path.stem}-{len(contexts)}", path.stem, _language(sources), 0, sources, ()
        )
        contexts[sources] = replace(there, questions=(*there.questions, *questions))
    return Dataset(
        path.stem,
        tuple(contexts.values()),
        licence or _told(records, "licence", "license"),
        source or _told(records, "source"),
    )


def within(dataset: Dataset, window: int, count_prompt: Callable[[Sequence[Source], Question], int]) -> Dataset:
    """The contexts whose every prompt and answer fit the window, the others counted; none is cut.

    Raises:
        BadUsage: none fits.
    """
    kept = []
    for context in dataset.contexts:
        sizes = [(count_prompt(context.sources, question), question.max_tokens) for question in context.questions]
        if all(prompt + answer <= window for prompt, answer in sizes):
            longest = max(prompt for prompt, _ in sizes)
            # Buckets double, so that each holds some contexts.
            kept.append(replace(context, length=max(_SHORTEST_BUCKET, 1 << (longest - 1).bit_length())))
    if not kept:
        raise BadUsage(
            f"no context of {dataset.name!r} fits the window of {window:,} tokens; use a model with a larger"
        )
    return replace(dataset, contexts=tuple(kept), skipped=len(dataset.contexts) - len(kept))


class _Wrong(Exception):
    """What is wrong with a record."""


@dataclass(frozen=True, slots=True)
class _Where:
    path: Path

    def wrong(self, line: int, what: str) -> BadUsage:
        return BadUsage(f"line {line} of {str(self.path)!r}: {what}")


def _text(where: _Where) -> str:
    try:
        content = where.path.read_bytes()
    except OSError as error:
        raise BadUsage(f"the data set {str(where.path)!r} cannot be read ({error.strerror}); name a file") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise where.wrong(line, f"it is not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _records(where: _Where, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Lines, from 1, and what stands there."""
    if where.path.suffix.lower() == ".csv":
        yield from _csv(where, text)
        return
    found = _lines(where, text) if where.path.suffix.lower() == ".jsonl" else _entries(where, text)
    for line, record in found:
        if not isinstance(record, dict):
            raise where.wrong(line, f"it is a {type(record).__name__}; write an object with a question")
        yield line, record


def _lines(where: _Where, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise where.wrong(number, f"it is no JSON ({error}); write one object a line") from error


def _entries(where: _Where, text: str) -> Iterator[tuple[int, Any]]:
    """The entries of a list, or the values of an object by id, with the lines where they begin."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise where.wrong(error.lineno, f"it is no JSON ({error.msg}); name JSON lines .jsonl") from error
    if not isinstance(whole, list | dict):
        raise where.wrong(1, f"it holds a {type(whole).__name__}; write a list of objects, or papers by id")
    decoder = json.JSONDecoder()
    place = text.index("[" if isinstance(whole, list) else "{") + 1
    for _ in whole:
        if isinstance(whole, dict):
            _, place = decoder.raw_decode(text, _next(text, place))
        place = _next(text, place)
        line = text.count("\n", 0, place) + 1
        entry, place = decoder.raw_decode(text, place)
        yield line, entry


def _next(text: str, place: int) -> int:
    """Where the next value begins."""
    while text[place] in " \t\r\n,:":
        place += 1
    return place


def _csv(where: _Where, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    before = csv.field_size_limit(_LARGEST_FIELD)
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = set(rows.fieldnames or ())
        if "question" not in header or not header & {"answer", "answers"} or not header & {"context", "document"}:
            names = ", ".join(map(repr, rows.fieldnames or ())) or "nothing"
            raise where.wrong(1, f"the header has {names}; it needs 'question', 'answer' and 'context'")
        for row in rows:
            if None in row or None in row.values():
                raise where.wrong(rows.line_num, f"it has not the {len(header)} fields of the header")
            answers = row.get("answers") or ""
            yield rows.line_num, {**row, "answers": answers.split("|")} if answers else row
    except csv.Error as error:
        raise where.wrong(
            rows.line_num + 1, f"it is no CSV ({error}); quote fields with commas or line ends"
        ) from error
    finally:
        csv.field_size_limit(before)


@dataclass(frozen=True, slots=True)
class _Read:
    sources: tuple[Source, ...]
    questions: tuple[Question, ...]


def _row(record: Mapping[str, Any]) -> _Read:
    """A question with its own context."""
    key = "context" if "context" in record else "document"
    pages = _string(record, key).split("\f")
    sources = (Source("document", tuple(Excerpt(number, page) for number, page in enumerate(pages, start=1))),)
    text = _string(record, "question")
    if "choice_A" in record:
        answer = _string(record, "answer").strip().upper()
        if answer not in _CHOICES:
            raise _Wrong("'answer' is none of A, B, C and D")
        choices = "\n".join(f"({letter}) {_string(record, f'choice_{letter}')}" for letter in _CHOICES)
        asked = f"{text}\n{choices}\n{_CHOOSE}"
        return _Read(sources, (Question(asked, (answer,), "", _ANSWER, at_once=False, judged="letter"),))
    if "answers" in record:
        answers = record["answers"]
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
            raise _Wrong("'answers' is no list of strings with text")
    else:
        answers = [_string(record, "answer")]
    return _Read(sources, (_question(text, [(answer,) for answer in answers]),))


def _paper(record: Mapping[str, Any]) -> _Read:
    """A QASPER paper: each section an excerpt, each annotator's answer one that will do."""
    try:
        sections = [
            "\n\n".join([section["section_name"] or "", *section["paragraphs"]]).strip()
            for section in record["full_text"]
        ]
        asked = [(qa["question"], [one["answer"] for one in qa["answers"]]) for qa in record["qas"]]
        questions = [_question(text, [_annotated(answer) for answer in answers]) for text, answers in asked]
        title = record["title"] or "document"
    except KeyError as error:
        raise _Wrong(f"the paper lacks the key {error.args[0]!r}") from error
    except (TypeError, AttributeError) as error:
        raise _Wrong("the paper is not built as QASPER's are; see its 'full_text' and 'qas'") from error
    if not any(sections) or not questions:
        raise _Wrong("the paper has no text or no question")
    excerpts = tuple(Excerpt(number, text) for number, text in enumerate(filter(None, sections), start=1))
    return _Read((Source(title, excerpts),), tuple(questions))


def _annotated(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """The strings of one annotator's answer, all of which are wanted; none when the paper does not say."""
    if answer["unanswerable"]:
        return ()
    if answer["yes_no"] is not None:
        return ("Yes" if answer["yes_no"] else "No",)
    return tuple(answer["extractive_spans"]) or (str(answer["free_form_answer"]),)


def _question(text: str, golds: Sequence[tuple[str, ...]]) -> Question:
    """A question to which any of several answers will do; where none is known, a refusal is right."""
    if not text.strip() or not golds:
        raise _Wrong("a question has no text or no answer")
    told = [gold for gold in golds if any(part.strip() for part in gold)]
    if not told:
        return Question(text, ("unanswerable",), "", _ANSWER, at_once=False, judged="refusal")
    return Question(text, told[0], "", _ANSWER, at_once=False, others=tuple(told[1:]))


def _string(record: Mapping[str, Any], key: str) -> str:
    if key not in record:
        raise _Wrong(f"it lacks the key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        raise _Wrong(f"{key!r} is empty or no string")
    return value


def _redacted(read: _Read, redact: Redact | None) -> tuple[tuple[Source, ...], tuple[Question, ...]]:
    if redact is None:
        return read.sources, read.questions
    known: dict[str, str] = {}

    def clean(text: str) -> str:
        redacted = redact(text)
        known.update(_replaced(text, redacted))
        return redacted

    sources = tuple(
        replace(
            source,
            name=clean(source.name),
            excerpts=tuple(replace(excerpt, text=clean(excerpt.text)) for excerpt in source.excerpts),
        )
        for source in read.sources
    )

    def again(text: str) -> str:
        # Longest first: a name is part of a longer one.
        for value in sorted(known, key=len, reverse=True):
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", known[value], text, flags=re.IGNORECASE)
        return redact(text)

    questions = tuple(
        replace(
            question,
            text=again(question.text),
            gold=tuple(map(again, question.gold)),
            others=tuple(tuple(map(again, gold)) for gold in question.others),
        )
        if question.judged == "words"
        else replace(question, text=again(question.text))
        for question in read.questions
    )
    return sources, questions


def _replaced(text: str, redacted: str) -> dict[str, str]:
    """Values and their placeholders, found by what stands between these; where that is too little, none is told."""
    between = PLACEHOLDER.split(redacted)
    place = len(between[0])
    values: dict[str, str] = {}
    for left, (placeholder, after) in enumerate(zip(PLACEHOLDER.findall(redacted), between[1:], strict=True), start=2):
        last = left == len(between)
        end = len(text) - len(after) if last else text.find(after, place)
        if end < place or (len(after) < _TELLING and not last):
            break
        if value := text[place:end].strip():
            values[value] = placeholder
        place = end + len(after)
    return values


def _language(sources: Sequence[Source]) -> Language:
    text = "".join(excerpt.text for source in sources for excerpt in source.excerpts)
    return "zh" if 4 * len(_CHINESE.findall(text)) > len(text) else "en"


def _told(records: Sequence[tuple[int, Mapping[str, Any]]], *keys: str) -> str | None:
    """What the records tell under one of the keys, each once."""
    told = dict.fromkeys(str(record[key]) for _, record in records for key in keys if record.get(key))
    return "; ".join(told) or None
