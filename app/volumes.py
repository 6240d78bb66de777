"""A document longer than the model's window becomes volumes that fit it, cut at headings where that is possible. Pure.

The same pages always make the same volumes for a given room, so what was read of a volume serves every later question
that is about it. The card at the head of a volume tells the model where in the document it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from retrieval.catalogue import StoredPage
from retrieval.passage import Section

# The mark in front of a page ("[page 123]") and the line end after it, in tokens.
MARK_TOKENS = 12
# A volume may end this much of its room early, in front of a heading.
_EARLY = 0.3
# How far below the top of a page a heading still begins it: a running head may come first.
_TOP_LINES = 3

_LONGEST_HEADING = 80
_MOST_WORDS = 12
_PROSE_ENDS = tuple(".,;:!?。，、；：！？…")
_MARKDOWN = re.compile(r"(#{1,6})\s+(\S.*?)\s*#*")
_NUMBERED = re.compile(r"(\d{1,3}(?:\.\d{1,3}){0,4})\.?\s+(\D.*)")
_NAMED = re.compile(r"(?:Chapter|CHAPTER|Part|PART|Section|SECTION|Appendix|APPENDIX)\s+(?:\d+|[IVXLC]+|[A-Z])\b(.*)")
_CHINESE = re.compile(r"第[〇零一二三四五六七八九十百两\d]+([编篇卷章节]|部分?)(.*)")
_CHINESE_ITEM = re.compile(r"[一二三四五六七八九十]{1,3}、\S.*")
_CHINESE_LEVEL = {"节": 2}
_LONGEST_CHINESE = 30
# So short a line is no sentence, even where no blank follows the number of the chapter.
_SHORT_CHINESE = 15
_BREAKS = ("\n\n", "\n", "。", ". ", " ")

# Of the best hits, those whose score comes near that of the best one decide which volume a question is about.
_TOP_HITS = 5
_NEAR = 0.9
_MOST_PLACES = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Characters [start, end) of a page."""

    page: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Volume:
    """Volume `number` (from 1) of `of`: consecutive parts, whole pages but where one page alone has no room."""

    number: int
    of: int
    parts: tuple[Part, ...]

    @property
    def first_page(self) -> int:
        return self.parts[0].page

    @property
    def last_page(self) -> int:
        return self.parts[-1].page

    def holds(self, page: int, start: int) -> bool:
        """Whether the character `start` of a page lies in this volume."""
        return any(part.page == page and part.start <= start < max(part.end, 1) for part in self.parts)

    def pages(self, pages: Sequence[StoredPage]) -> list[StoredPage]:
        """What the volume holds of its document's pages."""
        numbered = {page.number: page for page in pages}
        return [
            replace(numbered[part.page], text=numbered[part.page].text[part.start : part.end]) for part in self.parts
        ]


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of a document; `level` 1 is the highest, `top` says that its page begins with it."""

    page: int
    level: int
    title: str
    top: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part with its tokens; `level` of the heading that it begins with, if it does."""

    part: Part
    tokens: int
    level: int | None = None


def cut(pages: Sequence[StoredPage], room: int, count_tokens: Callable[[str], int]) -> tuple[Volume, ...]:
    """Cut a document into volumes.

    Args:
        pages: all of them, in order.
        room: most tokens of a volume's pages, by their stored counts and `MARK_TOKENS` for each.
        count_tokens: for parts of a page that is longer than a volume.
    """
    starts: dict[int, int] = {}
    for heading in headings(pages):
        if heading.top:
            starts[heading.page] = min(heading.level, starts.get(heading.page, heading.level))
    pieces = [piece for page in pages for piece in _pieces(page, room, count_tokens, starts.get(page.number))]
    groups: list[tuple[Part, ...]] = []
    start = 0
    while start < len(pieces):
        end = _end(pieces, start, room)
        groups.append(tuple(piece.part for piece in pieces[start:end]))
        start = end
    return tuple(Volume(number, len(groups), parts) for number, parts in enumerate(groups, start=1))


