"""Measures of answers, in English and Chinese, without a judge and without weights. Pure.

All measures see a text as tokens: a word, a number with its sign and decimals, or one Chinese character. Two texts
without any token agree; one without and one with tokens do not (as in SQuAD 2.0, Rajpurkar et al., 2018).
Number words ("four", "四") and magnitudes ("4.8 million", "480万") are compared as they are written.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

_CJK = "〇\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_ALNUM = rf"[^\W_{_CJK}]"
_LETTER = rf"[^\W\d_{_CJK}]"
_CHINESE = re.compile(rf"[{_CJK}]")
_BESIDE_CHINESE = re.compile(rf"(?<=[{_CJK}]) | (?=[{_CJK}])")
# A minus stands before a number and after none: "-5", but not "10-20" and not "T-5".
_TOKEN = re.compile(rf"[{_CJK}]|(?:(?<!{_ALNUM})(?<!\))-(?=\d))?(?:{_ALNUM}|(?<=\d)\.(?=\d))+")
_AS_WRITTEN = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
_ARTICLES = frozenset({"a", "an", "the"})

_RAISED = re.compile(r"(?<=\d)(?=[²³¹⁰⁴-⁹₀-₉¼-¾⅐-⅞])")
_MINUS = re.compile(r"[−–](?=\.?\d)")
_BARE_POINT = re.compile(r"(?<![\w.])\.(?=\d)")
_THOUSANDS = re.compile(r"(?<!\d)(?<!\d[.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_UNITS = frozenset(
    "mm cm dm m km ft mi mg g kg lb t ml l s sec ms min h hr hrs am pm kb mb gb tb hz khz mhz ghz w kw mw kwh v kv mah "
    "k bn mn usd eur gbp rmb cny st nd rd th".split()
)
_WITH_UNIT = re.compile(rf"(-?\d+(?:\.\d+)*)({'|'.join(sorted(_UNITS))})")

_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})(?!\d)"
_WRITTEN_DATES = (
    re.compile(r"(?<!\d)(?P<year>\d{4})(?P<sep>[-/.])(?P<month>\d{1,2})(?P=sep)(?P<day>\d{1,2})(?!\d)"),
    re.compile(r"(?<!\d)(?P<year>\d{4}) ?年 ?(?P<month>\d{1,2}) ?月 ?(?P<day>\d{1,2}) ?[日号]"),
    re.compile(rf"(?<!\d){_DAY}\s+(?:of\s+)?{_MONTH}\.?,?\s+{_YEAR}", re.IGNORECASE),
    re.compile(rf"\b{_MONTH}\.?\s+{_DAY},?\s+{_YEAR}", re.IGNORECASE),
)
_DATE = re.compile(r"(?<!\d)(\d{4})-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])(?!\d)")
_LIST_MARKER = re.compile(r"(?m)^[ \t]*\d{1,2}[.)]\s+")

_CAPITALISED = rf"[A-ZÀ-ÖØ-Þ]{_LETTER}*(?:['’-]{_LETTER}+)*(?!{_ALNUM})"
_CAPITALISED_RUN = re.compile(rf"(?<!{_ALNUM}){_CAPITALISED}(?: {_CAPITALISED})*")
_FOREIGN = rf"{_LETTER}+(?!{_ALNUM})"
_FOREIGN_WORD = re.compile(rf"{_LETTER}+")
_FOREIGN_RUN = re.compile(rf"(?<!{_ALNUM}){_FOREIGN}(?:[ '’-]{_FOREIGN})*")
_QUOTED = re.compile(rf"《([^《》]+)》|「([^「」]+)」|“([^“”]*[{_CJK}][^“”]*)”")
_POSSESSIVE = re.compile(r"['’]s$")
# Words that begin sentences or are always capitalised, and so say nothing about a name.
_COMMON = frozenset(
    "a about according additionally after again all almost along already also although always among an and another any "
    "are as at based be because been before below besides between both but by can cannot could despite did do does "
    "don due during each either else even every everyone everything few finally first following for from further "
    "furthermore given had has have he hence her here hers his how however i if in indeed instead is it its just "
    "last later let like many maybe me meanwhile more moreover most much must my neither never nevertheless next no "
    "nobody none nor not nothing now of often on once one only or other otherwise our out over overall perhaps please "
    "second several shall she should similarly since so some someone sometimes soon still such than that the their "
    "them then there therefore these they third this those though three through thus to together too two under unless "
    "unlike until up upon us usually very was we well were what when whenever where whereas whether which while who "
    "whom whose why will with within without would yes yet you your "
    "answer answers conclusion context document documents example information note page pages question section "
    "sorry summary text unknown mr mrs ms dr prof".split()
)

# Below the rounding of an engine's float32 log probabilities.
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Unsupported:
    """What an answer says and its context does not: numbers in normal form, names as written; each once, in order."""

    numbers: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How alike two answers are: `exact` character by character; `f1` and `common_prefix` from 0 to 1."""

    exact: bool
    f1: float
    common_prefix: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Whether both prefer the same token, and a lower bound of the divergence in nats, from 0 to about 21."""

    top1: bool
    kl: float


def normalise(text: str) -> str:
    """Tokens in lower case, one blank between them and none beside Chinese characters.

    After the SQuAD script (Rajpurkar et al., 2016), with the differences that numbers keep sign and decimals, lose
    thousands separators ("4,821" is "4821", "3, 4" stays two) and stand apart from their unit; that punctuation
    becomes a blank; and that an article is dropped before a word only, since "option A" ends with no article.
    """
    return _BESIDE_CHINESE.sub("", " ".join(_tokens(text)))


def exact(answer: str, gold: str) -> float:
    """1 if both are equal after `normalise`, else 0."""
    return float(_tokens(answer) == _tokens(gold))


def contains(answer: str, golds: Sequence[str]) -> float:
    """Share of the gold strings that the answer contains as whole words and numbers, from 0 to 1.

    Chinese is found inside longer Chinese text. This is RULER's `string_match_all` (Hsieh et al., 2024,
    arXiv:2404.06654) on tokens instead of characters: "47" is in neither "1470" nor "4.7".

    Raises:
        ValueError: there are no gold strings.
    """
    if not golds:
        raise ValueError("no gold strings to look for; give at least one")
    return sum(_says(answer, gold) for gold in golds) / len(golds)


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of tokens, from 0 to 1.

    Words as in SQuAD (Rajpurkar et al., 2016), Chinese by characters, as CMRC 2018 splits it (Cui et al., 2019).
    """
    said, wanted = _tokens(answer), _tokens(gold)
    return _f_measure((Counter(said) & Counter(wanted)).total(), len(said), len(wanted))


