"""Time to first token, paired: every arm reads the same unique prompts and gives one token.

Lengths go upwards until the first one that fails. Arms that share an engine alternate; engines run one after another.
Prompts are sent one after another, or some at once, and then the next ones when all of those have been read.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import psutil

from eval.arms import Arm, by_engine
from eval.errors import BadUsage, NotMeasured
from eval.identity import device_memory, peak_memory
from eval.results import Results
from eval.serve import EngineServer, OpenServer, messages_of, probe
from eval.served import Served, Server
from eval.statistics import Interval, ratio_of_geometric_means
from eval.tasks import TASKS
from eval.tasks.task import Context, build_context
from serving.engine import Message
from serving.errors import StartError

_TASK = "facts-single"


@dataclass(frozen=True, slots=True)
class Timed:
    """One request of one arm; those of a round were sent at once."""

    arm: str
    length: int
    round: int
    number: int
    served: Served


@dataclass(frozen=True, slots=True)
class Row:
    """One arm at one length. Times in seconds, medians over the prompts, but the longest step, which is the maximum.

    `last` is the median over the rounds of the time until all of a round's prompts have their first token, and
    `tokens_per_s` is what was read in that time. `ratio` is the arm's TTFT over the control's: of geometric means, with
    its bootstrap interval over the prompts. It is None for the control. `memory` is the peak of everything that the
    arm's engine has done so far.
    """

    arm: str
    length: int
    n: int
    prompt_tokens: float | None
    ttft: float
    queue: float | None
    read: float | None
    rest: float | None
    last: float
    longest_step: float | None
    tokens_per_s: float | None
    cached_tokens: int | None
    paths: tuple[str, ...]
    density: float | None
    memory: int | None
    ratio: Interval | None
    faster: float | None


@dataclass(frozen=True, slots=True)
class Speed:
    """A whole run. `limits` tells for each arm that failed the last good length and why it went no further."""

    rows: tuple[Row, ...]
    limits: tuple[str, ...]
    unwanted_hits: int | None


async def run_speed(
    arms: Sequence[Arm],
    lengths: Sequence[int],
    repeats: int,
    open_server: OpenServer,
    *,
    seed: int,
    results: Results,
    say: Callable[[str], None],
    step: Callable[[], None],
    at_once: int = 1,
    known: Sequence[Timed] = (),
) -> Speed:
    """Read `repeats` rounds of unique prompts of each length through every arm.

    Args:
        at_once: prompts of a round.
        known: requests of a run that was broken off; rounds that an arm has read wholly are not read again.
        open_server: what serves a variant, such as `serve.opened` with its settings.
        step: called after each timed prompt of each arm.

    Raises:
        BadUsage: an arm cannot be served as it says.
        NotMeasured: nothing could be read at all.
        StartError: the engine of the first arm does not start.
    """
    prompts: dict[int, list[Context]] = {}
    read = Counter((one.arm, one.length, one.round) for one in known if one.served.error is None)
    whole = {one for one, count in read.items() if count >= at_once}
    timed = [one for one in known if (one.arm, one.length, one.round) in whole]
    limits: list[str] = []
    memory: dict[tuple[str, int], int | None] = {}
    if short := next((arm for arm in arms if arm.keep < 1), None):
        raise BadUsage(f"the arm {short.name!r} reads shorter prompts, so its speed cannot be compared")
    await probe(arms, open_server)
    for place, (variant, group) in enumerate(by_engine(arms)):
        try:
            async with open_server(variant) as server:
                for arm in group:
                    server.require(arm)
                results.add("engine", {"variant": str(variant), **server.about})
                # What the control cannot read, nobody is asked to.
                for length in sorted(lengths if place == 0 else prompts):
                    failure = _prompts(prompts, length, repeats * at_once, seed, server) if place == 0 else None
                    if failure is None:
                        run = _Run(length, prompts[length], at_once, server, results, step, whole)
                        new, failure = await _time_length(group, run)
                        timed += new
                    memory |= {(arm.name, length): _memory(variant.url) for arm in group}
                    if failure is not None:
                        good = max((one.length for one in timed if one.arm == group[0].name), default=None)
                        limits.append(_limit(group, length, good, failure))
                        say(limits[-1])
                        break
        except (StartError, BadUsage) as error:
            if not timed:
                raise
            # One variant of a sweep may not exist on this machine; the others still count.
            limits.append(f"{', '.join(arm.name for arm in group)}: not measured, {error}")
            say(limits[-1])
    if not timed:
        raise NotMeasured(f"nothing could be read; {limits[0]}")
    rows = [
        _row(arm.name, arms[0].name, length, timed, memory[arm.name, length], seed)
        for length in sorted(lengths)
        for arm in arms
        if any((one.arm, one.length) == (arm.name, length) for one in timed)
    ]
    return Speed(tuple(rows), tuple(limits), _unwanted_hits(arms, timed))


def unique_prompts(server: Server, number: int, length: int, seed: int) -> list[list[Message]]:
    """Prompts of so many tokens, each of its own documents with a question.

    Raises:
        BadUsage: the server is no engine of this process, which counts the tokens, or such prompts do not fit it.
    """
    made: dict[int, list[Context]] = {}
    if told := _prompts(made, length, number - 1, seed, server):
        raise BadUsage(f"prompts of {length:,} tokens cannot be made: {told}")
    return [messages_of(context.sources, context.questions[0]) for context in made[length]]


def _prompts(prompts: dict[int, list[Context]], length: int, timed: int, seed: int, server: Server) -> str | None:
    """Make the prompts of a length, one more than is timed; says why when the model cannot read them."""
    if not isinstance(server, EngineServer):
        raise BadUsage("the first arm is the control and counts the tokens; let it be one of this machine")
    if length >= server.window:
        return f"the window is {server.window:,} tokens"
    try:
        prompts[length] = [
            build_context(
                _TASK,
                TASKS[_TASK],
                language="en",
                length=length,
                number=number,
                seed=seed,
                questions=1,
                count_prompt=server.count_prompt,
            )
            for number in range(timed + 1)
        ]
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class _Run:
    """What is read of one length, how many at once, and by whom; `whole` are rounds of arms that are not read again."""

    length: int
    contexts: Sequence[Context]
    at_once: int
    server: Server
    results: Results
    step: Callable[[], None]
    whole: Collection[tuple[str, int, int]]


async def _time_length(group: Sequence[Arm], run: _Run) -> tuple[list[Timed], str | None]:
    """The timed requests of a length, and why it failed if it did. The last prompt warms each arm up."""
    timed: list[Timed] = []
    *counted, spare = run.contexts
    rounds = range(0, len(counted), run.at_once)
    for arm in group:
        if all((arm.name, run.length, number) in run.whole for number in range(len(rounds))):
            continue
        if error := (await _serve_once(spare, arm, run.server)).error:
            return [], f"{arm.name}: {error}"
    for number, start in enumerate(rounds):
        contexts = counted[start : start + run.at_once]
        for arm in group if number % 2 == 0 else reversed(group):
            if (arm.name, run.length, number) in run.whole:
                continue
            together = await asyncio.gather(*(_serve_once(context, arm, run.server) for context in contexts))
            for place, served in enumerate(together, start):
                one = Timed(arm.name, run.length, number, place, served)
                run.results.add("request", asdict(one))
                timed.append(one)
            if error := next((served.error for served in together if served.error), None):
                return [], f"{arm.name}: {error}"
            run.step()
    return timed, None


async def _serve_once(context: Context, arm: Arm, server: Server) -> Served:
    messages: list[Message] = messages_of(context.sources, context.questions[0], arm.keep)
    return await server.serve(messages, arm, salt=uuid.uuid4().hex, max_tokens=1)


def _limit(group: Sequence[Arm], length: int, good: int | None, failure: str) -> str:
    names = ", ".join(arm.name for arm in group)
    last = "no length before it" if good is None else f"the last good length is {good:,}"
    return f"{names}: {length:,} tokens failed ({failure}); {last}"


def _row(arm: str, control: str, length: int, timed: Sequence[Timed], memory: int | None, seed: int) -> Row:
    mine = [one for one in timed if (one.arm, one.length) == (arm, length)]
    served = {one.number: one.served for one in mine}
    controls = {one.number: one.served for one in timed if (one.arm, one.length) == (control, length)}
    ratio = faster = None
    if arm != control and (numbers := sorted(served.keys() & controls.keys())):
        pairs = [(_ttft(served[number]), _ttft(controls[number])) for number in numbers]
        ratio = ratio_of_geometric_means([ttft for ttft, _ in pairs], [other for _, other in pairs], seed)
        faster = fmean(ttft < other for ttft, other in pairs)
    ones = list(served.values())
    rounds = [[one.served for one in mine if one.round == number] for number in sorted({one.round for one in mine})]
    tokens = _known(fmean, [one.prompt_tokens for one in ones])
    return Row(
        arm=arm,
        length=length,
        n=len(ones),
        prompt_tokens=tokens,
        ttft=median(_ttft(one) for one in ones),
        queue=_known(median, [one.queue for one in ones]),
        read=_known(median, [one.read for one in ones]),
        rest=_known(median, [one.rest for one in ones]),
        last=median(max(map(_ttft, together)) for together in rounds),
        longest_step=_known(max, [one.longest_step for one in ones]),
        tokens_per_s=_known(median, [_throughput(together) for together in rounds]),
        cached_tokens=_known(max, [one.cached_tokens for one in ones]),
        paths=tuple(sorted({one.path for one in ones})),
        density=_known(fmean, [one.density for one in ones]),
        memory=memory,
        ratio=ratio,
        faster=faster,
    )


def _known(measure: Callable[[list[Any]], Any], values: Sequence[Any]) -> Any:
    """The measure of the values, or None when one of them is not known."""
    return None if any(value is None for value in values) else measure(list(values))


def _throughput(together: Sequence[Served]) -> float | None:
    """Prompt tokens a second, until the last of the prompts that were sent at once has been read."""
    tokens = _known(sum, [one.prompt_tokens for one in together])
    return None if tokens is None else tokens / max(map(_ttft, together))


def _ttft(served: Served) -> float:
    if served.ttft is None:
        raise NotMeasured(f"a request of {served.prompt_tokens} tokens ended without a token and without an error")
    return served.ttft


def _unwanted_hits(arms: Sequence[Arm], timed: Sequence[Timed]) -> int | None:
    """How many requests of cold arms found something cached; None when an engine does not tell."""
    cold = {arm.name for arm in arms if not arm.warm}
    cached = [one.served.cached_tokens for one in timed if one.arm in cold]
    return None if any(tokens is None for tokens in cached) else sum(1 for tokens in cached if tokens)


def _memory(url: str | None) -> int | None:
    """Bytes: the device's where there is one, else the peak of this process and the engine's; unknown for a server."""
    if url is not None:
        return None
    own = psutil.Process()
    return device_memory() or peak_memory([own, *own.children(recursive=True)])