def _pieces(page: StoredPage, room: int, count_tokens: Callable[[str], int], level: int | None) -> Iterator[_Piece]:
    if page.tokens + MARK_TOKENS <= room:
        yield _Piece(Part(page.number, 0, len(page.text)), page.tokens + MARK_TOKENS, level)
        return
    start = 0
    for text in _halves(page.text, room - MARK_TOKENS, count_tokens):
        part = Part(page.number, start, start + len(text))
        yield _Piece(part, count_tokens(text) + MARK_TOKENS, None if start else level)
        start = part.end


def _halves(text: str, room: int, count_tokens: Callable[[str], int]) -> Iterator[str]:
    """The text in order, halved at paragraphs, else lines, else sentences, else words until each part has room."""
    if len(text) < 2 or count_tokens(text) <= room:
        yield text
        return
    middle = _middle(text)
    yield from _halves(text[:middle], room, count_tokens)
    yield from _halves(text[middle:], room, count_tokens)


def _middle(text: str) -> int:
    """The end of the largest unit that ends in the middle half of the text, nearest to its middle."""
    half, quarter = len(text) // 2, len(text) // 4
    for mark in _BREAKS:
        before = text.rfind(mark, quarter, half)
        after = text.find(mark, half, half + quarter)
        ends = [place + len(mark) for place in (before, after) if place != -1]
        if ends:
            return min(ends, key=lambda end: abs(end - half))
    return half


def _end(pieces: Sequence[_Piece], start: int, room: int) -> int:
    """Where the volume that begins at `start` ends: in front of the highest heading near its end, else when full."""
    full = start
    tokens = 0
    best: tuple[int, int] | None = None
    while full < len(pieces):
        level = pieces[full].level
        if full > start and level is not None and tokens >= (1 - _EARLY) * room and (best is None or level <= best[0]):
            best = (level, full)
        tokens += pieces[full].tokens
        # A part without any room is a volume all the same, for the text must go somewhere.
        if tokens > room and full > start:
            return best[1] if best else full
        full += 1
    return full


# --- headings ---


def headings(pages: Sequence[StoredPage]) -> list[Heading]:
    """The headings of a document, in order; of those that are repeated, as running heads are, the first ones."""
    found: dict[str, Heading] = {}
    for page in pages:
        for place, level, title in _page_headings(page.text):
            found.setdefault(title.casefold(), Heading(page.number, level, title, place < _TOP_LINES))
    return list(found.values())


def _page_headings(text: str) -> Iterator[tuple[int, int, str]]:
    """Headings of a page: place among its lines that are not blank, level, title."""
    lines = [line.strip() for line in text.split("\n")]
    written = [place for place, line in enumerate(lines) if line]
    # Numbered lines one after another are a list or a table of contents, unless they lead deeper, as 3 and 3.1 do.
    listed = {
        place
        for one, other in pairwise(written)
        if 0 < _depth(lines[other]) <= _depth(lines[one])
        for place in (one, other)
    }
    for nth, place in enumerate(written):
        apart = place == 0 or not lines[place - 1]
        if place not in listed and (level := heading_level(lines[place], apart=apart)) is not None:
            title = _MARKDOWN.sub(r"\2", lines[place]) if lines[place].startswith("#") else lines[place]
            yield nth, level, " ".join(title.split())


def _depth(line: str) -> int:
    """How many numbers a line begins with; 0 for one without."""
    if match := _NUMBERED.fullmatch(line):
        return match[1].count(".") + 1
    return 1 if _CHINESE_ITEM.fullmatch(line) else 0