def rouge_l(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the longest common subsequence of tokens, from 0 to 1.

    ROUGE-L (Lin, 2004) with equal weights, on the tokens of `f1` and without stemming.
    """
    said, wanted = _tokens(answer), _tokens(gold)
    return _f_measure(_common_subsequence(said, wanted), len(said), len(wanted))


def unsupported(answer: str, context: str, *, question: str = "") -> Unsupported:
    """Numbers and names of the answer that occur neither in the context nor in the question.

    An alarm, not a verdict: it misses wrong combinations of right parts and errs on reworded ones.
    Numbers are whatever holds a digit. Percent signs and currencies do not count, full dates are one number however
    they are written, and the sign of a negative number may be put into words but not be invented.
    Names are runs of capitalised words without the common words at their ends. In an answer that is mostly Chinese
    they are runs of Latin letters and what stands in 《》, 「」 or “”; other Chinese names are not recognised.
    """
    numbers, names = _claims(answer)
    known = f"{context}\n{question}"
    known_numbers = _known_numbers(known)
    known_words = _padded(_all_tokens(known))
    return Unsupported(
        tuple(number for number in numbers if number not in known_numbers),
        tuple(name for name in names if _padded(_all_tokens(name)) not in known_words),
    )


def supported_share(answer: str, context: str, *, question: str = "") -> float | None:
    """Share of the answer's different numbers and names that are supported, from 0 to 1; None if it says none."""
    numbers, names = _claims(answer)
    said = len(numbers) + len(names)
    missing = unsupported(answer, context, question=question)
    return 1 - (len(missing.numbers) + len(missing.names)) / said if said else None


def agreement(a: str, b: str) -> Agreement:
    """How alike the answers of two arms are; needs no gold.

    The common prefix is counted in words as written (case and punctuation count, Chinese by characters) and divided
    by the longer answer's words: it falls with the first word that differs, however alike the rest may be.
    """
    words_a, words_b = _AS_WRITTEN.findall(a), _AS_WRITTEN.findall(b)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words_a, words_b, strict=False)))
    longer = max(len(words_a), len(words_b))
    return Agreement(exact=a == b, f1=f1(a, b), common_prefix=common / longer if longer else 1.0)


def first_token(control: Mapping[int, float], treated: Mapping[int, float]) -> FirstToken:
    """Compare two top-k lists of the first token; each maps token ids to natural log probabilities.

    KL(control || treated) is taken over the tokens in both lists and one bucket for all others. By the data-processing
    inequality (for buckets: the log sum inequality, Cover and Thomas, 2006, theorem 2.7.1) it is a lower bound of the
    divergence over the whole vocabulary; probabilities below 1e-9 count as 1e-9. Lists without a common token give 0,
    so read it with `top1`. Of equally likely tokens the lowest id is the preferred one.

    Raises:
        ValueError: one of the lists is empty.
    """
    if not control or not treated:
        raise ValueError("no log probabilities to compare; ask the engine for some")
    shared = sorted(control.keys() & treated.keys())
    pairs = zip(_masses(control, shared), _masses(treated, shared), strict=True)
    divergence = math.fsum(p * math.log(p / q) for p, q in pairs)
    return FirstToken(top1=_preferred(control) == _preferred(treated), kl=max(0.0, divergence))


