"""Arms: named ways to serve the same prompts. The first arm of a run is the control.

An arm is written as a name and, after plus signs, what differs: `exact`, `warm+chunk=2048`, `exact+quant=fp8`,
`exact+url=http://127.0.0.1:8100`, `sparse+select=alpha:0.02/tile=128`, `sparse+published=2`. Arms that need the same
engine share one, in one process, on the same weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eval.errors import BadUsage
from serving.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Variant:
    """What an engine is started with, over the service's settings; None leaves a setting as it is.

    `url` names a server with the OpenAI API instead, which is not started but used.
    """

    chunk: int | None = None
    kv: str | None = None
    quant: str | None = None
    dtype: str | None = None
    model: str | None = None
    url: str | None = None

    def apply(self, config: EngineConfig) -> EngineConfig:
        """The service's engine settings with these in their place."""
        arguments: dict[str, Any] = dict(config.engine_args)
        for name, value in (("kv_cache_dtype", self.kv), ("quantization", self.quant), ("dtype", self.dtype)):
            if value is not None:
                arguments[name] = None if value == "none" else value
        return replace(
            config,
            model=self.model or config.model,
            token_budget=self.chunk or config.token_budget,
            engine_args=arguments,
        )

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in _KEYS)
        return "+".join(f"{name}={value}" for name, value in given if value is not None)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve prompts.

    `warm`: the prompt without its question is read before the clock starts. `accelerated`: sparse prefill, else exact;
    `selector` is then how it chooses what to read, in the engine's notation; None is the engine's default. `published`
    keeps that many times the density that is published for prompts of such a length, whatever the prompt holds: for
    weights without a meaning, which have nothing to choose by. `keep` is the share of each document that the model is
    given; below 1 the arm is broken on purpose, so that the measures can be seen to notice.
    """

    name: str
    variant: Variant = field(default_factory=Variant)
    warm: bool = False
    accelerated: bool = False
    selector: str | None = None
    published: float | None = None
    keep: float = 1.0

    def at(self, length: int) -> Arm:
        """This arm for prompts of so many tokens."""
        if self.published is None:
            return self
        density = min(self.published * published_density(length), _ALMOST_ALL)
        return replace(self, selector=f"budget:{density:.4g},late={density:.4g}")


_KEYS = ("chunk", "kv", "quant", "dtype", "model", "url")
_SELECT, _PUBLISHED = "select", "published"
_ALL_KEYS = (*_KEYS, _SELECT, _PUBLISHED)
# Tokens and the share of the attention that FlashPrefill V2 kept of them (arXiv:2608.19758).
_DENSITIES = ((16_384, 0.29), (32_768, 0.176), (65_536, 0.1), (131_072, 0.049))
# A budget of 1 would be one token.
_ALMOST_ALL = 0.999
_NAMED: Mapping[str, Arm] = {
    "exact": Arm("exact"),
    # The same as `exact` under another name: what differs between the two is the noise of the measurement.
    "again": Arm("again"),
    "warm": Arm("warm", warm=True),
    "sparse": Arm("sparse", accelerated=True),
    "half": Arm("half", keep=0.5),
}


def parse_arms(text: str) -> tuple[Arm, ...]:
    """Arms from a list with commas.

    Raises:
        BadUsage: an arm is unknown, is there twice, or has a setting that does not exist.
    """
    return _different(_parse_arm(part.strip()) for part in text.split(","))


def sweep_arms(sweep: Sequence[str]) -> tuple[Arm, ...]:
    """An exact arm for each combination of values, such as `["chunk=256,512", "kv=auto,fp8"]`.

    Raises:
        BadUsage: a setting does not exist.
    """
    axes = []
    for axis in sweep:
        name, _, values = axis.partition("=")
        axes.append([f"{name}={value}" for value in values.split(",")])
    return _different(_parse_arm("+".join(["exact", *settings])) for settings in itertools.product(*axes))


def published_density(length: int) -> float:
    """The density published for prompts of so many tokens, 0 to 1; a power of the length between what is published and
    outside it."""
    pairs = list(itertools.pairwise(_DENSITIES))
    (a, low), (b, high) = next((pair for pair in pairs if length <= pair[1][0]), pairs[-1])
    return min(1.0, low * math.pow(length / a, math.log(high / low) / math.log(b / a)))


def by_engine(arms: Iterable[Arm]) -> list[tuple[Variant, list[Arm]]]:
    """The arms grouped by the engine that they need, in the order of their first arm."""
    groups: dict[Variant, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(arm.variant, []).append(arm)
    return list(groups.items())


def _different(arms: Iterable[Arm]) -> tuple[Arm, ...]:
    different: dict[str, Arm] = {}
    for arm in arms:
        if arm.name in different:
            raise BadUsage(f"the arm {arm.name!r} is there twice; write 'again' for a second exact one")
        different[arm.name] = arm
    return tuple(different.values())


def _parse_arm(text: str) -> Arm:
    name, *settings = text.split("+")
    if name not in _NAMED:
        raise BadUsage(
            f"there is no arm {name!r}; use one of {', '.join(_NAMED)}, with settings as in 'exact+chunk=256'"
        )
    given: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in _ALL_KEYS or not value or key in given:
            known = ", ".join(f"{name}=..." for name in _ALL_KEYS)
            raise BadUsage(f"the arm {text!r} has the setting {setting!r}; use each of {known} at most once")
        if key == "chunk" and not (value.isdigit() and int(value)):
            raise BadUsage(f"the arm {text!r} has chunk={value!r}; give the tokens of a step, such as chunk=512")
        given[key] = int(value) if key == "chunk" else value
    named, selector, published = _NAMED[name], given.pop(_SELECT, None), given.pop(_PUBLISHED, None)
    if (selector or published) and not named.accelerated:
        raise BadUsage(f"the arm {text!r} reads exactly and has nothing to select; write 'sparse+select=...'")
    if selector and published:
        raise BadUsage(f"the arm {text!r} selects in two ways; give one of select=... and published=...")
    return replace(
        named,
        name=text,
        variant=Variant(**given),
        # The engine's notation has commas, which separate arms.
        selector=selector.replace("/", ",") if selector else None,
        published=_multiple(text, published) if published else None,
    )


def _multiple(arm: str, text: str) -> float:
    try:
        multiple = float(text)
    except ValueError:
        multiple = math.nan
    if not 0 < multiple < math.inf:
        raise BadUsage(f"the arm {arm!r} has published={text!r}; give a multiple of the density, such as published=2")
    return multiple
