"""`foreword eval`: what the project claims, measured."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from app import log
from eval import run_cli
from eval.console import engine_config, numbers, progress, say, settings_of_service, told

if TYPE_CHECKING:
    from eval.facts import Fact
    from eval.quality import Report
    from eval.warming import Warming

_out = Console(soft_wrap=True)

_ARMS = (
    "The control first: exact, again, warm, sparse, half; with settings as in exact+chunk=256 or "
    "sparse+select=alpha:0.02."
)
Arms = Annotated[str, typer.Option(help=_ARMS)]
AtOnce = Annotated[int, typer.Option(min=1, help="Prompts that are sent together.")]
Seed = Annotated[int, typer.Option(help="Decides every prompt.")]
Out = Annotated[Path | None, typer.Option(help="File for the results (JSON lines); it must not exist yet.")]
Engine = Annotated[
    str,
    typer.Option(
        help="vllm; or reference, which computes what sparse prefill answers on any device, as a mask over dense "
        "attention: its answers count, its times mean nothing."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

cli = typer.Typer(no_args_is_help=True, help="Measure the service.")
cli.command()(run_cli.run)
cli.command()(run_cli.compare)
cli.command("list")(run_cli.list_)
cli.add_typer(run_cli.baseline, name="baseline")


# The settings that decide which passages are found, and what of a document is read early.
_SEARCH = {"embedding_model", "chunk_tokens", "retrieve_share", "retrieve_limit", "warm"}


@cli.callback()
def main() -> None:
    """Measure the service."""
    log.configure(logging.WARNING)


@cli.command()
def speed(
    arms: Annotated[str | None, typer.Option(help=f"{_ARMS} Default exact,again.")] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "1024,2048,4096",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of prompts of each length.")] = 6,
    at_once: AtOnce = 1,
    sweep: Annotated[
        str | None, typer.Option(help="Engines instead of arms, such as 'chunk=256,512 kv=auto,fp8 quant=none,fp8'.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights of a shape, 8b or tiny.")] = None,
    seed: Seed = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time to first token of arms, paired on the same prompts."""
    from eval.arms import parse_arms, sweep_arms
    from eval.errors import BadUsage
    from eval.identity import identity
    from eval.results import default_path, plain, results_file
    from eval.serve import opened
    from eval.shapes import with_shape
    from eval.speed import run_speed
    from eval.tables import speed_table

    path = out or default_path("speed")
    with told():
        config = engine_config()
        config = with_shape(config, shape) if shape else config
        if sweep and arms:
            raise BadUsage("--sweep makes its own arms; give either --sweep or --arms")
        chosen = sweep_arms(sweep.split()) if sweep else parse_arms(arms or "exact,again")
        sizes = numbers(lengths)
        about = {**identity(seed=seed, config=config), "arms": [asdict(arm) for arm in chosen], "at_once": at_once}
        with results_file(path) as results, progress(len(chosen) * len(sizes) * repeats, "rounds") as step:
            results.add("identity", about)
            server = partial(opened, config=config, say=say)
            run = run_speed(
                chosen, sizes, repeats, server, seed=seed, results=results, say=say, step=step, at_once=at_once
            )
            measured = asyncio.run(run)
            results.add("summary", asdict(measured))
    if as_json:
        print(json.dumps({**about, **plain(asdict(measured))}, indent=2))
    else:
        _out.print(speed_table(measured), markup=False, highlight=False)
        _tell(measured.limits)
        _tell_hits(measured.unwanted_hits)
    say(f"every request is in {path}")
    if measured.unwanted_hits != 0:
        raise typer.Exit(1)


