"""`foreword`: the command line. Every command is a client of the HTTP API, so it does what the API does.

Other packages add subcommands through the entry-point group `foreword.commands`; each entry is a `typer.Typer`, of one
command that bears the entry's name, or a group of them.
Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Coroutine
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

if TYPE_CHECKING:
    from app.client import Client
    from app.services import Services
    from app.settings import Settings

cli = typer.Typer(
    name="foreword", no_args_is_help=True, add_completion=False, help="Questions about long documents, answered sooner."
)
# Names and texts are shown as they are: rich would take [brackets] in them for its own marks.
_out = Console(markup=False, highlight=False)
_err = Console(stderr=True, markup=False, highlight=False)

_WARM_POLL_S = 0.2

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Collection = Annotated[str, typer.Option("--collection", "-c", help="The collection to use.")]


OnDuplicate = Literal["skip", "replace", "version"]
Mode = Literal["auto", "whole", "retrieve"]


@cli.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    model: Annotated[str | None, typer.Option(help="'packaged', a folder, or a Hugging Face id.")] = None,
) -> None:
    """Start the service."""
    from app import log
    from app.server import serve as run

    settings = settings_or_exit(host=host, port=port, model=model)
    log.configure()
    started = time.monotonic()

    def ready(url: str, services: Services) -> None:
        name = services.engine.capabilities.model
        seconds = time.monotonic() - started
        print(f"foreword is ready to answer at {url} (model {name}, started in {seconds:.0f} s)", flush=True)

    _say("starting; loading the models takes about a minute")
    _run(run(settings, ready), when_stopped=0)


@cli.command()
def prepare() -> None:
    """Prepare the default model once; later calls only check it."""
    from serving.model import PACKAGED, resolve_model

    settings = settings_or_exit()

    async def work() -> None:
        started = time.monotonic()
        _say("preparing the default model, once, about 25 s")
        folder = await asyncio.to_thread(resolve_model, PACKAGED, settings.folder / "models")
        _say(f"the default model is in {folder.source} ({time.monotonic() - started:.0f} s)")

    _run(work())


@cli.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files, or folders of .txt, .md and .pdf files.")],
    collection: Collection = "default",
    on_duplicate: Annotated[OnDuplicate, typer.Option(help="What to do with bytes that are there.")] = "skip",
    as_json: AsJson = False,
) -> None:
    """Take documents in and wait until they can be asked about."""
    files = _files(paths)

    async def work(client: Client) -> None:
        failed = 0
        documents = []
        for file in files:
            document = await _ingest(client, file, collection, on_duplicate)
            failed += document["status"] not in ("ready", "partial")
            documents.append(document)
        if as_json:
            _print_json({"documents": documents})
        if failed:
            raise typer.Exit(1)

    _with_client(work, needs_engine=False)


@cli.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    document: Annotated[list[str] | None, typer.Option("--document", "-d", help="Id of a document to read.")] = None,
    collection: Annotated[str | None, typer.Option("--collection", "-c", help="The collection; 'default'.")] = None,
    conversation: Annotated[
        str | None, typer.Option("--conversation", help="'new', or the id of one to go on with, then without a scope.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Read documents whole, or only the best passages.")] = "auto",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens; 512 if it fits.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="No acceleration, nothing read from the cache.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a question about documents."""
    body: dict[str, Any] = {
        "question": question,
        "conversation": conversation,
        "mode": mode,
        "acceleration": "off" if exact else "auto",
        "max_tokens": max_tokens,
    }
    # A conversation that goes on has its scope, so nothing is said that was not typed.
    body |= {"documents": document} if document else {}
    body |= {"collection": collection} if collection is not None else {}

    async def work(client: Client) -> None:
        if as_json:
            _print_json(await client.json("POST", "/v1/ask", json=body | {"stream": False}))
        else:
            await _ask(client, body)

    _with_client(work, needs_engine=True)


