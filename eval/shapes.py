"""Model folders of a given shape without weights: for speed, which depends on the shape and not on what a model knows.

The engine fills them with random numbers (vLLM's `load_format=dummy`); the tokenizer is the packaged model's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eval.errors import BadUsage
from serving.config import EngineConfig
from serving.model import prepare_packaged

# `8b` is the shape of Llama 3.1 8B (its config.json); `tiny` is for trying things out.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
    },
}
_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def with_shape(config: EngineConfig, shape: str) -> EngineConfig:
    """The engine settings with a model of this shape and random weights, made under the models' folder.

    Raises:
        BadUsage: there is no such shape.
    """
    if shape not in SHAPES:
        raise BadUsage(f"there is no shape {shape!r}; use one of {', '.join(SHAPES)}")
    models = config.models_dir.expanduser()
    folder = models / f"shape-{shape}"
    folder.mkdir(parents=True, exist_ok=True)
    packaged = prepare_packaged(models)
    for name in _TOKENIZER:
        if (packaged / name).is_file():
            shutil.copy(packaged / name, folder / name)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[shape]}, indent=2))
    return replace(config, model=str(folder), engine_args={**config.engine_args, "load_format": "dummy"})
