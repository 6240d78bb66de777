"""Everyday cases, through every arm: what users do, and whether it comes out as it should.

A short question, a summary of a document, a prompt near the window and one over it, a conversation that must remember
its beginning, and long prompts at once. A case passes by what the service must guarantee (answered, not cut, nothing
read twice, nothing mixed up); what a model makes of it is told beside that. All texts are generated, in English.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import fmean, median
from typing import Any

from app.prompt import Excerpt, Source, build_messages
from eval.arms import Arm, by_engine
from eval.errors import BadUsage
from eval.findings import Case
from eval.measures import contains
from eval.results import Results
from eval.serve import EngineServer, OpenServer, messages_of, probe
from eval.served import Served, Server
from eval.tasks import TASKS
from eval.tasks.task import Context, Planted, Question, Task, build_context
from eval.tasks.words import Language, cities, codes, things
from serving.engine import Message
from serving.errors import PromptTooLong, StartError

# All in tokens. A short question has a page to go by, and nobody reads a summary of a whole window.
_SHORT, _SUMMARY = 300, 4000
_ANSWER, _SUMMARY_ANSWER, _TURN_ANSWER = 16, 64, 24
# So much over the window that no template explains it.
_OVER = 256
# What a turn takes at most: the question, the answer and the template around both.
_TURN = 80
_LEAST_DOCUMENT = 256
# The end of an answer may be tokenised otherwise when the next question stands behind it.
_SEAM = 16
# Foreign servers do not tell their block; no common one is larger.
_FOREIGN_BLOCK = 128
_LATE = "no answer within"

# What the user tells first and asks for last.
_FACTS = (
    ("Please remember: my locker number is {value}.", "What is my locker number?", codes),
    ("Please remember: my spare key lies under the {value}.", "Under what does my spare key lie?", things),
    ("Please remember: my next trip goes to {value}.", "Where does my next trip go?", cities),
)
_TALK = (
    "What is the document about?",
    "Thank you. What else does it tell?",
    "Which things are mentioned first?",
    "Does it name a place?",
    "What was repaired?",
    "That is interesting. Who would want to read this?",
    "Is anything said about the weather?",
)


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of a case. `place` counts within a repeat: turns, or prompts that were sent at once.

    `tokens` is the prompt as it was sent, counted before; None where that is not known. `recalled` is the share of the
    planted facts in the answer, `fault` what was wrong with it.
    """

    case: str
    arm: str
    repeat: int
    place: int
    tokens: int | None
    recalled: float | None
    fault: str | None
    served: Served


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What is asked about what, in tokens as the control counts them."""

    sources: tuple[Source, ...]
    question: Question
    tokens: int


@dataclass(frozen=True, slots=True)
class _Prompts:
    """One repeat's worth. `facts` are told and asked for in the conversation about `talk`: told, asked, value."""

    short: _Prompt
    summary: _Prompt
    near: _Prompt
    over: _Prompt
    talk: tuple[Source, ...]
    facts: tuple[tuple[str, str, str], ...]
    together: tuple[_Prompt, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """How requests are served now, and who is told of them."""

    server: Server
    arm: Arm
    repeat: int
    turns: int
    limit_s: float
    results: Results
    step: Callable[[], None]

    async def serve(self, messages: Sequence[Message], salt: str, max_tokens: int) -> Served:
        serving = self.server.serve(messages, self.arm, salt=salt, max_tokens=max_tokens)
        try:
            return await asyncio.wait_for(serving, self.limit_s)
        except TimeoutError:
            return Served(error=f"{_LATE} {self.limit_s:g} s")

    def tokens(self, messages: Sequence[Message], control: int | None) -> int | None:
        """What is sent, in the tokens of the server's own model; of a foreign one, whose tokenizer is not here, by the
        control's count."""
        if isinstance(self.server, EngineServer):
            return self.server.count(messages)
        return control if self.arm.keep == 1 else None

    def record(self, sent: Sent) -> Sent:
        self.results.add("case", asdict(sent))
        self.step()
        return sent


_Play = Callable[[_Way, _Prompts], Awaitable[list[Sent]]]
_Fault = Callable[[Served, int | None], str | None]


def requests_of(arms: int, *, repeats: int, at_once: int, turns: int) -> int:
    """How many requests `run_cases` sends, when no conversation ends early."""
    # The short question, the summary, the long prompt and the one that is too long.
    return arms * repeats * (4 + turns + at_once)


async def run_cases(
    arms: Sequence[Arm],
    open_server: OpenServer,
    *,
    seed: int,
    results: Results,
    step: Callable[[], None],
    repeats: int = 3,
    longest: int | None = None,
    at_once: int = 4,
    turns: int = 20,
    limit_s: float = 600.0,
) -> tuple[Case, ...]:
    """Every case `repeats` times through every arm; the cases of an arm that cannot be measured have no request.

    Args:
        open_server: what serves a variant, such as `serve.opened` with its settings.
        step: called after each request.
        longest: tokens of prompt and answer that take the window's place when they are fewer; what is over the limit
            is over the window all the same.
        at_once: prompts that are sent together.
        turns: of the conversation.
        limit_s: seconds after which a request has failed.

    Raises:
        BadUsage: an arm cannot be served as it says, or a case does not fit `longest`.
        StartError: the engine of the first arm does not start.
    """
    least = 2 * len(_FACTS)
    if turns < least:
        raise BadUsage(f"a conversation of {turns} turns cannot tell and ask {len(_FACTS)} facts; use {least} or more")
    prompts: list[_Prompts] = []
    sent: list[Sent] = []
    missing: dict[str, str] = {}
    await probe(arms, open_server)
    for variant, group in by_engine(arms):
        try:
            async with open_server(variant) as server:
                for arm in group:
                    server.require(arm)
                results.add("engine", {"variant": str(variant), **server.about})
                prompts = prompts or list(_build(server, seed, repeats, longest, at_once, turns))
                for play in _PLAYS.values():
                    for repeat, given in enumerate(prompts):
                        # Whatever drifts over time meets both first and last arms alike.
                        for arm in group if repeat % 2 == 0 else reversed(group):
                            sent += await play(_Way(server, arm, repeat, turns, limit_s, results, step), given)
        except (StartError, BadUsage) as error:
            if not sent:
                raise
            missing |= {arm.name: f"not measured, {error}" for arm in group}
    return tuple(_case(name, arm.name, sent, missing.get(arm.name)) for name in _PLAYS for arm in arms)


def _build(
    server: Server, seed: int, repeats: int, longest: int | None, at_once: int, turns: int
) -> Iterator[_Prompts]:
    if not isinstance(server, EngineServer):
        raise BadUsage("the first arm is the control and counts the tokens; let it be one of this machine")
    limit = min(server.window, longest or server.window)
    for repeat in range(repeats):
        draw = Random(f"{seed}/cases/{repeat}")
        # All different, so that an answer tells which prompt it belongs to.
        first, *own = codes(draw, "en", 1 + at_once)
        beginning = f"The access code of the north gate is {first}."
        gate = Question("What is the access code of the north gate?", (first,), "The access code of the north gate is")
        build = _Builder(server, seed, repeat)
        yield _Prompts(
            short=build("short", TASKS["facts-single"], min(_SHORT, limit - _ANSWER)),
            summary=build("summary", _asked(_summary()), min(_SUMMARY, limit - _SUMMARY_ANSWER)),
            near=build("near", _asked(gate), limit - _ANSWER, beginning),
            over=build("over", _asked(gate), server.window + _OVER, beginning),
            talk=build("talk", _asked(Question(_TALK[0], (), "")), _document_tokens(limit, turns)).sources,
            facts=tuple(_fact(draw, *fact) for fact in _FACTS),
            together=tuple(
                build(f"together-{place}", _coded(code), (limit - _ANSWER) // 2) for place, code in enumerate(own)
            ),
        )


@dataclass(frozen=True, slots=True)
class _Builder:
    server: EngineServer
    seed: int
    repeat: int

    def __call__(self, name: str, task: Task, length: int, beginning: str = "") -> _Prompt:
        """A prompt of nearly `length` tokens whose document begins with a sentence.

        Raises:
            BadUsage: not even the sentences that it needs fit.
        """

        def count(sources: Sequence[Source], question: Question) -> int:
            return self.server.count_prompt(_with(beginning, sources), question)

        try:
            context: Context = build_context(
                name,
                task,
                language="en",
                length=length,
                number=self.repeat,
                seed=self.seed,
                questions=1,
                count_prompt=count,
            )
        except ValueError as error:
            raise BadUsage(f"the case {name!r} cannot be made: {error}") from error
        sources, (question,) = _with(beginning, context.sources), context.questions
        return _Prompt(sources, question, self.server.count_prompt(sources, question))


def _with(beginning: str, sources: Sequence[Source]) -> tuple[Source, ...]:
    """The sources with a sentence before everything that the first one says."""
    if not beginning:
        return tuple(sources)
    first, *others = sources
    excerpt, *rest = first.excerpts or (Excerpt(1, ""),)
    return replace(first, excerpts=(replace(excerpt, text=f"{beginning}\n\n{excerpt.text}"), *rest)), *others


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A task that draws nothing."""

    planted: Planted

    def __call__(self, draw: Random, language: Language, questions: int) -> Planted:
        del draw, language, questions
        return self.planted


def _asked(question: Question) -> Task:
    """Plants nothing and asks one thing."""
    return _Fixed(Planted(((),), (question,)))


def _coded(code: str) -> Task:
    """The code is the only thing in which it differs from others of its kind."""
    lead = "The access code of the amber gate is"
    question = Question("What is the access code of the amber gate?", (code,), lead)
    return _Fixed(Planted(((f"{lead} {code}.",),), (question,)))


def _summary() -> Question:
    return Question("Summarise the document in two or three sentences.", (), "", _SUMMARY_ANSWER)


def _fact(draw: Random, told: str, asked: str, words: Any) -> tuple[str, str, str]:
    (value,) = words(draw, "en", 1)
    return told.format(value=value), asked, value


def _document_tokens(limit: int, turns: int) -> int:
    """Tokens of the first question with its document, so that all turns fit."""
    return max(_LEAST_DOCUMENT, min(limit // 4, limit - turns * _TURN))


async def _one(way: _Way, case: str, place: int, prompt: _Prompt, fault: _Fault) -> Sent:
    messages = messages_of(prompt.sources, prompt.question, way.arm.keep)
    tokens = way.tokens(messages, prompt.tokens)
    served = await way.serve(messages, uuid.uuid4().hex, prompt.question.max_tokens)
    gold = prompt.question.gold
    recalled = contains(served.text, gold) if gold and not served.error else None
    return Sent(case, way.arm.name, way.repeat, place, tokens, recalled, fault(served, tokens), served)


async def _short(way: _Way, prompts: _Prompts) -> list[Sent]:
    return [way.record(await _one(way, "short question", 0, prompts.short, _failed))]


async def _summarise(way: _Way, prompts: _Prompts) -> list[Sent]:
    return [way.record(await _one(way, "summary", 0, prompts.summary, _unfinished))]


async def _near(way: _Way, prompts: _Prompts) -> list[Sent]:
    window = way.server.window if isinstance(way.server, EngineServer) else None
    near = way.record(await _one(way, "near the limit", 0, prompts.near, _cut))
    over = await _one(
        way, "near the limit", 1, prompts.over, lambda served, tokens: _not_refused(served, tokens, window)
    )
    # Refusing is what it is for: what such a prompt says is nobody's to recall.
    return [near, way.record(replace(over, recalled=None))]


async def _converse(way: _Way, prompts: _Prompts) -> list[Sent]:
    """A conversation as the service builds it: the document before the first question, the answers word for word."""
    salt = uuid.uuid4().hex
    block = way.server.block if isinstance(way.server, EngineServer) else _FOREIGN_BLOCK
    sent: list[Sent] = []
    earlier: list[Message] = []
    for place, (text, value) in enumerate(_turns(prompts.facts, way.turns)):
        if earlier:
            messages = build_messages([], text, earlier=earlier)
        else:
            messages = messages_of(prompts.talk, Question(text, (), ""), way.arm.keep)
        tokens = way.tokens(messages, None)
        served = await way.serve(messages, salt, _TURN_ANSWER)
        fault = _cut(served, tokens) or (_read_again(sent[-1].served, served, block) if sent else None)
        recalled = contains(served.text, [value]) if value and not served.error else None
        one = Sent("conversation", way.arm.name, way.repeat, place, tokens, recalled, fault, served)
        sent.append(way.record(one))
        if served.error:
            # Without this answer there is nothing to go on from.
            break
        earlier = [*messages, Message("assistant", served.text)]
    return sent


async def _together(way: _Way, prompts: _Prompts) -> list[Sent]:
    all_codes = [prompt.question.gold[0] for prompt in prompts.together]

    async def one(place: int, prompt: _Prompt) -> Sent:
        others = [code for code in all_codes if code != prompt.question.gold[0]]
        return await _one(way, "at once", place, prompt, lambda served, tokens: _mixed_up(served, tokens, others))

    sent = await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(prompts.together)))
    return [way.record(each) for each in sent]


_PLAYS: Mapping[str, _Play] = {
    "short question": _short,
    "summary": _summarise,
    "near the limit": _near,
    "conversation": _converse,
    "at once": _together,
}


def _turns(facts: Sequence[tuple[str, str, str]], turns: int) -> Iterator[tuple[str, str | None]]:
    """What the user says, and what must be recalled then: facts, talk about the document, the facts again."""
    for told, _, _ in facts:
        yield told, None
    for number in range(turns - 2 * len(facts)):
        yield _TALK[number % len(_TALK)], None
    for _, asked, value in facts:
        yield asked, value


def _failed(served: Served, _tokens: int | None) -> str | None:
    return served.error


def _cut(served: Served, tokens: int | None) -> str | None:
    """Whether it failed, or the model was given less than was sent; a foreign template may add some."""
    if served.error or tokens is None or served.prompt_tokens is None or served.prompt_tokens >= tokens:
        return served.error
    return f"the prompt was cut: {tokens:,} tokens were sent and {served.prompt_tokens:,} read"


def _unfinished(served: Served, tokens: int | None) -> str | None:
    if fault := _cut(served, tokens):
        return fault
    if not served.text.strip():
        return "the answer is empty"
    return None if served.finish_reason else "the answer did not come to an end"


def _not_refused(served: Served, tokens: int | None, window: int | None) -> str | None:
    """A prompt over the window is refused as such, by a foreign server in whatever words; a larger window takes it."""
    if served.error:
        named = served.error.startswith(PromptTooLong.__name__)
        refused = named if window is not None else not served.error.startswith(_LATE)
        return None if refused else served.error
    if window is not None and tokens is not None and tokens + _ANSWER > window:
        return f"{tokens:,} tokens were answered instead of refused; the window is {window:,} tokens"
    return _cut(served, tokens)


def _read_again(before: Served, served: Served, block: int) -> str | None:
    """Whether a turn computed more than what it adds to the one before; servers that tell no cached tokens pass."""
    if before.prompt_tokens is None or served.prompt_tokens is None or served.cached_tokens is None:
        return None
    again = before.prompt_tokens - served.cached_tokens
    if again <= block + _SEAM:
        return None
    return f"{again:,} of {before.prompt_tokens:,} tokens of the turns before were computed again"


def _mixed_up(served: Served, tokens: int | None, others: Sequence[str]) -> str | None:
    if fault := _cut(served, tokens):
        return fault
    strange = [code for code in others if contains(served.text, [code])]
    return f"the answer holds {strange[0]!r}, which only another prompt has" if strange else None


def _case(name: str, arm: str, sent: Sequence[Sent], missing: str | None) -> Case:
    mine = [one for one in sent if (one.case, one.arm) == (name, arm)]
    answered = [one.served for one in mine if not one.served.error]
    faults = dict.fromkeys(one.fault for one in mine if one.fault)
    recalled = [one.recalled for one in mine if one.recalled is not None]
    return Case(
        name=name,
        arm=arm,
        n=len(mine),
        passed=sum(one.fault is None for one in mine),
        prompt_tokens=_median([one.prompt_tokens for one in answered]),
        ttft=_median([one.ttft for one in answered]),
        itl=_median([gap for one in answered for gap in one.gaps or ()]),
        total=_median([one.total for one in answered]),
        faults=(*([missing] if missing else []), *faults),
        recalled=fmean(recalled) if recalled else None,
    )


def _median(values: Sequence[float | None]) -> float | None:
    """Of what is known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
