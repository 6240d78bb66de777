"""Every sentence of an answer against the context that was given, in English and Chinese, without a judge. Pure.

A sentence is supported when

1. what it quotes stands in the context, word for word;
2. its numbers, dates and names occur in the context or the question (`measures.unsupported`);
3. each of them that the question does not have stands in a *window* that also has enough of the sentence's other
   content words; without any, some window has.

A window is one sentence of the context, together with the one before it where it begins by referring back ("It", "该");
a sentence of 8 content words (16 pairs) or more may also draw on two neighbouring ones. Enough is 60% of
the content words, or 75% of a Chinese sentence's pairs of characters. What is not seen: a negation, a relation turned
round within one sentence, wrong words among many right ones. What is seen wrongly: free paraphrase counts as
not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from eval.measures import contains, normalise, unsupported

Kind = Literal["supported", "unsupported", "abstained", "nothing"]

_CJK = "〇\u3400-\u9fff\uf900-\ufaff"
_HAS_CJK = re.compile(f"[{_CJK}]")
_ABBREVIATION = re.compile(
    r"(?:\b(?i:mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|cf|no|nos|fig|sec|ch|approx|inc|ltd|co|jr|sr|vol|pp?|art|al|gen)"
    r"|(?<![^\W_])(?:[A-Z]\.)*[A-Z])\.$"
)
_END = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s)|[。！？；!?]+[”」』’）)\"]*")
_BULLET = re.compile(r"(?m)^[ \t]*(?:[-*•·–]|\([a-z]\)|#+)[ \t]+")
_NUMBER = re.compile(r"(?m)^[ \t]*\(?\d{1,2}(?:[.)][ \t]+(?=\S)|、)")

_WORD = re.compile(rf"[^\W\d_{_CJK}]+(?:['’][^\W\d_{_CJK}]+)*")
_CHINESE_RUN = re.compile(f"[{_CJK}]+")
_STOP_WORDS = frozenset(
    "a about above according after all also an and any are as at be because been before being both but by can could "
    "did do does each for from had has have he her here his how i if in into is it its just may more most must no not "
    "of on one only or other our out over per she should so some such than that the their them then there these they "
    "this those through to under until up us very was we were what when where which while who whom whose will with "
    "would you your document documents text context page says said states stated answer".split()
)
_CHINESE_STOP = re.compile("[的了是在和与及也都就被把由着过为有之于从向对将个这那其]+|根据|文档|文件|因此|所以|以及")
_ENDING = re.compile("(?<=[a-z]{3})(?:ing|ed|es|s|e)$")
_QUOTED = re.compile(r'"([^"\n]{2,})"|“([^“”]{2,})”|「([^「」]{2,})」|『([^『』]{2,})』')
_REFERS_BACK = re.compile(
    r"^\W*(?:it|its|he|his|she|her|they|their|this|these|that|those|there)\b|^\W*[它他她该此这其]", re.IGNORECASE
)
# Surnames that are seldom anything else, where a name may begin.
_CHINESE_NAME = re.compile(
    f"(?:^|(?<=[，、：；。由是和与给向对被为]))([王李张刘陈杨赵吴徐孙朱胡郭罗郑梁谢宋唐韩冯邓曹彭萧蔡潘袁董苏吕魏蒋杜沈姜范傅钟卢戴崔廖邱谭韦贾邹秦阎薛侯][{_CJK}])"
)

_ABSTAINS = re.compile(
    r"\bi (?:do not|don['’]t|cannot|can['’]t) (?:know|tell|say|answer|find)\b"
    r"|\b(?:documents?|texts?|context|passages?|pages?|sources?|it)\b[^.]{0,40}? "
    r"(?:does not|do not|doesn['’]t|don['’]t) (?:say|mention|state|tell|contain|specify|provide|give|include)\b"
    r"|\b(?:is|are|was|were) not (?:stated|mentioned|specified|given|provided|known)\b"
    r"|^\W*not (?:stated|mentioned|given)\b"
    r"|\bno (?:information|mention)\b|\bcannot be (?:answered|determined|found)\b|\bunanswerable\b"
    r"|不知道|(?:没有|并未|未)(?:提到|提及|说明|给出|包含|写明|相关)|无法(?:回答|确定|得知|判断)|没有(?:相关)?信息",
    re.IGNORECASE,
)
_CLAIMS_NOTHING = re.compile(
    r"^\W*(?:hello|hi|sure|certainly|of course|thank you|thanks|yes|no|okay|you are welcome|good question"
    r"|(?:i|let me) (?:hope|am happy|will|can) .*|here (?:is|are) .*|please .*|let me know .*|feel free .*"
    r"|你好|您好|好的|当然|谢谢|不客气|希望.*|以下是.*|请.*)?\W*$|[?？]\W*$|[:：]\W*$",
    re.IGNORECASE | re.DOTALL,
)

_ENOUGH, _ENOUGH_CHINESE = 0.6, 0.75
_LONG, _LONG_CHINESE = 8, 16


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of an answer; `reason` says why it is not supported."""

    text: str
    kind: Kind
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """An answer's sentences; `total` are those that claim something, `supported` of them are borne out."""

    sentences: tuple[Sentence, ...]
    supported: int
    total: int
    abstained: int

    @property
    def share(self) -> float | None:
        """From 0 to 1; None of an answer that claims nothing."""
        return self.supported / self.total if self.total else None


