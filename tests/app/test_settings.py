"""Settings: sources, their order, and what a wrong value says. The documentation lists every one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.settings import Settings, SettingsError, load_settings, local_url


def test_defaults_need_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert (settings.host, settings.port, settings.engine, settings.max_upload_mb) == ("127.0.0.1", 8000, "vllm", 50)
    assert settings.folder == Path.home() / ".foreword"
    assert settings.catalogue_url.startswith("sqlite:///")


def test_argument_beats_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreword.toml").write_text('port = 1111\nmodel = "file"\nmax_pending = 3\n')
    monkeypatch.setenv("FOREWORD_PORT", "2222")
    monkeypatch.setenv("FOREWORD_MODEL", "environment")
    settings = load_settings(port=3333)
    assert (settings.port, settings.model, settings.max_pending) == (3333, "environment", 3)


def test_an_override_that_is_none_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_PORT", "2222")
    assert load_settings(port=None).port == 2222


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "many"),
        ("PORT", "70000"),
        ("ENGINE", "magic"),
        ("ACCELERATION", "maybe"),
        ("RETRIEVE_SHARE", "2"),
        ("ENGINE_ARGS", "{broken"),
    ],
)
def test_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"FOREWORD_{name}", value)
    with pytest.raises(SettingsError, match=name.lower() if value == "{broken" else f"FOREWORD_{name} is '{value}'"):
        load_settings()


def test_an_unknown_name_in_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreword.toml").write_text("prot = 1\n")
    with pytest.raises(SettingsError, match="PROT"):
        load_settings()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("192.168.1.7", "http://192.168.1.7:8000"),
        ("localhost", "http://localhost:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),  # noqa: S104 - compared, not bound
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("0:0:0:0:0:0:0:0", "http://[::1]:8000"),
        ("fd00::7", "http://[fd00::7]:8000"),
    ],
)
def test_a_service_is_reached_where_it_listens(host: str, url: str) -> None:
    assert local_url(host, 8000) == url


@pytest.mark.parametrize(("value", "available"), [(None, True), ("on", True), ("off", False)])
def test_acceleration_is_available_unless_it_is_off(
    monkeypatch: pytest.MonkeyPatch, value: str | None, available: bool
) -> None:
    if value is not None:
        monkeypatch.setenv("FOREWORD_ACCELERATION", value)
    assert load_settings().engine_config.acceleration is available


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().port = 1  # type: ignore[misc]


def test_every_setting_is_documented(root: Path) -> None:
    text = (root / "docs" / "settings.md").read_text()
    documented = re.findall(r"^\| `FOREWORD_(\w+)` \|", text, flags=re.MULTILINE)
    assert documented == [name.upper() for name in Settings.model_fields]
