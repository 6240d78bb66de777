"""The report of a whole run, as HTML to look at and as Markdown to send around."""

from __future__ import annotations

from pathlib import Path

from eval.findings import Findings
from eval.report.content import sections, title
from eval.report.html import to_html
from eval.report.markdown import to_markdown


def write_report(findings: Findings, folder: Path) -> None:
    """Write `report.html` and `report.md` into a folder that is there; each is whole or not there.

    Raises:
        OSError: they cannot be written.
    """
    name, content = title(findings), sections(findings)
    for file, text in (("report.html", to_html(name, content)), ("report.md", to_markdown(name, content))):
        unfinished = folder / f".{file}.tmp"
        unfinished.write_text(text, "utf-8")
        unfinished.replace(folder / file)