@cli.command("list")
def list_documents(
    collection: Annotated[str | None, typer.Option("--collection", "-c", help="Only this collection.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the documents."""

    async def work(client: Client) -> None:
        body = await client.json(
            "GET", "/v1/documents", params={} if collection is None else {"collection": collection}
        )
        if as_json:
            _print_json(body)
            return
        table = Table(Column("id", no_wrap=True), "name", "collection", "status", "pages", "tokens", "redacted", "warm")
        for found in body["documents"]:
            numbers = (found["pages"], found["tokens"] or "", sum(found["entities"].values()))
            facts = (found["id"], found["name"], found["collection"], found["status"], *map(str, numbers))
            table.add_row(*facts, found["warm"]["state"])
        _out.print(table if body["documents"] else "no documents yet; add some with: foreword ingest FILE")

    _with_client(work, needs_engine=False)


@cli.command()
def show(id: Annotated[str, typer.Argument(help="Id of the document.")], as_json: AsJson = False) -> None:
    """Show one document."""

    async def work(client: Client) -> None:
        body = await client.json("GET", _path(id))
        if as_json:
            _print_json(body)
            return
        for name, value in body.items():
            _out.print(f"{name:>11}  {value if value is not None else '-'}")

    _with_client(work, needs_engine=False)


@cli.command()
def delete(ids: Annotated[list[str], typer.Argument(help="Ids of the documents.")]) -> None:
    """Delete documents with their pages, chunks and vectors."""

    async def work(client: Client) -> None:
        for id in ids:
            await client.json("DELETE", _path(id))
            _say(f"deleted {id}")

    _with_client(work, needs_engine=False)


@cli.command()
def warm(
    ids: Annotated[list[str], typer.Argument(help="Ids of the documents.")],
    pin: Annotated[bool, typer.Option("--pin", help="Keep them in memory, whatever else is read.")] = False,
    release: Annotated[
        bool, typer.Option("--release", help="Stop reading them early, and release their pins.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read documents before anybody asks about them, and wait until they are read."""

    async def work(client: Client) -> None:
        documents = []
        for id in ids:
            if release:
                documents.append(await client.json("DELETE", f"{_path(id)}/warm"))
                _say(f"{id}: released")
            else:
                documents.append(await _warm(client, id, pin))
        if as_json:
            _print_json({"documents": documents})
        if not release and any(document["warm"]["state"] != "warm" for document in documents):
            raise typer.Exit(1)

    _with_client(work, needs_engine=True)


async def _warm(client: Client, id: str, pin: bool) -> Any:
    """Have one document read and follow that to its end; returns the document as it is then."""
    document = await client.json("POST", f"{_path(id)}/warm", params={"pin": pin})
    with _bar() as bar:
        task = bar.add_task(f"{document['name']}: warming", total=None)
        while (warmth := document["warm"])["state"] == "warming":
            bar.update(task, completed=warmth["tokens"], total=warmth["total"])
            await asyncio.sleep(_WARM_POLL_S)
            document = await client.json("GET", _path(id))
    reason = f": {warmth['reason']}" if warmth["reason"] else ""
    _say(f"{document['name']}: {warmth['state']}{reason} - {id}, {warmth['tokens']:,} tokens")
    return document


async def _ingest(client: Client, file: Path, collection: str, on_duplicate: OnDuplicate) -> Any:
    """Upload one file and follow it to the end; returns the document, or its name and what kept it from being one."""
    from app.client import RequestFailed

    # A name in another encoding has no text of its own.
    name = file.name.encode(errors="replace").decode()
    try:
        data = await asyncio.to_thread(file.read_bytes)
        accepted = await client.json(
            "POST",
            "/v1/documents",
            files={"files": (name, data)},
            data={"collection": collection, "on_duplicate": on_duplicate},
        )
        taken = accepted["documents"][0]
        document = await _follow(client, name, taken["id"])
    except (OSError, RequestFailed) as error:
        reason = getattr(error, "strerror", None) or str(error)
        _say(f"{name}: {reason}")
        return {"name": name, "status": "failed", "reason": reason}
    known = " (it was there already)" if taken["duplicate"] else ""
    reason = f": {document['reason']}" if document["reason"] else ""
    _say(f"{name}: {document['status']}{known}{reason} - {taken['id']}, {document['pages']} pages")
    return document


async def _follow(client: Client, name: str, id: str) -> Any:
    """Show how the ingest of a document goes; returns the document as it ended.

    Raises:
        RequestFailed: it cannot be followed to its end.
    """
    from app.client import RequestFailed
    from retrieval.catalogue import FINAL

    document: Any = None
    with _bar() as bar:
        task = bar.add_task(name, total=None)
        stage = ""
        async for _, document in client.events("GET", f"{_path(id)}/events"):
            progress = document["progress"]
            if progress is None:
                continue
            bar.update(
                task,
                description=f"{name}: {progress['stage']}",
                completed=progress["done"],
                total=progress["total"],
            )
            if not _err.is_terminal and progress["stage"] != stage:
                stage = progress["stage"]
                _say(f"{name}: {stage}")
    if document is None or document["status"] not in FINAL:
        raise RequestFailed(f"document {id} was deleted before its ingest had ended; ingest the file again")
    return document


async def _ask(client: Client, body: dict[str, Any]) -> None:
    """Stream one answer to the terminal; everything but the answer goes to standard error."""
    with _bar() as bar:
        task = None
        said = ""
        async for name, data in client.events("POST", "/v1/ask", json=body):
            if name == "context":
                plan = data["plan"]
                if data["conversation"]:
                    said = f"; conversation {data['conversation']}, turn {data['turn']}"
                eta = f", about {plan['eta_s']:.0f} s" if plan["eta_s"] else ""
                text = f"reading {plan['tokens_to_compute']:,} tokens{eta}"
                task = bar.add_task(text, total=data["prompt_tokens"])
                if not _err.is_terminal:
                    _say(text)
            elif name == "progress" and task is not None:
                bar.update(task, completed=data["tokens_done"])
            elif name == "token":
                bar.stop()
                print(data["text"], end="", flush=True)
            elif name == "citations":
                print()
                for number, citation in enumerate(data["citations"], start=1):
                    where = f"{citation['name']}, page {citation['page']}"
                    _err.print(f"  [{number}] {where}: {citation['quote']}", soft_wrap=True)
            elif name == "done":
                timings, prefill = data["timings"], data["prefill"]
                first = "no text" if timings["ttft"] is None else f"first text after {timings['ttft']:.2f} s"
                cached = "?" if prefill["cached_tokens"] is None else f"{prefill['cached_tokens']:,}"
                _say(
                    f"{first}, total {timings['total']:.2f} s; {prefill['prompt_tokens']:,} prompt tokens, "
                    f"{cached} cached, {prefill['path']}{said}"
                )


def _path(id: str) -> str:
    """The address of a document; an id is data, whatever was typed."""
    return f"/v1/documents/{quote(id, safe='', errors='replace')}"


def _bar() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal)


def _files(paths: list[Path]) -> list[Path]:
    """The files that the paths name; a folder stands for the documents directly in it."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise typer.BadParameter(f"there is no file or folder {str(path)!r}", param_hint="PATHS")
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.suffix.lower() in (".txt", ".md", ".pdf"))
            if not found:
                raise typer.BadParameter(f"{str(path)!r} holds no .txt, .md or .pdf file", param_hint="PATHS")
            files += found
        else:
            files.append(path)
    return files


def settings_or_exit(**overrides: Any) -> Settings:
    """The settings of this process; one that cannot be used ends the command with a sentence and exit code 2."""
    from app.settings import SettingsError, load_settings

    try:
        return load_settings(**overrides)
    except SettingsError as error:
        _say(str(error))
        raise typer.Exit(2) from error


def _with_client(work: Any, *, needs_engine: bool) -> None:
    from app import log
    from app.client import connect

    settings = settings_or_exit()
    log.configure(logging.WARNING)

    async def run() -> None:
        async with connect(settings, needs_engine=needs_engine, say=_say) as client:
            await work(client)

    _run(run())


def _run(work: Coroutine[Any, Any, None], *, when_stopped: int = 130) -> None:
    """Run to the end; a foreseeable failure is one sentence and exit code 1, a signal ends everything in order."""
    from app.client import RequestFailed
    from app.server import ListenError
    from ingest.errors import IngestError
    from retrieval.errors import RetrievalError
    from serving.errors import ServingError

    async def cancellable() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        asyncio.run(cancellable())
    except (RequestFailed, ListenError, IngestError, RetrievalError, ServingError) as error:
        _say(str(error))
        raise typer.Exit(1) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(when_stopped) from None


def _say(text: str) -> None:
    _err.print(f"foreword: {text}", soft_wrap=True)


def _print_json(data: Any) -> None:
    json.dump(data, sys.stdout, ensure_ascii=False, indent=2)
    print()


def main() -> None:
    """Entry point of the console script."""
    for entry in metadata.entry_points(group="foreword.commands"):
        add_command(cli, entry.name, entry.load())
    cli()


def add_command(to: typer.Typer, name: str, added: typer.Typer) -> None:
    """Add another package's commands: one alone as it is, several, or one with a callback, as a group of this name."""
    alone = added.registered_callback is None and len(added.registered_commands) == 1
    # Without a name its command stands among ours; with one it would be `foreword NAME NAME`.
    to.add_typer(added, name=None if alone else name)


if __name__ == "__main__":
    main()
