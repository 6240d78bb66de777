"""Starting and stopping: ports, data folders, models; every failure is one clear sentence and exit code 1."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app import cli, server
from app.client import Client, RequestFailed, _is_foreword, connect
from app.server import ListenError, running
from app.services import Services, build_services
from app.settings import Settings, local_url
from retrieval.errors import ReindexNeeded, StorageFailed
from retrieval.passage import Chunk
from serving.errors import ModelUnusable
from tests.conftest import Service


def _foreword(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; without an environment of its own it must reach the running service, so no engine is real."""
    environment = {"FOREWORD_ENGINE": "scripted", "FOREWORD_DATA_DIR": "/nonexistent"} | environment
    return subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


async def test_a_busy_port_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} of 127.0.0.1 is in use"):
            async with running(Settings(port=port, engine="scripted", data_dir=tmp_path / "data")):
                pass
    assert not (tmp_path / "data").exists()


def test_a_data_folder_has_one_owner(tmp_path: Path) -> None:
    settings = Settings(engine="scripted", data_dir=tmp_path)
    first = build_services(settings)
    try:
        with pytest.raises(StorageFailed, match=f"in use by process {os.getpid()}"):
            build_services(settings)
    finally:
        _close(first)
    assert oct((tmp_path / "redaction.key").stat().st_mode & 0o777) == "0o600"


def test_another_embedding_model_needs_a_new_index(tmp_path: Path) -> None:
    first = build_services(Settings(engine="scripted", data_dir=tmp_path))
    first.vectors.add([Chunk("d_1", 0, 1, 0, 16, "The mast is red.")])
    _close(first)
    with pytest.raises(ReindexNeeded, match="all-MiniLM-L6-v2"):
        build_services(Settings(engine="scripted", data_dir=tmp_path, embedding_model="some/other"))


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        pytest.param({"FOREWORD_MODEL": "/nowhere/model"}, "'/nowhere/model' is not a folder", id="missing model"),
        pytest.param(
            {"FOREWORD_MODEL": "incomplete"}, "incomplete: tokenizer.json, model.safetensors", id="incomplete"
        ),
        pytest.param({"FOREWORD_MODEL": "short"}, "reads at most 2,048 tokens", id="length beyond the model's"),
        pytest.param({"FOREWORD_DATA_DIR": "/proc/foreword"}, "cannot be written", id="data folder"),
        pytest.param(
            {"FOREWORD_ENGINE": "scripted", "FOREWORD_NER_MODEL": "no_such_ner"}, "'no_such_ner' cannot", id="NER model"
        ),
        pytest.param(
            {"FOREWORD_ENGINE": "scripted", "FOREWORD_EMBEDDING_MODEL": "/nowhere/embedder"},
            "'/nowhere/embedder' cannot",
            id="embedding model",
        ),
    ],
)
def test_a_start_that_must_fail_says_why(tmp_path: Path, environment: dict[str, str], told: str) -> None:
    incomplete, short = tmp_path / "incomplete", tmp_path / "short"
    config = {"max_position_embeddings": 2048}
    for folder in (incomplete, short):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors"):
        (short / name).touch()
    folders = {"incomplete": str(incomplete), "short": str(short)}
    model = environment.get("FOREWORD_MODEL", "")
    variables = {
        "FOREWORD_ENGINE": "vllm",
        "FOREWORD_DATA_DIR": str(tmp_path / "data"),
        "FOREWORD_MAX_MODEL_LEN": "4096",
    } | environment
    variables |= {"FOREWORD_MODEL": folders.get(model, model)} if model else {}
    result = _foreword("serve", "--port", "0", **variables)
    assert result.returncode == 1
    assert told in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("foreword: ")


def test_the_default_model_is_prepared_by_this_program_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = tmp_path / "app"
    stranger.mkdir()
    (stranger / "__init__.py").touch()
    (stranger / "cli.py").write_text("import pathlib; pathlib.Path('strange').touch()")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnusable, match=r"could not be prepared \(its process ended with 1\)"):
        server._check_model(Settings(data_dir=Path("/proc/foreword")))
    assert not (tmp_path / "strange").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])  # noqa: S104 - for a moment
async def test_commands_find_a_service_on_any_address(host: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"service": "foreword"}'
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    def never(text: str) -> None:
        raise AssertionError(text)

    try:
        listener = server._listen(host, 0)
    except ListenError as error:
        pytest.skip(str(error))
    port = listener.getsockname()[1]
    async with (
        await asyncio.start_server(answer, sock=listener),
        connect(Settings(host=host, port=port), needs_engine=False, say=never) as client,
    ):
        assert await client.json("GET", "/health") == {"service": "foreword"}


async def test_a_host_that_is_no_address_is_no_service() -> None:
    assert not await _is_foreword(local_url("not a host", 8000))


def test_a_wrong_setting_is_bad_usage() -> None:
    result = _foreword("serve", FOREWORD_PORT="many")
    assert result.returncode == 2
    assert "FOREWORD_PORT is 'many'" in result.stderr