def faithfulness(answer: str, context: str, *, question: str = "") -> Faithfulness:
    """Judge every sentence of an answer by the rule above.

    Args:
        context: what the model was given.
        question: what it repeats from there needs no support.
    """
    windows = _windows(context)
    judged = tuple(_judge(sentence, context, windows, question) for sentence in split_sentences(answer))
    kinds = [sentence.kind for sentence in judged]
    supported = kinds.count("supported")
    return Faithfulness(judged, supported, supported + kinds.count("unsupported"), kinds.count("abstained"))


def abstains(answer: str, *, question: str = "") -> bool:
    """Whether an answer says that it cannot say, and claims nothing beside that."""
    judged = faithfulness(answer, "", question=question)
    return judged.abstained > 0 and judged.total == 0


def split_sentences(text: str) -> list[str]:
    """Sentences without the marks of lists; neither an abbreviation, an initial nor a decimal point ends one."""
    text = _BULLET.sub("", text)
    if len(_NUMBER.findall(text)) > 1:
        # One alone may be the answer: "47. That is all."
        text = _NUMBER.sub("", text)
    sentences = []
    for line in text.splitlines():
        start = 0
        for end in _END.finditer(line):
            if not _ABBREVIATION.search(line[start : end.end()]):
                sentences.append(line[start : end.end()])
                start = end.end()
        sentences.append(line[start:])
    return [sentence.strip() for sentence in sentences if sentence.strip()]


@dataclass(frozen=True, slots=True)
class _Window:
    text: str
    units: frozenset[str]
    pair: bool = False


def _windows(context: str) -> list[_Window]:
    sentences = split_sentences(context)
    units = [frozenset(_units(sentence)) for sentence in sentences]
    windows = [_Window(text, own) for text, own in zip(sentences, units, strict=True)]
    for (first, before), (second, own) in pairwise(zip(sentences, units, strict=True)):
        windows.append(_Window(f"{first}\n{second}", before | own, pair=not _REFERS_BACK.search(second)))
    return windows


def _judge(sentence: str, context: str, windows: Sequence[_Window], question: str) -> Sentence:
    claims = unsupported(sentence, "", question=question)
    chinese_names = [name for name in _CHINESE_NAME.findall(sentence) if name not in question]
    anchors = {*claims.numbers, *claims.names, *chinese_names}
    if _ABSTAINS.search(sentence) and not anchors:
        return Sentence(sentence, "abstained")
    named = {unit for name in claims.names for unit in _units(name)}
    units = set(_units(sentence)) - named
    if not (anchors or units) or (not claims.numbers and _CLAIMS_NOTHING.search(sentence)):
        return Sentence(sentence, "nothing")
    quotes = [quote for quote in ("".join(groups) for groups in _QUOTED.findall(sentence)) if normalise(quote)]
    if quotes and contains(context, quotes) < 1:
        return Sentence(sentence, "unsupported", "a quote is not in the context")
    missing = unsupported(sentence, context, question=question)
    if strange := [*missing.numbers, *missing.names, *(name for name in chinese_names if name not in context)]:
        return Sentence(sentence, "unsupported", f"not in the context: {', '.join(strange)}")
    enough, long = (_ENOUGH_CHINESE, _LONG_CHINESE) if _HAS_CJK.search(sentence) else (_ENOUGH, _LONG)
    near = [
        window
        for window in windows
        if (not window.pair or len(units) >= long) and len(units & window.units) >= enough * len(units)
    ]
    if not near:
        return Sentence(sentence, "unsupported", "too few of its words stand together anywhere")
    for window in near:
        absent = unsupported(sentence, window.text, question=question)
        anchors &= {*absent.numbers, *absent.names, *(name for name in chinese_names if name not in window.text)}
    if anchors:
        return Sentence(sentence, "unsupported", f"not beside its words in the context: {', '.join(sorted(anchors))}")
    return Sentence(sentence, "supported")


def _units(text: str) -> Iterator[str]:
    """Content words without their endings, and pairs of Chinese characters."""
    for word in _WORD.findall(text):
        folded = word.casefold().removesuffix("'s").removesuffix("’s")
        if folded not in _STOP_WORDS and len(folded) > 1:
            yield _ENDING.sub("", folded)
    for part in _CHINESE_STOP.split(text):
        for run in _CHINESE_RUN.findall(part or ""):
            yield from (run[i : i + 2] for i in range(max(1, len(run) - 1)))