def _tokens(text: str) -> list[str]:
    """All tokens but the articles that stand before a word."""
    tokens = _all_tokens(text)
    kept = [token for token, after in pairwise(tokens) if token not in _ARTICLES or _CHINESE.match(after)]
    return kept + tokens[-1:]


def _all_tokens(text: str) -> list[str]:
    tokens: list[str] = []
    for token in _TOKEN.findall(_fold(text).casefold()):
        with_unit = _WITH_UNIT.fullmatch(token)
        tokens += with_unit.groups() if with_unit else (token,)
    return tokens


def _fold(text: str) -> str:
    """One way to write characters, signs and numbers; the case stays."""
    # NFKC makes plain digits of raised ones, which are powers or footnotes and not the number's last digits.
    text = unicodedata.normalize("NFKC", _RAISED.sub(" ", text))
    text = _BARE_POINT.sub("0.", _MINUS.sub("-", text))
    return _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)


def _says(answer: str, gold: str) -> bool:
    # With articles, too: "A" is a gold that "Option A is right" contains.
    if not (wanted := _tokens(gold)):
        return not _tokens(answer)
    return _padded(wanted) in _padded(_tokens(answer)) or _padded(_all_tokens(gold)) in _padded(_all_tokens(answer))


def _padded(tokens: Sequence[str]) -> str:
    """Tokens as one string in which a run of whole tokens is a substring."""
    return f" {' '.join(tokens)} "


def _f_measure(common: int, said: int, wanted: int) -> float:
    """2PR / (P + R) with P = common / said and R = common / wanted."""
    return 2 * common / (said + wanted) if said or wanted else 1.0


def _common_subsequence(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, one row of bits at a time (Hyyrö, 2004): zeros are the matches."""
    places: dict[Hashable, int] = {}
    for place, token in enumerate(b):
        places[token] = places.get(token, 0) | 1 << place
    everywhere = (1 << len(b)) - 1
    row = everywhere
    for token in a:
        matches = row & places.get(token, 0)
        row = (row + matches | row - matches) & everywhere
    return len(b) - row.bit_count()


def _claims(answer: str) -> tuple[list[str], list[str]]:
    """The different numbers and names of an answer. The numbers that count the items of a list are none of them."""
    if len(_LIST_MARKER.findall(answer)) > 1:
        answer = _LIST_MARKER.sub("\n", answer)
    text = _with_iso_dates(_fold(answer))
    dates = ["-".join(date) for date in _DATE.findall(text)]
    text = _DATE.sub(" ", text)
    return list(dict.fromkeys([*dates, *_numbers(text)])), list(dict.fromkeys(_names(text)))


def _known_numbers(text: str) -> set[str]:
    """Numbers that a text supports: its own, those without their sign, and dates with their parts."""
    numbers = set(_numbers(text))
    dates = _DATE.findall(_with_iso_dates(_fold(text)))
    parts = {str(int(part)) for date in dates for part in date}
    return numbers | {number.removeprefix("-") for number in numbers} | {"-".join(date) for date in dates} | parts


def _numbers(text: str) -> Iterator[str]:
    """Tokens with a digit; 3.50 is 3.5."""
    for token in _all_tokens(text):
        if any(map(str.isdigit, token)):
            yield token.rstrip("0").rstrip(".") if token.count(".") == 1 else token


def _with_iso_dates(text: str) -> str:
    for pattern in _WRITTEN_DATES:
        text = pattern.sub(_iso, text)
    return text


def _iso(date: re.Match[str]) -> str:
    year, month, day = date["year"], date["month"], int(date["day"])
    number = int(month) if month.isdigit() else 1 + _MONTHS.index(month[:3].casefold())
    return f"{year}-{number:02}-{day:02}" if 1 <= number <= 12 and 1 <= day <= 31 else date.group()


def _names(text: str) -> Iterator[str]:
    chinese = len(_CHINESE.findall(text)) >= len(_FOREIGN_WORD.findall(text))
    for run in (_FOREIGN_RUN if chinese else _CAPITALISED_RUN).findall(text):
        words = _POSSESSIVE.sub("", run).split(" ")
        if own := [place for place, word in enumerate(words) if not _is_common(word)]:
            yield " ".join(words[own[0] : own[-1] + 1])
    for groups in _QUOTED.findall(text):
        if _all_tokens(name := "".join(groups)):
            yield name


def _is_common(word: str) -> bool:
    """Whether a word is no name for itself; "US" is one and "Us" is not."""
    if word.isupper() and len(word) > 1:
        return word.casefold() in _UNITS
    folded = re.split("['’]", word.casefold())[0]
    return folded in _COMMON or folded in _UNITS


def _masses(logprobs: Mapping[int, float], tokens: Sequence[int]) -> list[float]:
    """Probabilities of the tokens and of all others together; none is below `_TINY`, so that logarithms are finite."""
    known = [math.exp(min(logprobs[token], 0.0)) for token in tokens]
    return [max(mass, _TINY) for mass in (*known, 1 - math.fsum(known))]


def _preferred(logprobs: Mapping[int, float]) -> int:
    return min(logprobs, key=lambda token: (-logprobs[token], token))
