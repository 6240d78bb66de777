"""Every setting of the service, read once from the environment and `foreword.toml`.

A variable `FOREWORD_X` sets field `x` and wins over the file. docs/settings.md lists them all; a test compares.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ingest.redact import PACKAGED_NER
from retrieval.embed import PACKAGED as PACKAGED_EMBEDDER
from serving.config import EngineConfig
from serving.model import PACKAGED as PACKAGED_MODEL


class SettingsError(Exception):
    """A setting cannot be used; the message names it, its value and what is expected."""


class Settings(BaseSettings):
    """Frozen; built once at start and passed down."""

    model_config = SettingsConfigDict(
        env_prefix="FOREWORD_", frozen=True, extra="forbid", toml_file="foreword.toml", env_ignore_empty=True
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    data_dir: Path = Field(Path("~/.foreword"), description="documents, vectors, keys and prepared models")
    database_url: str | None = Field(None, description="SQLAlchemy URL of the catalogue; default SQLite in `data_dir`")
    max_upload_mb: int = Field(50, ge=1, description="largest request body in MB (10^6 bytes)")

    engine: Literal["vllm", "scripted"] = Field("vllm", description="`scripted` answers without a model, for demos")
    model: str = Field(PACKAGED_MODEL, description="`packaged`, a local folder, or a Hugging Face id")
    max_model_len: int | None = Field(None, ge=256, description="longest prompt plus answer in tokens")
    token_budget: int | None = Field(
        None, ge=32, description="prompt tokens of one engine step; 512 on CPU, 16384 on GPU"
    )
    kv_gib: int | None = Field(
        None, ge=1, description="KV cache on CPU in GiB; default at most a quarter of free memory"
    )
    kv_disk_gib: int = Field(4, ge=0, description="prompts kept on disk, in GiB; 0 keeps none")
    kv_memory_gib: int | None = Field(None, ge=0, description="prompts kept in the host's memory on GPU, in GiB")
    acceleration: bool = Field(True, description="`off` keeps sparse prefill out of the engine")
    warm: bool = Field(True, description="`off` reads documents only when they are asked about")
    max_pending: int = Field(32, ge=1, description="questions in work or waiting before new ones get 429")
    max_running: int = Field(16, ge=1, description="questions the engine works on at once")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="JSON object passed to vLLM as it is")
    engine_log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("ERROR", description="vLLM's own log")

    scripted_first_token_s: float = Field(0.0, ge=0, description="scripted engine: seconds to the first text")
    scripted_gap_s: float = Field(0.0, ge=0, description="scripted engine: seconds between pieces")

    embedding_model: str = Field(PACKAGED_EMBEDDER, description="`packaged`, a local folder, or a Hugging Face id")
    ner_model: str = Field(PACKAGED_NER, description="spaCy model for names")
    chunk_tokens: int = Field(128, ge=32, description="tokens of a chunk, at most the embedding model's window")
    retrieve_share: float = Field(0.125, gt=0, le=0.9, description="share of the window that `mode=retrieve` may fill")
    retrieve_limit: int = Field(40, ge=1, description="most chunks that a search considers")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - fixed by pydantic
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - fixed by pydantic
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment, then the file; there are no other sources."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def folder(self) -> Path:
        """`data_dir` with the home directory filled in."""
        return self.data_dir.expanduser()

    @property
    def catalogue_url(self) -> str:
        return self.database_url or f"sqlite:///{self.folder / 'catalogue.sqlite3'}"

    @property
    def max_upload_bytes(self) -> int:
        return self.max_upload_mb * 1_000_000

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            models_dir=self.folder / "models",
            max_model_len=self.max_model_len,
            token_budget=self.token_budget,
            kv_gib=self.kv_gib,
            kv_disk=self.folder / "kv",
            kv_disk_gib=self.kv_disk_gib,
            kv_memory_gib=self.kv_memory_gib,
            max_pending=self.max_pending,
            max_running=self.max_running,
            log_level=self.engine_log_level,
            acceleration=self.acceleration,
            engine_args=self.engine_args,
        )


def local_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a service that listens on `host`."""
    try:
        address = ipaddress.ip_address(host)
        # A service on every address is also on the local one; nobody can connect to "every".
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(address), host)  # noqa: S104 - compared, not bound
    except ValueError:
        pass  # a name
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment and the file; overrides that are not None win.

    Raises:
        SettingsError: naming each wrong setting, its value and what is expected.
    """
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        lines = [
            f"FOREWORD_{'_'.join(map(str, e['loc'])).upper()} is {e['input']!r}: {e['msg']}" for e in error.errors()
        ]
        raise SettingsError("; ".join(lines)) from error
    except ValueError as error:
        raise SettingsError(f"foreword.toml or the environment cannot be read: {error}") from error
