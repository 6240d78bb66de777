"""What can be asked of a document, and which of its pages answers: read from a file, or generated (tasks/handbook)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eval.errors import BadUsage


@dataclass(frozen=True, slots=True)
class Fact:
    """A question, the strings that a right answer contains, all of them, and the page (from 1) that says so."""

    question: str
    gold: tuple[str, ...]
    page: int


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    question: str = Field(min_length=1)
    gold: list[str] = Field(min_length=1)
    page: int = Field(ge=1)


def read_facts(path: Path) -> list[Fact]:
    """Facts of a file of JSON lines such as `{"question": "...", "gold": ["..."], "page": 7}`.

    Raises:
        BadUsage: it cannot be read, has no line, or a wrong one.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(f"the facts {str(path)!r} cannot be read ({error}); give a file of JSON lines") from error
    facts = [_fact(line, f"line {n} of {str(path)!r}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not facts:
        raise BadUsage(f"the facts {str(path)!r} hold no line; write one question a line")
    return facts


def _fact(line: str, where: str) -> Fact:
    try:
        read = _Line.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "it"
        raise BadUsage(f"{where}: {name} is {first['input']!r}: {first['msg']}") from error
    except ValueError as error:
        raise BadUsage(
            f'{where} is no JSON ({error}); write {{"question": "...", "gold": ["..."], "page": 7}}'
        ) from error
    if not all(text.strip() for text in (read.question, *read.gold)):
        raise BadUsage(f"{where} has an empty question or an empty gold string")
    return Fact(read.question, tuple(read.gold), read.page)
