"""What a run of `foreword eval run` consists of: a suite file's stages, with what decides fixed before the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from eval.arms import Arm, parse_arms
from eval.errors import BadUsage
from eval.quality import Suite, load_suite, read_suite, suite_file, suite_names

_STRICT = ConfigDict(extra="forbid", frozen=True)


@checked(config=_STRICT)
class SpeedStage:
    """Time to first token: `repeats` prompts of each length in tokens. `beside` are arms that only this stage has."""

    lengths: tuple[int, ...]
    repeats: int = 5
    beside: tuple[str, ...] = ()


@checked(config=_STRICT)
class CasesStage:
    """Everyday cases, `repeats` times each, with prompts of at most `longest` tokens (None: the window).

    `at_once` long prompts are sent together, and a conversation has so many `turns`.
    """

    repeats: int = 3
    longest: int | None = None
    at_once: int = 4
    turns: int = 20


@checked(config=_STRICT)
class LoadStage:
    """Requests of `prompt_tokens` kept in work, `requests` of them for each number at once, within `timeout_s`."""

    at_once: tuple[int, ...] = (1, 2, 4, 8)
    requests: int = 16
    prompt_tokens: int = 1024
    max_tokens: int = 32
    timeout_s: float = 300.0


@checked(config=_STRICT)
class AskStage:
    """A generated handbook of so many pages through the service: upload, questions, answers and their pages."""

    pages: int = 12
    questions: int = 12


@checked(config=_STRICT)
class PrivacyStage:
    """Planted personal data: so many values of each kind."""

    values: int = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """A suite, and what of it is run. A stage that is None is left out."""

    name: str
    about: str
    arms: tuple[Arm, ...]
    quality: Suite | None
    speed: SpeedStage | None
    cases: CasesStage | None
    load: LoadStage | None
    ask: AskStage | None
    privacy: PrivacyStage | None

    @property
    def whole_arms(self) -> tuple[Arm, ...]:
        """The arms that read whole prompts; what the others do is of use in answers only."""
        return tuple(arm for arm in self.arms if arm.keep == 1)

    @property
    def speed_arms(self) -> tuple[Arm, ...]:
        """The whole arms, and those beside them: the A/A control, and a warm one, whose answers are the others'."""
        beside = parse_arms(",".join(self.speed.beside)) if self.speed and self.speed.beside else ()
        names = {arm.name for arm in self.arms}
        return (*self.whole_arms, *(arm for arm in beside if arm.name not in names))


_STAGES: Mapping[str, type] = {
    "speed": SpeedStage,
    "cases": CasesStage,
    "load": LoadStage,
    "ask": AskStage,
    "privacy": PrivacyStage,
}
_DEFAULT_ARMS = "exact,sparse"


def load_plan(name: str, arms: str | None, repeats: int | None) -> Plan:
    """A suite of the package by name, or a TOML file by path, with other arms or repeats if they are given.

    Raises:
        BadUsage: there is none, it lacks something, or holds what no stage has.
    """
    content = read_suite(name)
    quality = load_suite(name) if "contexts" in content else None
    if unknown := set(content) - set(_STAGES) - {"arms", "verdict", "contexts"}:
        known = ", ".join(("arms", "verdict", "contexts", *_STAGES))
        raise BadUsage(f"the suite {name!r} has a part {min(unknown)!r}; parts are {known}")
    stages: dict[str, Any] = dict.fromkeys(_STAGES)
    for stage, kind in _STAGES.items():
        if stage in content:
            try:
                stages[stage] = TypeAdapter(kind).validate_python(content[stage])
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise BadUsage(f"the suite {name!r} has [{stage}] {where}: {first['msg']}") from error
    if repeats is not None:
        for stage in ("speed", "cases"):
            stages[stage] = stages[stage] and replace(stages[stage], repeats=repeats)
    if not (quality or any(stages.values())):
        raise BadUsage(f"the suite {name!r} measures nothing; give it one of contexts, {', '.join(_STAGES)}")
    chosen = parse_arms(arms or str(content.get("arms", _DEFAULT_ARMS)))
    return Plan(name=name, about=_about(suite_file(name)), arms=chosen, quality=quality, **stages)


def plans() -> Iterator[tuple[str, str]]:
    """Name and description of each suite of the package."""
    for name in suite_names():
        yield name, _about(suite_file(name))


def _about(file: Path) -> str:
    """The comment that a suite file begins with."""
    lines = file.read_text("utf-8").splitlines()
    count = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.removeprefix("#").strip() for line in lines[:count])
