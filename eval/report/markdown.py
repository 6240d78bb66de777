"""The report as GitHub-flavoured Markdown, without its charts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.report.content import Chart, Part, Points, Section, Table

# What GitHub would read as more than itself, of brackets those of links only; angle brackets and ampersands become
# entities.
_MARKS = re.compile(r"[\\`*_~|$#]|\](?=[(\[:])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """The whole file; what comes from answers and documents is escaped."""
    blocks = [f"# {_escaped(title)}"]
    for section in sections:
        blocks.append(f"## {_escaped(section.title)}")
        blocks += [_block(part) for part in section.parts if not isinstance(part, Chart)]
    return "\n\n".join(blocks) + "\n"


def _block(part: Part) -> str:
    if isinstance(part, Table):
        sides = ["---" if head in part.words else "---:" for head in part.heads]
        return "\n".join(
            map(_row, [[*map(_escaped, part.heads)], sides, *([*map(_escaped, row)] for row in part.rows)])
        )
    if isinstance(part, Points):
        return "\n".join(f"- {_escaped(item)}" for item in part.items)
    return _escaped(str(part))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text that stays what it is, on one line, in a cell, too."""
    lines = (_MARKS.sub(r"\\\g<0>", line.translate(_ENTITIES)) for line in text.split("\n"))
    return "<br>".join(line.strip() for line in lines)
