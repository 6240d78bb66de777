"""Faithfulness from a table of cases, and what holds for every context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.faithfulness import abstains, faithfulness, split_sentences

EN = """Alice Brennan keeps the spare key in locker 47. Boris Kovac repaired the east gate.
The north pump stands in Hall 3. It was built in 1961. Dr. Stone inspected the roof, i.e. the beams.
The contract was signed on May 1, 2024. The valve opens at 4.7 bar. The repair cost 12,500 euros.
A sign over the door says "Mind the low beam"."""
ZH = """备用钥匙由李娜保管，放在47号柜里。张伟负责修理屋顶。北水泵在三号厅。它建于1961年。
合同签于2024年5月1日。门上的牌子上写着“小心低梁”。"""

CASES = json.loads((Path(__file__).parent / "cases" / "faithfulness.json").read_text("utf-8"))


@pytest.mark.parametrize("case", [pytest.param(case, id=case["note"]) for case in CASES])
def test_cases(case: dict[str, Any]) -> None:
    context = ZH if case["note"].startswith("zh") else EN
    judged = faithfulness(case["answer"], context, question=case.get("question", ""))
    assert [sentence.kind for sentence in judged.sentences] == case["expected"], judged


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (
            "It is 4.7. Mr. J. Stone, e.g. him, saw No. 5. End",
            ["It is 4.7.", "Mr. J. Stone, e.g. him, saw No. 5.", "End"],
        ),
        ("1. One\n2) Two\n- Three\n4.7 bar", ["One", "Two", "Three", "4.7 bar"]),
        ("他说：“走吧。”然后走了！好；行", ["他说：“走吧。”", "然后走了！", "好；", "行"]),
        ("", []),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_counts() -> None:
    judged = faithfulness("Hello! 47. The valve opens at 9 bar. I don't know.", EN, question="Which locker?")
    assert (judged.supported, judged.total, judged.abstained, judged.share) == (1, 2, 1, 0.5)
    assert faithfulness("", EN).share is None


def test_abstention_is_all_of_an_answer() -> None:
    assert abstains("I don't know. The documents do not say.")
    assert not abstains("The documents do not say. The key is in locker 47.")


@settings(deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.sampled_from([*split_sentences(EN), *split_sentences(ZH)])
        | st.text('ab cdTX 47.,-“”"：的李娜 ').map(lambda text: f"{text.strip()} end."),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 5),
)
def test_what_is_copied_is_supported(sentences: list[str], place: int) -> None:
    judged = faithfulness(sentences[place % len(sentences)], "\n".join(sentences))
    assert judged.supported == judged.total, judged