@cli.command()
def quality(
    suite: Annotated[str, typer.Option(help="quick, full, or a TOML file.")] = "quick",
    arms: Arms = "exact,again",
    tasks: Annotated[str | None, typer.Option(help="Only these tasks of the suite.")] = None,
    languages: Annotated[str | None, typer.Option(help="Only these languages of the suite.")] = None,
    lengths: Annotated[str | None, typer.Option(help="These lengths instead of the suite's.")] = None,
    contexts: Annotated[int | None, typer.Option(min=1, help="Contexts of each task and length.")] = None,
    engine: Engine = "vllm",
    at_once: AtOnce = 1,
    seed: Seed = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Answers of arms, paired on the same questions, with a verdict. Exit code 0 only when no arm is worse."""
    from eval.arms import parse_arms
    from eval.identity import identity
    from eval.quality import load_suite, run_quality, summary
    from eval.results import default_path, results_file
    from eval.serve import engine_named, opened

    path = out or default_path("quality")
    with told():
        config = engine_config()
        chosen = parse_arms(arms)
        runs = engine_named(engine, chosen)
        asked = load_suite(suite)
        asked = asked.narrowed(
            tasks=tuple(tasks.split(",")) if tasks else None,
            languages=tuple(languages.split(",")) if languages else None,
            lengths=numbers(lengths) if lengths else None,
            number=contexts,
        )
        asked, skipped = asked.for_model(config.model)
        about = {
            **identity(seed=seed, config=config),
            "engine": runs,
            "arms": [asdict(arm) for arm in chosen],
            "suite": asdict(asked),
            "at_once": at_once,
        }
        total = sum(1 for _ in asked.contexts) * len(chosen)
        with results_file(path) as results, progress(total, "contexts") as step:
            results.add("identity", about)
            server = partial(opened, config=config, say=say, engine=runs)
            run = run_quality(chosen, asked, server, seed=seed, results=results, step=step, at_once=at_once)
            report = replace(asyncio.run(run), skipped=skipped)
            results.add("summary", summary(report))
    _show(report, about, as_json)
    say(f"every answer is in {path}")
    if not report.passed:
        raise typer.Exit(1)


@cli.command()
def pool(
    files: Annotated[list[Path], typer.Argument(help="Results of `quality` with the same arms on other prompts.")],
    as_json: AsJson = False,
) -> None:
    """Several quality runs as one: of other seeds, tasks or lengths, broken off or not. Exit code as of `quality`."""
    from eval.pool import pooled

    with told():
        report, about = pooled(files)
    _show(report, about, as_json)
    if not report.passed:
        raise typer.Exit(1)


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
def warming(
    length: Annotated[int, typer.Option(min=500, help="Tokens of the documents.")] = 6000,
    repeats: Annotated[int, typer.Option(min=1, help="Documents that are read early and in one go.")] = 3,
    questions: Annotated[int, typer.Option(min=5, help="Questions alone, beside the reading, and for estimates.")] = 40,
    shape: Annotated[str | None, typer.Option(help="Random weights of a shape, 8b or tiny.")] = None,
    seed: Seed = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Reading documents early: how fast it is, and what questions notice of it."""
    from eval.identity import identity
    from eval.results import default_path, results_file
    from eval.shapes import with_shape
    from eval.warming import measure_warming, warming_lines
    from serving.vllm_engine import VllmEngine

    path = out or default_path("warming")
    with told():
        config = engine_config()
        config = with_shape(config, shape) if shape else config
        about = identity(seed=seed, config=config)
        total = repeats + 3 * questions
        with results_file(path) as results, progress(total, "measurements") as step, TemporaryDirectory() as folder:
            results.add("identity", about)

            async def run() -> Warming:
                engine = VllmEngine(config)
                say("starting the engine, about a minute")
                await engine.start()
                try:
                    return await measure_warming(
                        engine,
                        Path(folder),
                        length=length,
                        repeats=repeats,
                        questions=questions,
                        seed=seed,
                        results=results,
                        step=step,
                    )
                finally:
                    await engine.stop()

            measured = asyncio.run(run())
            results.add("summary", asdict(measured))
    if as_json:
        print(json.dumps({**about, **asdict(measured)}, indent=2))
    else:
        for name, value in warming_lines(measured):
            print(f"{name:<48}{value}")
    say(f"every measurement is in {path}")


@cli.command()
def tiers(
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "1024,2048,4096",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 3,
    shape: Annotated[str | None, typer.Option(help="Random weights of a shape, 8b or tiny.")] = None,
    seed: Seed = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Bringing a prompt back from slower memory, against computing it anew. Files are written to the data folder."""
    from eval.identity import identity
    from eval.results import default_path, results_file
    from eval.shapes import with_shape
    from eval.tiers import measure_tiers, require_files, tier_lines

    path = out or default_path("tiers")
    with told():
        config = settings_of_service().engine_config
        sizes = numbers(lengths)
        # Not among the service's own files, but on the same disk.
        parent = require_files(config).parent
        parent.mkdir(parents=True, exist_ok=True)
        with (
            results_file(path) as results,
            progress(2 * len(sizes) * repeats, "prompts") as step,
            TemporaryDirectory(prefix="eval-tiers-", dir=parent) as folder,
        ):
            config = with_shape(config, shape) if shape else config
            about = identity(seed=seed, config=replace(config, kv_disk=None))
            results.add("identity", about)
            config = replace(config, kv_disk=Path(folder))
            run = measure_tiers(config, sizes, repeats, seed=seed, results=results, say=say, step=step)
            measured = asyncio.run(run)
            results.add("summary", {"tiers": [asdict(tier) for tier in measured]})
    if as_json:
        print(json.dumps({**about, "tiers": [asdict(tier) for tier in measured]}, indent=2))
    else:
        print("\n".join(tier_lines(measured)))
    say(f"every request is in {path}")


@cli.command()
def volumes(
    file: Annotated[Path | None, typer.Option(help="A document of your own, with --facts.")] = None,
    facts: Annotated[
        Path | None,
        typer.Option(help='Its questions, JSON lines such as {"question": "...", "gold": ["..."], "page": 7}.'),
    ] = None,
    pages: Annotated[int, typer.Option(min=2, help="Pages of the generated handbook.")] = 300,
    questions: Annotated[int, typer.Option(min=1, help="Questions about the generated handbook.")] = 24,
    language: Annotated[Literal["en", "zh"], typer.Option(help="Language of the generated handbook.")] = "en",
    wait: Annotated[float, typer.Option(min=0, help="Most seconds until the document is warm.")] = 1800,
    seed: Seed = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """A document longer than the window: questions to its warm volumes, and to passages alone."""
    from eval.asking import service
    from eval.identity import identity
    from eval.results import default_path, plain, results_file
    from eval.tables import volumes_table
    from eval.volumes import Volumes, measure_volumes

    path = out or default_path("volumes")
    with told():
        name, data, asked = _document(file, facts, pages, questions, language, seed)
        settings = settings_of_service()
        about = {
            **identity(seed=seed, config=settings.engine_config),
            "settings": settings.model_dump(mode="json", include=_SEARCH),
            "document": name,
        }
        with results_file(path) as results, progress(len(asked), "questions") as step, TemporaryDirectory() as folder:
            results.add("identity", about)

            async def run() -> Volumes:
                async with service(settings, Path(folder)) as services:
                    return await measure_volumes(
                        services, name, data, asked, wait=wait, seed=seed, results=results, say=say, step=step
                    )

            measured = asyncio.run(run())
            results.add("summary", asdict(measured))
    if as_json:
        print(json.dumps({**about, **plain(asdict(measured))}, indent=2))
    else:
        _out.print(volumes_table(measured), markup=False, highlight=False)
    say(f"every answer is in {path}")


@cli.command()
def memory(
    url: Annotated[str, typer.Option(help="A running service on this machine.")] = "http://127.0.0.1:8000",
) -> None:
    """Memory of a running service and its processes (proportional set size)."""
    from eval.memory import measure_memory

    for name, mib in measure_memory(url):
        print(f"{mib:>8.0f} MiB  {name}")


def _show(report: Report, about: Mapping[str, Any], as_json: bool) -> None:
    from eval.quality import summary
    from eval.results import plain
    from eval.tables import quality_tables

    if as_json:
        print(json.dumps({**about, **plain(summary(report))}, indent=2))
        return
    _out.print(quality_tables(report), markup=False, highlight=False)
    _tell(report.skipped)
    _tell(report.failures)
    _tell_hits(report.unwanted_hits)


def _document(
    file: Path | None, facts: Path | None, pages: int, questions: int, language: Literal["en", "zh"], seed: int
) -> tuple[str, bytes, Sequence[Fact]]:
    """A file with its facts, or a handbook."""
    from eval.errors import BadUsage
    from eval.facts import read_facts
    from eval.tasks.handbook import handbook, most_facts

    if (file is None) != (facts is None):
        raise BadUsage("--file and --facts go together; without both a handbook is generated")
    if file is not None and facts is not None:
        try:
            return file.name, file.read_bytes(), read_facts(facts)
        except OSError as error:
            raise BadUsage(f"the file {str(file)!r} cannot be read ({error.strerror})") from error
    if questions > (most := most_facts(pages)):
        raise BadUsage(f"a handbook of {pages} pages has room for {most} facts, not {questions}; give more --pages")
    made = handbook(Random(f"{seed}/{language}"), language, pages=pages, facts=questions)
    return "handbook.txt", "\f".join(made.pages).encode(), made.facts


def _tell(lines: tuple[str, ...]) -> None:
    for line in lines:
        say(line)


def _tell_hits(hits: int | None) -> None:
    if hits is None:
        say("whether anything was cached is not proven: a server did not tell")
    elif hits:
        say(f"{hits} requests found something in the cache that should have been empty: the run does not count")
