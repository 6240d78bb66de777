"""Several quality runs as one: the same arms on other prompts, read back from their results files.

Runs on other seeds, tasks or lengths, one after another or on several machines, together have the samples that one of
them lacks. A file whose run was broken off counts with what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.arms import Arm, Variant
from eval.errors import BadUsage
from eval.quality import Answer, Report, Suite, report_of
from eval.results import read_results
from eval.served import Served

# What must be the same in all runs, beside what decides: answers of other arms or weights are another measurement.
_SAME = ("model", "weights", "engine", "commit", "arms")
_DECIDES = ("margin", "alpha", "informative")


@dataclass(frozen=True, slots=True)
class _Run:
    file: Path
    about: Mapping[str, Any]
    answers: tuple[Answer, ...]


def pooled(files: Sequence[Path]) -> tuple[Report, dict[str, Any]]:
    """The report of all runs together, and what they have in common.

    Raises:
        BadUsage: a file is no quality run, two runs differ in more than their prompts, or they share prompts.
        NotMeasured: an arm gave no answer at all.
    """
    runs = [_read(file) for file in files]
    first = runs[0].about
    for run in runs[1:]:
        _require_same(runs[0], run)
    answers = _together(runs)
    arms = [Arm(**{**arm, "variant": Variant(**arm["variant"])}) for arm in first["arms"]]
    answered = {answer.arm for answer in answers}
    if arms[0].name not in answered:
        raise BadUsage(f"the files hold no answer of the control {arms[0].name!r}; let the runs go on for longer")
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in first["suite"].items()
    }
    suite = Suite(**settings)
    report = report_of([arm for arm in arms if arm.name in answered], answers, suite, int(first["seed"]))
    missing = [f"{arm.name}: not measured" for arm in arms if arm.name not in answered]
    about = {
        "runs": [{"file": str(run.file), "seed": run.about["seed"], "date": run.about["date"]} for run in runs],
        **{name: first[name] for name in _SAME},
        **{name: first["suite"][name] for name in _DECIDES},
    }
    return replace(report, failures=(*missing, *report.failures)), about


def _read(file: Path) -> _Run:
    records = list(read_results(file))
    try:
        about = records[0]
        # Older runs do not say it, for there was no choice.
        about = {"engine": "vllm"} | about
        answers = tuple(read_answer(record) for record in records if record["kind"] == "answer")
        missing = {*_SAME, "seed", "date", "suite"} - about.keys()
    except (IndexError, KeyError, TypeError) as error:
        raise BadUsage(f"{str(file)!r} does not hold the answers of a quality run; give files of 'quality'") from error
    if missing:
        raise BadUsage(f"{str(file)!r} does not begin with what a quality run measured; give files of 'quality'")
    return _Run(file, about, answers)


def read_answer(record: Mapping[str, Any]) -> Answer:
    """An answer from its line."""
    given = {name: value for name, value in record.items() if name != "kind"}
    served = Served(**given["served"])
    if served.first is not None:
        # JSON has no keys but text.
        served = replace(served, first={int(token): logprob for token, logprob in served.first.items()})
    if served.gaps is not None:
        served = replace(served, gaps=tuple(served.gaps))
    return Answer(**{**given, "gold": tuple(given["gold"]), "served": served})


def _require_same(one: _Run, other: _Run) -> None:
    for name in _SAME:
        if one.about[name] != other.about[name]:
            raise BadUsage(f"{str(one.file)!r} and {str(other.file)!r} differ in their {name}; pool runs of the same")
    for name in _DECIDES:
        if one.about["suite"][name] != other.about["suite"][name]:
            raise BadUsage(f"{str(one.file)!r} and {str(other.file)!r} differ in their {name}; pool runs of one suite")


def _together(runs: Sequence[_Run]) -> list[Answer]:
    """All answers, with the seed in their contexts' ids: contexts of one name and different seeds are others."""
    answers: dict[tuple[str, str, int], Answer] = {}
    for run in runs:
        for answer in run.answers:
            context = f"{run.about['seed']}/{answer.context}"
            key = answer.arm, context, answer.question
            if key in answers:
                raise BadUsage(
                    f"{str(run.file)!r} asks {answer.context!r} of seed {run.about['seed']} once more; "
                    "give every run a seed of its own"
                )
            answers[key] = replace(answer, context=context)
    return list(answers.values())
