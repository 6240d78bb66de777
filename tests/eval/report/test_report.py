"""The report of runs of every kind: whole, escaped, and without figures that are none."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from eval.findings import Findings
from eval.report import write_report
from eval.report.verdict import verdict
from tests.eval.report.findings import EMPTY, FINDINGS, QUALITY, SPEED, bare_row, comparison, verdict_of

_ALONE = {"meta", "link", "br", "hr", "img"}
_MADE = {
    "everything": FINDINGS,
    "nothing": EMPTY,
    "no quality": replace(FINDINGS, quality=None),
    "no speed": replace(FINDINGS, speed=None),
    "no gates": replace(FINDINGS, gates=()),
    "rows that tell nothing": replace(FINDINGS, speed=replace(SPEED, rows=(bare_row("exact", 4096),))),
}


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "fast"), attrs
        assert not any(name == "src" or (name == "href" and not str(value).startswith("#")) for name, value in attrs)
        if tag not in _ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens nothing."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


@pytest.fixture(params=list(_MADE))
def findings(request: pytest.FixtureRequest) -> Findings:
    return _MADE[request.param]


def test_reports_are_whole_and_escaped(findings: Findings, tmp_path: Path) -> None:
    write_report(findings, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"report.html", "report.md"}
    html, markdown = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    page = _Balanced()
    page.feed(html)
    assert page.open == []
    for drawing in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        image = ElementTree.fromstring(drawing)  # noqa: S314 - our own text
        assert image.get("role") == "img"
        for mark in image.iter():
            assert not any("nan" in value or "inf" in value.split() for value in mark.attrib.values())
    for text in (" ".join(page.text), markdown):
        assert not re.search(r"\b(nan|None|inf)\b", text)
    assert markdown.startswith("# ")
    for table in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE):
        # Pipes within cells are escaped, so that every line has as many cells.
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


@pytest.mark.parametrize(
    ("findings", "told"),
    [
        (EMPTY, "There is no arm beside the control"),
        (FINDINGS, "Failed: 1 of 4 gates"),
        (replace(FINDINGS, gates=FINDINGS.gates[:3]), "Open, which does not pass: 1 of 3 gates"),
        (replace(FINDINGS, gates=FINDINGS.gates[:2]), "Passed: all 2 gates"),
        (FINDINGS, "Suite quick: few samples and a margin of 5 points"),
        (FINDINGS, "again is exact under another name, and its ratio is the noise"),
        (replace(FINDINGS, arms=("exact", "half"), speed=SPEED), "half: its speed was not compared"),
        (replace(FINDINGS, arms=("exact", "warm"), quality=None), "reading early is exact, so its answers are those"),
        (
            replace(
                FINDINGS,
                arms=("exact", "sparse"),
                quality=replace(QUALITY, comparisons=(comparison("sparse", verdict_of("inferior")),)),
            ),
            "its answers are less true (inferior:",
        ),
    ],
)
def test_the_verdict_is_what_a_person_can_act_on(findings: Findings, told: str) -> None:
    assert told in verdict(findings)
