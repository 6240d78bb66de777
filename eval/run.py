"""A whole run: the stages of a suite, written down as they go, and what they found together.

A run has a folder: `config.json` says what is measured, `results.jsonl` has a line for each request and one for each
stage that is done, `findings.json` the findings, and the report is written from those. A run that was broken off goes
on with the first request that has no line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from app.services import Services
from eval.arms import Variant, by_engine
from eval.asked import WAYS, measure_asked
from eval.cases import requests_of, run_cases
from eval.datasets import Dataset
from eval.errors import BadUsage, EvalError, NotWritten
from eval.findings import Asked, Case, Findings, Level, Privacy
from eval.gates import judge
from eval.load import Load, measure_levels
from eval.plan import AskStage, CasesStage, LoadStage, Plan, PrivacyStage, SpeedStage
from eval.privacy import Find, measure_privacy
from eval.quality import Answer, Report, Suite, run_quality
from eval.results import Results, continued, read_results
from eval.serve import OpenServer
from eval.served import Server
from eval.speed import Speed, Timed, run_speed, unique_prompts
from eval.tasks.handbook import handbook
from serving.engine import Message
from serving.errors import ServingError

Found = TypeVar("Found")
Progress = Callable[[int, str], AbstractContextManager[Callable[[], None]]]

_TIMED = TypeAdapter(Timed)
_ANSWER = TypeAdapter(Answer)
# What may differ between a run and its continuation.
_PASSING = ("date", "command", "finished")


@dataclass(frozen=True, slots=True)
class Folder:
    """Where a run lies."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def results(self) -> Path:
        return self.path / "results.jsonl"

    @property
    def findings(self) -> Path:
        return self.path / "findings.json"

    def begin(self, about: Mapping[str, Any]) -> None:
        """Write down what is to be measured.

        Raises:
            BadUsage: there is a run already, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.config.open("x", encoding="utf-8") as stream:
                json.dump(about, stream, ensure_ascii=False, indent=2)
        except FileExistsError as error:
            raise BadUsage(
                f"there is a run in {str(self.path)!r} already; go on with it by --resume, or name another --out"
            ) from error
        except OSError as error:
            raise BadUsage(f"{str(self.path)!r} cannot be written ({error.strerror}); name another --out") from error

    def about(self) -> dict[str, Any]:
        """What was to be measured.

        Raises:
            BadUsage: there is no run here.
        """
        try:
            about: dict[str, Any] = json.loads(self.config.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise BadUsage(f"{str(self.path)!r} holds no run: {error}") from error
        return about

    def require_same(self, about: Mapping[str, Any]) -> None:
        """Refuse to go on with another measurement.

        Raises:
            BadUsage: it differs in more than its date.
        """
        before, now = self.about(), json.loads(json.dumps(about))
        if differing := [key for key in before | now if key not in _PASSING and before.get(key) != now.get(key)]:
            raise BadUsage(
                f"the run in {str(self.path)!r} was begun with another {' and '.join(differing)}; begin a new one"
            )

    def save(self, findings: Findings) -> None:
        """Keep the findings; the answers stay in the results.

        Raises:
            NotWritten: they cannot be written.
        """
        try:
            self.findings.write_text(json.dumps(_plain(findings), ensure_ascii=False, indent=1), "utf-8")
        except OSError as error:
            raise NotWritten(f"{str(self.findings)!r} cannot be written ({error.strerror}); make room") from error


def read_findings(file: Path) -> Findings:
    """Findings that were saved.

    Raises:
        BadUsage: there are none.
    """
    try:
        return TypeAdapter(Findings).validate_python(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError) as error:
        told = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise BadUsage(f"{str(file)!r} holds no findings of a finished run: {told}") from error


def read_timed(file: Path) -> tuple[Timed, ...]:
    """The single requests of a run's speed; none where there is no such file.

    Raises:
        BadUsage: it cannot be read.
    """
    return _Before.read(file).timed if file.exists() else ()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run measures: `server` serves a variant, `service` runs a whole one in an empty folder, `find` tells the
    personal data in a text."""

    server: OpenServer
    service: Callable[[Path], AbstractAsyncContextManager[Services]]
    find: Find


class Servers:
    """Opens servers. The engine of this machine stays open for the next stage, until another one is needed."""

    def __init__(self, open_server: OpenServer) -> None:
        self._open = open_server
        self._kept: tuple[Variant, Server] | None = None
        self._stack = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def __call__(self, variant: Variant) -> AsyncIterator[Server]:
        if variant.url is not None:
            async with self._open(variant) as remote:
                yield remote
            return
        if self._kept is None or self._kept[0] != variant:
            await self.close()
            self._kept = variant, await self._stack.enter_async_context(self._open(variant))
        yield self._kept[1]

    async def close(self) -> None:
        """Stop the engine that is open, if there is one."""
        self._kept = None
        await self._stack.aclose()