def heading_level(line: str, *, apart: bool = True) -> int | None:
    """The level of a line that is a heading, 1 for the highest; None when it rather is none.

    Args:
        line: without blanks around it.
        apart: a blank line or the page's top is in front of it; without a number only such a line is a heading.
    """
    if len(line) > _LONGEST_HEADING or len(line.split()) > _MOST_WORDS:
        return None
    if match := _MARKDOWN.fullmatch(line):
        return len(match[1])
    if line.endswith(_PROSE_ENDS):
        return None
    if match := _CHINESE.fullmatch(line):
        begun = not match[2] or match[2][0] in " 　：:" or len(line) <= _SHORT_CHINESE
        return _CHINESE_LEVEL.get(match[1], 1) if begun and len(line) <= _LONGEST_CHINESE else None
    if _CHINESE_ITEM.fullmatch(line):
        return 2 if len(line) <= _LONGEST_CHINESE else None
    if match := _NAMED.fullmatch(line):
        return 1 if _is_title(match[1].lstrip(" .:–—-")) else None
    if match := _NUMBERED.fullmatch(line):
        # A leader or a page number at the end is a table of contents.
        is_entry = re.search(r"(\.\s?){3}|\s\d+$", line) is not None
        return None if is_entry or not _is_title(match[2]) else match[1].count(".") + 1
    return 1 if apart and _is_in_capitals(line) else None


def _is_title(text: str) -> bool:
    """Whether the words after a number may be a title: the rest of a sentence begins in lower case."""
    return not text or (text[0].isalpha() and not text[0].islower())


def _is_in_capitals(line: str) -> bool:
    # Placeholders are in capitals, too.
    return "<" not in line and line.isupper() and sum(c.isalpha() for c in line) >= 4 and line[0].isalpha()


# --- the card ---


def card(volume: Volume, pages: int, contents: Sequence[str]) -> str:
    """Which volume this is, and what the whole document contains.

    Args:
        pages: how many the document has.
        contents: its table of contents, line by line.
    """
    where = (
        f"page {volume.first_page}"
        if volume.first_page == volume.last_page
        else f"pages {volume.first_page} to {volume.last_page}"
    )
    lines = [f"Volume {volume.number} of {volume.of}: {where} of {pages}."]
    if contents:
        lines += ["Contents of the whole document:", *contents]
    return "\n".join(lines)


def table_of_contents(found: Sequence[Heading], budget: int, count_tokens: Callable[[str], int]) -> list[str]:
    """As many levels of headings as `budget` tokens hold; where the highest is too many, evenly spread ones of it."""

    def fits(lines: Sequence[str]) -> bool:
        # Counting hundreds of lines takes its time, and none has less than a token.
        return len(lines) <= budget and count_tokens("\n".join(lines)) <= budget

    best: list[str] = []
    for level in sorted({heading.level for heading in found}):
        lines = [f"{h.title} (page {h.page})" for h in found if h.level <= level]
        if not fits(lines):
            # Every second one, every fourth, and so on.
            spread = (lines[:: 2**times] for times in range(1, len(lines).bit_length()))
            return best or next(filter(fits, spread), [])
        best = lines
    return best


# --- which volume a question is about ---


def top_hits(sections: Sequence[Section]) -> list[Section]:
    """The few best sections, the best one first, but for those whose score is far from its."""
    ranked = sorted(sections, key=lambda section: -section.score)[:_TOP_HITS]
    return [section for section in ranked if section.score >= _NEAR * ranked[0].score]


def choose(hits: Sequence[Section], document: str, volumes: Sequence[Volume]) -> Volume | None:
    """The volume that the hits are about, by the sum of their scores; None when they are spread over too much.

    Args:
        hits: of `top_hits`.
        document: that of the volumes; hits of each other one count as one place more.
    """
    scores: defaultdict[Volume | str, float] = defaultdict(float)
    for hit in hits:
        scores[_place(hit, document, volumes)] += hit.score
    if not 0 < len(scores) <= _MOST_PLACES:
        return None
    best = max(scores, key=lambda place: scores[place])
    return best if isinstance(best, Volume) else None


def _place(hit: Section, document: str, volumes: Sequence[Volume]) -> Volume | str:
    if hit.document != document:
        return hit.document
    return next((volume for volume in volumes if volume.holds(hit.page, hit.start)), document)


def best_within(sections: Sequence[Section], budget: int) -> list[Section]:
    """The best sections that have room in `budget` tokens together, in the order in which they were given."""
    kept: set[int] = set()
    for place, section in sorted(enumerate(sections), key=lambda pair: -pair[1].score):
        if section.tokens <= budget:
            budget -= section.tokens
            kept.add(place)
    return [section for place, section in enumerate(sections) if place in kept]
