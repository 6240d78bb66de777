"""The commands that make, list, keep and compare whole runs."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from eval.console import engine_config, progress, say, settings_of_service, told

if TYPE_CHECKING:
    from app.settings import Settings
    from eval.datasets import Dataset
    from eval.findings import Findings
    from eval.plan import Plan
    from eval.speed import Timed

_out = Console()
_RUNS = Path("eval-results")
_BASELINES = _RUNS / "baselines"

Place = Annotated[Path, typer.Argument(help="Folder of a run, or the name of a baseline.")]


def run(
    suite: Annotated[str, typer.Option(help="One of `foreword eval list`, or a TOML file.")] = "quick",
    arms: Annotated[str | None, typer.Option(help="The control first; without it those of the suite.")] = None,
    model: Annotated[str | None, typer.Option(help="Model instead of FOREWORD_MODEL.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Of each length and case, instead of the suite's.")] = None,
    data: Annotated[Path | None, typer.Option(help="Questions of your own in the place of the tasks.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave personal data in them: they show in the results.")] = False,
    seed: Annotated[int, typer.Option(help="Decides every prompt.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; it must not hold one yet.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    against: Annotated[str | None, typer.Option(help="Baseline, or folder of a run, to hold this one against.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Speed and answers of arms, with a verdict and a report. Exit code 0 passed, 1 a gate failed, 2 bad usage."""
    from eval.asking import service
    from eval.errors import BadUsage, NotWritten
    from eval.identity import identity
    from eval.plan import load_plan
    from eval.report import write_report
    from eval.report.verdict import verdict
    from eval.run import Folder, Parts, measure
    from eval.serve import opened
    from ingest.redact import found_in, presidio

    with told():
        baseline = (against, _findings(Path(against))) if against else None
        if resume is not None:
            asked = Folder(resume).about().get("asked", {})
            suite, arms, model = asked.get("suite", suite), asked.get("arms"), asked.get("model")
            repeats, seed, raw = asked.get("repeats"), asked.get("seed", seed), asked.get("raw", raw)
            data = Path(asked["data"]) if asked.get("data") else None
        config = engine_config()
        config = replace(config, model=model) if model else config
        plan = load_plan(suite, arms, repeats)
        if plan.quality is not None:
            quality, left_out = plan.quality.for_model(config.model)
            plan = replace(plan, quality=quality)
            for line in left_out:
                say(line)
        settings = settings_of_service()
        settings = settings.model_copy(update={"model": model}) if model else settings
        own = _read_own(data, raw, settings) if data else None
        asked = {"suite": suite, "arms": arms, "model": model, "repeats": repeats, "seed": seed, "raw": raw}
        asked |= {"data": str(data.resolve()), "sha256": sha256(data.read_bytes()).hexdigest()} if data else {}
        about = {**identity(seed=seed, config=config), "asked": asked, "suite": _plain(plan)}
        folder = Folder(resume or out or _RUNS / f"{Path(plan.name).stem}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
        if resume is not None:
            folder.require_same(about)
        elif folder.findings.exists():
            raise BadUsage(f"there is a finished run in {str(folder.path)!r}; name another --out")
        else:
            folder.begin(about)
        say(f"the run is in {folder.path}; broken off, it goes on with: foreword eval run --resume {folder.path}")
        parts = Parts(
            server=partial(opened, config=config, say=say),
            service=partial(service, settings),
            find=lambda text: found_in(text, presidio(settings.ner_model)),
        )
        measuring = measure(
            plan, folder, about, parts, seed=seed, say=say, progress=progress, baseline=baseline, own=own
        )
        findings = asyncio.run(measuring)
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        findings = replace(findings, about={**findings.about, "finished": finished})
        folder.save(findings)
        try:
            write_report(findings, folder.path)
        except OSError as error:
            told_why = f"the report cannot be written to {str(folder.path)!r} ({error.strerror})"
            raise NotWritten(f"{told_why}; make room and go on with --resume {folder.path}") from error
    if as_json:
        print(folder.findings.read_text("utf-8"))
    else:
        _out.print(verdict(findings), markup=False, highlight=False, soft_wrap=True)
        for gate in findings.gates:
            _out.print(f"{gate.outcome:>7}  {gate.name}: {gate.told}", markup=False, highlight=False, soft_wrap=True)
    say(f"the report is {folder.path / 'report.html'}")
    if not findings.passed:
        raise typer.Exit(1)


def compare(
    before: Place,
    after: Place,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Two runs: every setting in which they differ, and their figures side by side."""
    from eval.compare import compare as compared
    from eval.results import plain
    from eval.tables import changes_table

    with told():
        found = compared(_findings(before), _findings(after), _timed(before), _timed(after))
    if as_json:
        print(json.dumps(plain(asdict(found)), indent=2))
        return
    for setting in found.settings:
        _out.print(
            f"{setting.name}: {setting.before!r} -> {setting.after!r}", markup=False, highlight=False, soft_wrap=True
        )
    if not found.settings:
        _out.print("all settings are the same", markup=False, highlight=False, soft_wrap=True)
    if found.warning:
        say(found.warning)
    _out.print(changes_table(found.changes), markup=False, highlight=False, soft_wrap=True)


def list_() -> None:
    """The suites that there are, the runs made here, and the baselines kept."""
    from eval.errors import BadUsage
    from eval.plan import plans

    with told():
        for name, about in plans():
            _out.print(f"suite     {name:<12}{about}", markup=False, highlight=False, soft_wrap=True)
        for file in sorted(_RUNS.glob("*/config.json")):
            try:
                findings = _findings(file.parent)
            except BadUsage:
                state = "not finished"
            else:
                state = "passed" if findings.passed else "not passed"
            _out.print(f"run       {file.parent}  {state}", markup=False, highlight=False, soft_wrap=True)
        for file in sorted(_BASELINES.glob("*.json")):
            _out.print(f"baseline  {file.stem}", markup=False, highlight=False, soft_wrap=True)


baseline = typer.Typer(no_args_is_help=True, help="Runs to hold later ones against.")


@baseline.command()
def save(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    run_: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Folder; without it the latest run.")] = None,
) -> None:
    """Keep a finished run as a baseline."""
    from eval.errors import BadUsage

    with told():
        if not name.replace("-", "").replace("_", "").isalnum():
            raise BadUsage(f"a baseline cannot be called {name!r}; use letters, digits, '-' and '_'")
        source = run_ or _latest()
        _findings(source)
        target = _BASELINES / f"{name}.json"
        if target.exists():
            raise BadUsage(f"there is a baseline {name!r} already; delete {str(target)!r} or choose another name")
        _BASELINES.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / "findings.json", target)
    say(f"{source} is the baseline {name!r}; hold a run against it with: foreword eval run --against {name}")


def _read_own(data: Path, raw: bool, settings: Settings) -> Dataset:
    """The user's questions, without personal data unless they are wanted as they are; says whose they are."""
    from eval.datasets import read_dataset
    from ingest.redact import Redactor, load_key, presidio

    def redact(text: str) -> str:
        return Redactor(presidio(settings.ner_model), load_key(settings.folder / "redaction.key")).redact(text).text

    own = read_dataset(data, redact=None if raw else redact)
    questions = sum(len(context.questions) for context in own.contexts)
    say(f"{questions:,} questions about {len(own.contexts):,} contexts of {own.name!r}")
    say(f"licence: {own.licence or 'not told'}; source: {own.source or 'not told'}")
    return own


def _latest() -> Path:
    from eval.errors import BadUsage

    runs = sorted(_RUNS.glob("*/findings.json"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise BadUsage(f"there is no finished run in {str(_RUNS)!r}; name the folder of one")
    return runs[-1].parent


def _findings(place: Path) -> Findings:
    """The findings of a run by its folder, or of a baseline by its name."""
    from eval.run import read_findings

    kept = _BASELINES / f"{place}.json"
    return read_findings(place / "findings.json" if place.is_dir() or not kept.exists() else kept)


def _timed(place: Path) -> tuple[Timed, ...]:
    from eval.run import read_timed

    return read_timed(place / "results.jsonl")


def _plain(plan: Plan) -> dict[str, Any]:
    """A plan as JSON holds it, without what it leaves out."""

    def given(data: Any) -> Any:
        if isinstance(data, dict):
            return {name: given(value) for name, value in data.items() if value not in (None, {}, [])}
        return [given(one) for one in data] if isinstance(data, list) else data

    plain: dict[str, Any] = given(json.loads(json.dumps({**asdict(plan), "arms": [arm.name for arm in plan.arms]})))
    return plain
