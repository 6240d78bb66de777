"""`foreword bench`: how a running server bears load."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from eval import console
from eval.console import numbers

if TYPE_CHECKING:
    from eval.bench import Bench, Prompt
    from eval.load import Load
    from eval.own import OwnServer
    from eval.remote import RemoteServer

_out = Console(soft_wrap=True)
_say = partial(console.say, command="foreword bench")

cli = typer.Typer()


@cli.command()
def bench(
    url: Annotated[str, typer.Argument(help="A server with the OpenAI API, such as http://127.0.0.1:8100.")],
    concurrency: Annotated[str, typer.Option(help="Levels: how many requests are in work at once.")] = "1,2,4,8",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each level.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="About how long generated prompts are.")] = 1024,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 64,
    file: Annotated[
        Path | None, typer.Option(help='Prompts of your own, JSON lines {"prompt": "..."} or {"messages": [...]}.')
    ] = None,
    collection: Annotated[
        str | None, typer.Option(help="Ask a service of this kind about the documents of this collection.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model of the server; its first one by default.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Most seconds that one request may take.")] = 600,
    warmups: Annotated[int, typer.Option(min=0, help="Requests before each level that do not count.")] = 1,
    ttft_limit: Annotated[
        float | None, typer.Option(min=0, help="Goodput: most seconds until the first text of an answer.")
    ] = None,
    itl_limit: Annotated[
        float | None, typer.Option(min=0, help="Goodput: most seconds between pieces of an answer, their mean.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides every generated prompt.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the results (JSON lines); it must not exist yet.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load on a running server, level after level. Exit code 0 when all was answered, 1 when something was not.

    The key of a server that asks for one is read from FOREWORD_API_KEY, or else from OPENAI_API_KEY.
    """
    from eval.bench import api_key, connected, read_prompts, run_bench
    from eval.identity import run_identity
    from eval.load import Load
    from eval.own import OwnServer
    from eval.results import default_path, plain, results_file
    from eval.tables import levels_table

    path = out or default_path("bench")
    with console.told(_say):
        load = Load(
            numbers(concurrency, "levels of concurrency", "1,2,4,8"),
            requests,
            max_tokens,
            timeout,
            warmups,
            ttft_limit,
            itl_limit,
        )
        given = None if file is None else read_prompts(file)
        key = api_key(dict(os.environ))

        async def run() -> tuple[dict[str, object], Bench]:
            own = None if collection is None else OwnServer.connect(url, collection, timeout)
            async with own or connected(url, model, key, timeout) as server:
                prompts = await _prompts(server, load, given, prompt_tokens, seed)
                about = {**run_identity(seed=seed), **server.about, "load": asdict(load)}
                with results_file(path) as results, console.progress(load.requests, "requests", _say) as step:
                    results.add("identity", about)
                    measured = await run_bench(server, prompts, load, results=results, step=step)
                    results.add("summary", asdict(measured))
                    return about, measured

        try:
            about, measured = asyncio.run(run())
        except KeyboardInterrupt:
            _say(f"stopped; what had ended by then is in {path}" if path.exists() else "stopped before the first level")
            raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({**about, **plain(asdict(measured))}, indent=2))
    else:
        _out.print(levels_table(measured.levels), markup=False, highlight=False)
    _tell(measured)
    _say(f"every request is in {path}")
    if measured.failed:
        raise typer.Exit(1)


async def _prompts(
    server: OwnServer | RemoteServer, load: Load, given: Sequence[Prompt] | None, prompt_tokens: int, seed: int
) -> Sequence[Prompt]:
    """A prompt for every request, once the server has answered one."""
    from eval.bench import generated, numbered, probe, repeated
    from eval.own import OwnServer

    if given is not None:
        await probe(server, load, given[0])
        if len(given) < load.prompts:
            _say(f"{load.prompts} prompts are needed and the file has {len(given)}: they repeat, and may be cached")
        return repeated(given, load.prompts)
    if isinstance(server, OwnServer):
        return numbered(range(load.prompts))
    numbers = range(load.prompts)
    spare = generated(range(load.prompts, load.prompts + 1), prompt_tokens, seed)[0]
    return generated(numbers, prompt_tokens, seed, await probe(server, load, spare))


def _tell(measured: Bench) -> None:
    if measured.prompt_tokens is None:
        _say("how many tokens the prompts have is not known: the server does not tell its usage")
    else:
        _say(f"{measured.prompt_tokens:,.0f} prompt tokens on average, as the server counts them")
    if measured.cached is None:
        _say("whether anything was cached is not proven: the server does not tell")
    elif measured.cached:
        _say(f"{measured.cached} prompts found something in the server's cache: they were not all read cold")
