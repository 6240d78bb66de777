"""What the commands of `foreword eval` have in common: settings, errors as one sentence, and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from app.cli import settings_or_exit

if TYPE_CHECKING:
    from app.settings import Settings
    from serving.config import EngineConfig

Say = Callable[[str], None]

_err = Console(stderr=True)


def engine_config() -> EngineConfig:
    """The service's engine, but for what it keeps on disk: those files are the service's own."""
    return replace(settings_of_service().engine_config, kv_disk=None)


def settings_of_service() -> Settings:
    """The settings, with everything that would write to the terminal quiet."""
    from app.server import silence

    settings = settings_or_exit()
    silence(settings)
    return settings


def say(text: str, command: str = "foreword eval") -> None:
    """A line for people, beside what the command prints."""
    _err.print(f"{command}: {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def told(say: Say = say) -> Iterator[None]:
    """A foreseeable failure is one sentence; exit code 2 when the command was wrong, else 1."""
    from eval.errors import BadUsage, EvalError
    from ingest.errors import IngestError
    from retrieval.errors import RetrievalError
    from serving.errors import ServingError

    try:
        yield
    except (EvalError, IngestError, RetrievalError, ServingError) as error:
        say(str(error))
        raise typer.Exit(2 if isinstance(error, BadUsage) else 1) from error


@contextmanager
def progress(total: int, unit: str, say: Say = say) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, a line for each tenth elsewhere."""
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    done, first = 0, 0.0
    with Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal) as bar:
        task = bar.add_task(unit, total=total)

        def step() -> None:
            nonlocal done, first
            done += 1
            first = first or time.monotonic()
            bar.update(task, completed=done)
            if not _err.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                # The first step holds what is done only once, such as starting an engine.
                left = (time.monotonic() - first) * (total - done) / max(1, done - 1)
                say(f"{done} of {total} {unit}" + (f", about {left:.0f} s left" if 1 < done < total else ""))

        yield step


def numbers(text: str, what: str = "lengths", example: str = "1024,4096") -> tuple[int, ...]:
    """Numbers with commas, each once, ascending.

    Raises:
        BadUsage: something else.
    """
    from eval.errors import BadUsage

    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise BadUsage(f"the {what} are {text!r}; give numbers with commas, such as {example}")
    return tuple(sorted({int(part) for part in parts}))
