"""The report as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from eval.report.content import Chart, Part, Points, Section, Table

_STYLE = Path(__file__).with_name("report.css")


def to_html(title: str, sections: Sequence[Section]) -> str:
    """The whole file; what comes from answers and documents is escaped."""
    body = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE.read_text('utf-8')}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    name = section.title.lower().replace(" ", "-")
    parts = "\n".join(_part(part) for part in section.parts)
    return f'<section id="{escape(name)}">\n<h2>{escape(section.title)}</h2>\n{parts}\n</section>'


def _part(part: Part) -> str:
    if isinstance(part, Table):
        heads = "".join(f"<th{_kind(part, head)}>{escape(head)}</th>" for head in part.heads)
        rows = "\n".join(f"<tr>{_cells(part, row)}</tr>" for row in part.rows)
        # Wide tables scroll in a box of their own, with the keyboard, too.
        return (
            f'<div class="box" tabindex="0"><table>\n<thead><tr>{heads}</tr></thead>\n'
            f"<tbody>\n{rows}\n</tbody>\n</table></div>"
        )
    if isinstance(part, Chart):
        caption = f"<figcaption>{escape(part.caption)}</figcaption>"
        return f'<figure><div class="box" tabindex="0">{part.svg}</div>{caption}</figure>'
    if isinstance(part, Points):
        return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in part.items)}</ul>"
    return f"<p>{escape(part)}</p>"


def _cells(table: Table, row: Sequence[str]) -> str:
    return "".join(
        f"<td{_outcome(cell) if head == 'outcome' else _kind(table, head)}>{escape(cell)}</td>"
        for head, cell in zip(table.heads, row, strict=True)
    )


def _kind(table: Table, head: str) -> str:
    return "" if head in table.words else ' class="figure"'


def _outcome(cell: str) -> str:
    """Outcomes have a colour and a sign."""
    return f' class="outcome {escape(cell)}"'