async def test_commands_talk_to_the_running_service(service: Service, tmp_path: Path, report_id: str) -> None:
    port = str(service.url.rpartition(":")[2])
    file = tmp_path / "mast.md"
    file.write_text("# The mast\n\nThe mast of the lightship is vermilion.\n")
    bad = tmp_path / "bad.pdf"
    bad.write_bytes(b"not a pdf")

    ingested = await asyncio.to_thread(
        _foreword, "ingest", str(file), "--collection", "[/cli]", "--json", FOREWORD_PORT=port
    )
    assert ingested.returncode == 0, ingested.stderr
    document = json.loads(ingested.stdout)["documents"][0]
    assert (document["name"], document["status"]) == ("mast.md", "ready")

    refused = await asyncio.to_thread(_foreword, "ingest", str(bad), FOREWORD_PORT=port)
    assert refused.returncode == 1
    assert "does not contain what its name says" in refused.stderr

    service.engine.enqueue("The mast is ", "vermilion.")
    asked = await asyncio.to_thread(
        _foreword, "ask", "What colour is the mast?", "-d", document["id"], FOREWORD_PORT=port
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip() == "The mast is vermilion."
    assert "mast.md, page 1" in asked.stderr
    assert re.search(r"first text after \d+\.\d\d s", asked.stderr)

    begun = await asyncio.to_thread(
        _foreword, "ask", "And the sail?", "-c", "[/cli]", "--conversation", "new", FOREWORD_PORT=port
    )
    [conversation] = re.findall(r"conversation (conv-[0-9a-f]{32}), turn 1$", begun.stderr, re.MULTILINE)
    continued = await asyncio.to_thread(
        _foreword, "ask", "Since when?", "--conversation", conversation, "--json", FOREWORD_PORT=port
    )
    assert json.loads(continued.stdout)["context"]["turn"] == 2
    elsewhere = await asyncio.to_thread(
        _foreword, "ask", "Since when?", "-c", "a", "--conversation", conversation, FOREWORD_PORT=port
    )
    assert elsewhere.returncode == 1
    assert "leave out 'collection'" in elsewhere.stderr

    # Brackets are no marks of ours, and blanks around a name mean nothing.
    listed = await asyncio.to_thread(_foreword, "list", "--collection", " [/cli] ", FOREWORD_PORT=port)
    assert document["id"] in listed.stdout
    assert "[/cli]" in listed.stdout
    shown: dict[str, Any] = json.loads(
        (await asyncio.to_thread(_foreword, "show", document["id"], "--json", FOREWORD_PORT=port)).stdout
    )
    assert shown["collection"] == "[/cli]"

    deleted = await asyncio.to_thread(_foreword, "delete", document["id"], FOREWORD_PORT=port)
    assert deleted.returncode == 0
    gone = await asyncio.to_thread(_foreword, "show", document["id"], FOREWORD_PORT=port)
    assert gone.returncode == 1
    assert "there is no document" in gone.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        pytest.param(("show", "../../health"), "Not Found", id="an id that is a path"),
        pytest.param(("show", "d_none?x=1"), "there is no document 'd_none?x=1'", id="an id with a query"),
        pytest.param(("show", os.fsdecode(b"\xff")), "there is no document", id="an id in another encoding"),
        pytest.param(("ask", os.fsdecode(b"\xff")), "bytes that are no text", id="a question in another encoding"),
        pytest.param(("list", "-c", ""), "give a name", id="an empty collection"),
        pytest.param(("ingest", "README.md", "-c", ""), "give a name", id="an upload to an empty collection"),
    ],
)
async def test_weird_arguments_are_refused_in_one_sentence(
    service: Service, arguments: tuple[str, ...], told: str
) -> None:
    result = await asyncio.to_thread(_foreword, *arguments, FOREWORD_PORT=service.url.rpartition(":")[2])
    assert result.returncode == 1
    assert told in result.stderr
    assert "Traceback" not in result.stderr


class _Breaking(Client):
    """Takes every upload, and follows it for as long as it is told."""

    def __init__(self, *statuses: str, broken: bool = False) -> None:
        self._statuses = statuses
        self._broken = broken

    async def json(self, method: str, path: str, **arguments: Any) -> Any:
        return {"documents": [{"id": "d_1", "duplicate": False}]}

    async def events(self, method: str, path: str, **arguments: Any) -> AsyncIterator[tuple[str, Any]]:
        for status in self._statuses:
            yield "status", {"status": status, "progress": None, "reason": None, "pages": 1}
        if self._broken:
            raise RequestFailed("the service went away")


@pytest.mark.parametrize(
    ("client", "status", "reason"),
    [
        pytest.param(_Breaking("queued", "ready"), "ready", None, id="to the end"),
        pytest.param(_Breaking(), "failed", "was deleted", id="deleted before the first event"),
        pytest.param(_Breaking("queued"), "failed", "was deleted", id="deleted later"),
        pytest.param(_Breaking(broken=True), "failed", "went away", id="broken before the first event"),
        pytest.param(_Breaking("queued", broken=True), "failed", "went away", id="broken later"),
    ],
)
async def test_a_file_that_cannot_be_followed_does_not_keep_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], client: _Breaking, status: str, reason: str | None
) -> None:
    file = tmp_path / os.fsdecode(b"mast \xff [b].txt")
    file.write_text("The mast is red.")
    document = await cli._ingest(client, file, "default", "skip")
    assert document["status"] == status
    assert reason is None or reason in document["reason"]
    assert "mast ? [b].txt" in capsys.readouterr().err


def test_commands_work_without_a_service(tmp_path: Path) -> None:
    environment = {
        "FOREWORD_DATA_DIR": str(tmp_path / "data"),
        "FOREWORD_ENGINE": "scripted",
        "FOREWORD_PORT": str(_free_port()),
    }
    file = tmp_path / "sail.txt"
    file.write_text("The sail of the lightship is ochre.")
    ingested = _foreword("ingest", str(file), **environment)
    assert ingested.returncode == 0, ingested.stderr
    assert "starting one for this command" in ingested.stderr
    asked = _foreword("ask", "What colour is the sail?", "--json", **environment)
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["context"]["documents"][0]["name"] == "sail.txt"


def test_a_path_that_is_not_there_is_bad_usage() -> None:
    result = _foreword("ingest", "/nowhere/file.pdf")
    assert result.returncode == 2
    assert "/nowhere/file.pdf" in result.stderr


def _close(services: Services) -> None:
    services.vectors.close()
    services.catalogue.close()
    services.lock.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
