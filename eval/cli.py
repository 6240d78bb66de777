"""`foreword eval`: what the project claims, measured."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Annotated

import typer

from app import log

cli = typer.Typer(no_args_is_help=True, help="Measure the service.")


@cli.callback()
def main() -> None:
    """Measure the service."""
    log.configure(logging.WARNING)


@cli.command()
def overhead(
    questions: Annotated[int, typer.Option(min=10, help="Questions of each mode.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time that the service itself adds before the first text, with the scripted engine."""
    from eval.overhead import measure_overhead

    result = asyncio.run(measure_overhead(questions))
    if as_json:
        print(json.dumps([row.__dict__ for row in result], indent=2))
        return
    print(
        f"{'mode':<10}{'n':>5}{'tokens':>8}  {'overhead p50':>12}{'p95':>9}{'redact p50':>12}{'retrieve p50':>14}  (ms)"
    )
    for row in result:
        print(
            f"{row.mode:<10}{row.n:>5}{row.prompt_tokens:>8}  {row.overhead_p50_ms:>12.1f}{row.overhead_p95_ms:>9.1f}"
            f"{row.redact_p50_ms:>12.1f}{row.retrieve_p50_ms:>14.1f}"
        )


@cli.command()
def memory(
    url: Annotated[str, typer.Option(help="A running service on this machine.")] = "http://127.0.0.1:8000",
) -> None:
    """Memory of a running service and its processes (proportional set size)."""
    from eval.memory import measure_memory

    for name, mib in measure_memory(url):
        print(f"{mib:>8.0f} MiB  {name}")