async def measure(
    plan: Plan,
    folder: Folder,
    about: Mapping[str, Any],
    parts: Parts,
    *,
    seed: int,
    say: Callable[[str], None],
    progress: Progress,
    baseline: tuple[str, Findings] | None = None,
    own: Dataset | None = None,
) -> Findings:
    """Run the stages of a plan that are not done yet, and judge what they found.

    A stage that fails is a note and a gate that is not passed; the others still run.

    Args:
        folder: begun, with what an earlier try has measured.
        baseline: a run to hold this one against, with its name.
        own: what is asked in the place of the suite's tasks.

    Raises:
        BadUsage: an arm cannot be served as it says, before anything was measured.
        NotWritten: a result cannot be written.
        StartError: the engine of the first stage does not start.
    """
    failed: list[str] = []
    notes: list[str] = []
    if own is not None:
        notes.append(
            f"answers are about {own.name!r}, licence {own.licence or 'not told'}, source {own.source or 'not told'}"
        )
    servers = Servers(parts.server)
    speed, quality = None, None
    cases: tuple[Case, ...] = ()
    levels: tuple[Level, ...] = ()
    asked: tuple[Asked, ...] = ()
    privacy = None
    with continued(folder.results) as results:
        before = _Before.read(folder.results)
        run = _Run(plan, seed, parts, servers, results, before, say, progress, failed)
        try:
            if plan.speed is not None:
                speed = await run.stage("speed", Speed, partial(_speed, run, plan.speed))
            if plan.quality is not None:
                quality = await run.stage("quality", Report, partial(_quality, run, plan.quality, own))
            if plan.cases is not None:
                cases = await run.stage("cases", tuple[Case, ...], partial(_cases, run, plan.cases)) or ()
            if plan.load is not None:
                levels = await run.stage("load", tuple[Level, ...], partial(_load, run, plan.load)) or ()
            if plan.ask is not None:
                asked = await run.stage("ask", tuple[Asked, ...], partial(_ask, run, plan.ask)) or ()
            if plan.privacy is not None:
                privacy = await run.stage("privacy", Privacy, partial(_privacy, run, plan.privacy))
        finally:
            await servers.close()
    after = _Before.read(folder.results)
    findings = Findings(
        about=about,
        suite=plan.name,
        arms=tuple(dict.fromkeys(arm.name for arm in (*plan.arms, *(plan.speed_arms if plan.speed else ())))),
        margin=plan.quality.margin if plan.quality else 0.0,
        speed=speed,
        quality=quality and replace(quality, answers=after.answers),
        cases=cases,
        levels=levels,
        asked=asked,
        privacy=privacy,
        kv_tokens=after.kv_tokens,
        notes=(*notes, *failed),
        baseline=baseline and baseline[0],
    )
    return replace(findings, gates=judge(findings, baseline and baseline[1]))


