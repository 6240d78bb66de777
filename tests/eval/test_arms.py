from __future__ import annotations

import pytest

from eval.arms import Arm, Variant, by_engine, parse_arms, published_density, sweep_arms
from eval.errors import BadUsage
from serving.config import EngineConfig


@pytest.mark.parametrize(
    ("text", "arms"),
    [
        pytest.param("exact", [Arm("exact")], id="one"),
        pytest.param("exact, again", [Arm("exact"), Arm("again")], id="blanks"),
        pytest.param("warm", [Arm("warm", warm=True)], id="warm"),
        pytest.param("sparse", [Arm("sparse", accelerated=True)], id="sparse"),
        pytest.param(
            "sparse+select=alpha:0.02",
            [Arm("sparse+select=alpha:0.02", accelerated=True, selector="alpha:0.02")],
            id="a selector",
        ),
        pytest.param(
            "sparse+chunk=256+select=mass:0.9/tile=128/heads=kv",
            [
                Arm(
                    "sparse+chunk=256+select=mass:0.9/tile=128/heads=kv",
                    Variant(chunk=256),
                    accelerated=True,
                    selector="mass:0.9,tile=128,heads=kv",
                )
            ],
            id="a selector with settings",
        ),
        pytest.param(
            "sparse+published=2", [Arm("sparse+published=2", accelerated=True, published=2)], id="published densities"
        ),
        pytest.param("half", [Arm("half", keep=0.5)], id="broken on purpose"),
        pytest.param("exact+chunk=256", [Arm("exact+chunk=256", Variant(chunk=256))], id="a budget"),
        pytest.param(
            "exact+quant=fp8+kv=fp8", [Arm("exact+quant=fp8+kv=fp8", Variant(quant="fp8", kv="fp8"))], id="two settings"
        ),
        pytest.param(
            "warm+model=/models/a",
            [Arm("warm+model=/models/a", Variant(model="/models/a"), warm=True)],
            id="another model",
        ),
        pytest.param(
            "exact+url=http://127.0.0.1:8100",
            [Arm("exact+url=http://127.0.0.1:8100", Variant(url="http://127.0.0.1:8100"))],
            id="a foreign server",
        ),
    ],
)
def test_arms_are_read(text: str, arms: list[Arm]) -> None:
    assert list(parse_arms(text)) == arms


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("", "there is no arm ''", id="none"),
        pytest.param("fast", "there is no arm 'fast'", id="unknown"),
        pytest.param("exact,exact", "'exact' is there twice", id="twice"),
        pytest.param("exact+speed=9", "has the setting 'speed=9'", id="unknown setting"),
        pytest.param("exact+chunk=1+chunk=2", "has the setting 'chunk=2'", id="a setting twice"),
        pytest.param("exact+select=alpha:0.02", "'exact.*' reads exactly and has nothing to select", id="not sparse"),
        pytest.param("sparse+select=", "has the setting 'select='", id="no selector"),
        pytest.param("exact+published=1", "'exact.*' reads exactly and has nothing to select", id="nothing published"),
        pytest.param("sparse+published=1+select=alpha:0", "selects in two ways", id="two ways"),
        pytest.param("sparse+published=nan", "published='nan'", id="no multiple"),
        pytest.param("exact+chunk", "has the setting 'chunk'", id="no value"),
        pytest.param("exact+chunk=many", "chunk='many'", id="no number"),
        pytest.param("exact+chunk=0", "chunk='0'", id="nothing"),
    ],
)
def test_wrong_arms_are_told(text: str, told: str) -> None:
    with pytest.raises(BadUsage, match=told):
        parse_arms(text)


def test_a_sweep_is_every_combination() -> None:
    names = [arm.name for arm in sweep_arms(["chunk=256,512", "kv=auto,fp8"])]
    assert names == [
        "exact+chunk=256+kv=auto",
        "exact+chunk=256+kv=fp8",
        "exact+chunk=512+kv=auto",
        "exact+chunk=512+kv=fp8",
    ]


def test_a_sweep_over_the_same_value_twice_is_told() -> None:
    with pytest.raises(BadUsage, match="is there twice"):
        sweep_arms(["chunk=256,256"])


def test_arms_of_one_engine_share_it() -> None:
    groups = by_engine(parse_arms("exact,exact+chunk=256,warm,warm+chunk=256"))
    assert [(str(variant), [arm.name for arm in arms]) for variant, arms in groups] == [
        ("", ["exact", "warm"]),
        ("chunk=256", ["exact+chunk=256", "warm+chunk=256"]),
    ]


def test_selectors_need_no_engine_of_their_own() -> None:
    assert len(by_engine(parse_arms("exact,sparse,sparse+select=alpha:0.05,sparse+select=mass:0.9"))) == 1


def test_a_variant_changes_only_what_it_names() -> None:
    config = EngineConfig(model="m", token_budget=512, engine_args={"dtype": "bfloat16"})
    assert Variant().apply(config) == config
    changed = Variant(chunk=256, kv="fp8", quant="none").apply(config)
    assert (changed.model, changed.token_budget) == ("m", 256)
    assert changed.engine_args == {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "quantization": None}


@pytest.mark.parametrize(
    ("length", "density"),
    [
        pytest.param(1, 1.0, id="everything"),
        pytest.param(16_384, 0.29, id="the first"),
        pytest.param(23_170, 0.2259, id="between, the geometric mean"),
        pytest.param(65_536, 0.1, id="the last but one"),
        pytest.param(131_072, 0.049, id="the last"),
        pytest.param(262_144, 0.02401, id="beyond, as before"),
    ],
)
def test_densities_are_the_published_ones(length: int, density: float) -> None:
    assert published_density(length) == pytest.approx(density, rel=1e-3)


@pytest.mark.parametrize(
    ("arm", "selector"),
    [
        pytest.param("sparse+published=1", "budget:0.1,late=0.1", id="as published"),
        pytest.param("sparse+published=2", "budget:0.2,late=0.2", id="twice"),
        pytest.param("sparse+published=20", "budget:0.999,late=0.999", id="almost all"),
        pytest.param("sparse+select=alpha:0.02", "alpha:0.02", id="what was asked for"),
    ],
)
def test_an_arm_keeps_the_published_density_of_a_length(arm: str, selector: str) -> None:
    (read,) = parse_arms(arm)
    assert read.at(65_536).selector == selector
