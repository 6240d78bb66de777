"""Citations from tables of cases: answer, question and pages in, cited pages out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.citations import Evidence, cite

PAGES = {
    1: "The spare key of the boiler room is kept in locker 47. The boiler was built in 1987.",
    2: "The drive belt must be replaced every 18 months. The belt is made of rubber.",
    3: "The warning lamp on the cooling tower is painted turquoise.\nThe lamp was painted in\n1991 by the crew.",
    4: "冷却塔的警示灯是绿色的。备用钥匙放在四十七号柜子里。",
    5: "The spare parts are kept in the cellar. Version 2.4 of the manual costs 3,500 euros.",
}
EVIDENCE = [Evidence("d_1", "manual.pdf", page, str(page), text) for page, text in PAGES.items()]

CASES = [
    pytest.param("The spare key is kept in locker 47.", "Where is the spare key?", [1], id="full sentence"),
    pytest.param("47", "In which locker is the spare key of the boiler room?", [1], id="a number alone"),
    pytest.param("Every 18 months.", "How often is the belt replaced?", [2], id="fragment"),
    pytest.param("It is turquoise.", "What colour is the warning lamp?", [3], id="one word of its own"),
    pytest.param("The lamp was painted in 1991.", "When was the lamp painted?", [3], id="line break in the source"),
    pytest.param(
        "The key is in locker 47. The belt lasts 18 months.", "Tell me.", [1, 2], id="two sentences, two pages"
    ),
    pytest.param("警示灯是绿色的。", "警示灯是什么颜色？", [4], id="Chinese"),
    pytest.param("备用钥匙放在四十七号柜子里。", "钥匙在哪里？", [4], id="Chinese second sentence"),
    pytest.param("The manual costs 3,500 euros.", "What does the manual cost?", [5], id="number with separator"),
    pytest.param("The documents do not say.", "Who built the pyramids?", [], id="not found"),
    pytest.param("Elephants migrate across the savannah at dawn.", "What do elephants do?", [], id="unrelated"),
    pytest.param("Where is the spare key?", "Where is the spare key?", [1], id="the question repeated"),
    pytest.param("", "Where is the spare key?", [], id="empty answer"),
    pytest.param("...", "Where?", [], id="no words"),
]


@pytest.mark.parametrize(("answer", "question", "pages"), CASES)
def test_cited_pages(answer: str, question: str, pages: list[int]) -> None:
    assert [citation.page for citation in cite(answer, question, EVIDENCE)] == pages


def test_the_span_is_the_supported_sentence() -> None:
    answer = "I looked for it. The spare key is kept in locker 47."
    [citation] = cite(answer, "Where is the spare key?", EVIDENCE)
    assert answer[citation.start : citation.end] == "The spare key is kept in locker 47."
    assert citation.quote == "The spare key of the boiler room is kept in locker 47."
    assert citation.score == 1.0


def test_the_question_decides_between_equal_places() -> None:
    pages = [
        Evidence("d_1", "a", 1, "1", "The north gate opens at 9 in winter."),
        Evidence("d_1", "a", 2, "2", "The south gate opens at 9 in summer."),
    ]
    [citation] = cite("At 9.", "When does the south gate open in summer?", pages)
    assert citation.page == 2


def test_without_evidence_there_is_nothing_to_cite() -> None:
    assert cite("The key is in locker 47.", "Where?", []) == []


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_text_gives_valid_spans_and_quotes(answer: str, page: str) -> None:
    evidence = [Evidence("d", "n", 1, "1", page)]
    for citation in cite(answer, "", evidence):
        assert 0 <= citation.start < citation.end <= len(answer)
        assert citation.quote in page.replace("\n", " ")
        assert 0.5 <= citation.score <= 1.0