@dataclass(frozen=True, slots=True)
class _Before:
    """What an earlier try has left in the results."""

    timed: tuple[Timed, ...]
    answers: tuple[Answer, ...]
    stages: Mapping[str, Any]
    kv_tokens: int | None

    @classmethod
    def read(cls, file: Path) -> _Before:
        timed: dict[Any, Timed] = {}
        answers: dict[Any, Answer] = {}
        stages: dict[str, Any] = {}
        kv_tokens = None
        try:
            for record in read_results(file):
                kind = record.pop("kind", None)
                if kind == "request" and "length" in record:
                    one = _TIMED.validate_python(record)
                    timed[one.arm, one.length, one.round, one.number] = one
                elif kind == "answer":
                    answer = _ANSWER.validate_python(record)
                    answers[answer.arm, answer.context, answer.question] = answer
                elif kind == "stage":
                    stages[record["name"]] = record["found"]
                elif kind == "engine":
                    kv_tokens = kv_tokens or record.get("kv_tokens")
        except (ValidationError, KeyError) as error:
            raise BadUsage(f"{str(file)!r} is not of this version's runs; begin a new one") from error
        return cls(tuple(timed.values()), tuple(answers.values()), stages, kv_tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    """What every stage needs."""

    plan: Plan
    seed: int
    parts: Parts
    servers: Servers
    results: Results
    before: _Before
    say: Callable[[str], None]
    progress: Progress
    failed: list[str]

    async def stage(self, name: str, kind: type[Found], run: Callable[[], Awaitable[Found]]) -> Found | None:
        """What a stage finds, or has found before; None if it fails."""
        if name in self.before.stages:
            return TypeAdapter(kind).validate_python(self.before.stages[name])
        self.say(f"{name}: begins")
        try:
            found = await run()
        except NotWritten:
            raise
        except (EvalError, ServingError) as error:
            # Whatever was asked for wrongly shows at once.
            if not (self.failed or self.before.timed or self.before.answers or self.before.stages):
                raise
            self.failed.append(f"{name}: not measured, {error}")
            self.say(self.failed[-1])
            return None
        self.results.add("stage", {"name": name, "found": _plain(found)})
        return found


async def _speed(run: _Run, stage: SpeedStage) -> Speed:
    arms = run.plan.speed_arms
    total = len(arms) * len(stage.lengths) * stage.repeats
    done = len({(one.arm, one.length, one.round) for one in run.before.timed})
    with run.progress(max(1, total - done), "rounds of speed") as step:
        return await run_speed(
            arms,
            stage.lengths,
            stage.repeats,
            run.servers,
            seed=run.seed,
            results=run.results,
            say=run.say,
            step=step,
            known=run.before.timed,
        )


async def _quality(run: _Run, suite: Suite, own: Dataset | None) -> Report:
    arms = run.plan.arms
    total = (len(own.contexts) if own else sum(1 for _ in suite.contexts)) * len(arms)
    done = len({(answer.arm, answer.context) for answer in run.before.answers})
    with run.progress(max(1, total - done), "contexts of quality") as step:
        return await run_quality(
            arms,
            suite,
            run.servers,
            seed=run.seed,
            results=run.results,
            step=step,
            known=run.before.answers,
            own=own,
        )


async def _cases(run: _Run, stage: CasesStage) -> tuple[Case, ...]:
    arms = run.plan.whole_arms
    total = requests_of(len(arms), repeats=stage.repeats, at_once=stage.at_once, turns=stage.turns)
    with run.progress(total, "requests of cases") as step:
        return await run_cases(
            arms,
            run.servers,
            seed=run.seed,
            results=run.results,
            step=step,
            repeats=stage.repeats,
            longest=stage.longest,
            at_once=stage.at_once,
            turns=stage.turns,
        )


async def _load(run: _Run, stage: LoadStage) -> tuple[Level, ...]:
    """The same prompts through each arm, one arm after another."""
    arms = run.plan.whole_arms
    load = Load(stage.at_once, stage.requests, stage.max_tokens, stage.timeout_s)
    prompts: list[list[Message]] = []
    levels: list[Level] = []
    with run.progress(len(arms) * load.requests, "requests of load") as step:
        for variant, group in by_engine(arms):
            async with run.servers(variant) as server:
                prompts = prompts or unique_prompts(server, load.prompts, stage.prompt_tokens, run.seed)
                for arm in group:
                    levels += await measure_levels(
                        server, arm, prompts, load, results=run.results, done=lambda _: step()
                    )
    return tuple(levels)


async def _ask(run: _Run, stage: AskStage) -> tuple[Asked, ...]:
    """A handbook through the service, whose engine is its own."""
    await run.servers.close()
    made = handbook(Random(f"{run.seed}/handbook"), "en", pages=stage.pages, facts=stage.questions)
    data = "\f".join(made.pages).encode()
    with (
        run.progress(stage.questions * len(WAYS), "questions about a handbook") as step,
        TemporaryDirectory() as folder,
    ):
        async with run.parts.service(Path(folder)) as services:
            run.say("starting the engine, about a minute")
            return await measure_asked(services, "handbook.txt", data, made.facts, results=run.results, step=step)


async def _privacy(run: _Run, stage: PrivacyStage) -> Privacy:
    return await asyncio.to_thread(measure_privacy, run.parts.find, stage.values, run.seed)


def _plain(found: Any) -> Any:
    """Findings as JSON can hold them, without the single answers, which the results have."""

    def plain(data: Any) -> Any:
        if isinstance(data, Mapping):
            return {str(name): [] if name == "answers" else plain(value) for name, value in data.items()}
        if isinstance(data, list | tuple):
            return [plain(one) for one in data]
        # As text it can be read back.
        return str(data) if isinstance(data, float) and not math.isfinite(data) else data

    return plain([asdict(one) for one in found] if isinstance(found, tuple) else asdict(found))
