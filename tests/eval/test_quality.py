"""The whole quality run, from suite to verdict, with an engine that reads perfectly what it is given."""

from __future__ import annotations

import io
import json
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from eval.arms import Variant, parse_arms
from eval.errors import BadUsage, NotMeasured
from eval.quality import Report, Suite, load_suite, run_quality, summary
from eval.results import Results
from eval.served import Server
from eval.statistics import Pair, non_inferiority
from eval.tables import quality_tables
from serving.errors import StartError
from serving.scripted_engine import Script, ScriptedEngine
from tests.eval.reading_engine import opener

SUITE = replace(load_suite("quick"), lengths=(700,), tasks=("facts-single", "documents"), number=30, questions=2)

WHOLE = """
[verdict]
margin = 0.1
alpha = 0.05
informative = 0.6
[contexts]
tasks = ["hops"]
languages = ["en"]
lengths = [512]
number = 1
questions = 4
"""


async def run(arms: str, results: Results, suite: Suite = SUITE, script: Script | None = None) -> Report:
    open_server = opener(script or Script())
    return await run_quality(parse_arms(arms), suite, open_server, seed=0, results=results, step=lambda: None)


async def test_an_arm_that_drops_half_of_the_context_is_inferior(results: Results, lines: io.StringIO) -> None:
    report = await run("exact,again,half", results)
    again, half = report.comparisons
    assert again.verdict is not None
    assert half.verdict is not None
    assert (again.verdict.outcome, half.verdict.outcome) == ("non-inferior", "inferior")
    assert all(score.score == 1 for score in report.scores)
    assert (again.same_answer, again.answer_f1) == (1, 1)
    assert half.same_answer is not None
    assert half.same_answer < 1
    assert report.unwanted_hits == 0
    assert not report.passed
    assert len(lines.getvalue().splitlines()) == 1 + 2 * 30 * 2 * 3
    assert json.loads(json.dumps(summary(report)))["unwanted_hits"] == 0
    assert "half: inferior" in quality_tables(report)


async def test_the_same_arm_twice_passes(results: Results) -> None:
    assert (await run("exact,again", results)).passed


async def test_contexts_in_work_together_are_answered_as_one_after_another(results: Results) -> None:
    server = opener(Script())
    one, some = [
        await run_quality(
            parse_arms("exact,half"), SUITE, server, seed=0, results=results, step=lambda: None, at_once=at_once
        )
        for at_once in (1, 4)
    ]
    key = attrgetter("arm", "context", "question")
    said = [[(key(a), a.served.text, a.score) for a in sorted(report.answers, key=key)] for report in (one, some)]
    assert said[0] == said[1]
    assert some.unwanted_hits == 0


async def test_few_samples_are_no_pass(results: Results) -> None:
    report = await run("exact,again", results, replace(SUITE, number=3))
    verdict = report.comparisons[0].verdict
    assert verdict is not None
    assert verdict.outcome == "too few samples"
    assert (verdict.n_needed or 0) > 12
    assert not report.passed


async def test_what_the_control_cannot_do_is_listed_and_not_counted(results: Results) -> None:
    # The engine copies the first mention, which is not the number that a chain of variables ends with.
    suite = replace(SUITE, tasks=("facts-single", "variables"))
    report = await run("exact,again", results, suite)
    informative = {bucket.name: bucket.informative for bucket in report.comparisons[0].buckets}
    assert informative == {"facts-single en 700": True, "variables en 700": False}
    verdict = report.comparisons[0].verdict
    assert verdict is not None
    assert verdict.difference.n == 60


async def test_an_arm_alone_is_scored(results: Results) -> None:
    report = await run("exact", results, replace(SUITE, number=1))
    assert report.comparisons == ()
    assert [score.n for score in report.scores] == [2, 2]
    assert "facts-single en 700" in quality_tables(report)


async def test_questions_share_their_context_and_nothing_else(results: Results) -> None:
    report = await run("exact,again", results, replace(SUITE, number=2))
    for answer in report.answers:
        cached = answer.served.cached_tokens or 0
        assert (cached > 500) == (answer.question > 0)


async def test_failures_are_wrong_answers_and_told(results: Results) -> None:
    # Half as long, every prompt fits; whole, the longest do not.
    suite = replace(SUITE, number=4)
    report = await run("half,exact", results, suite, Script(window=700))
    assert 0 < len(report.failures) < 16
    assert report.failures[0].startswith("exact: facts-single-en-700-")
    assert "PromptTooLong" in report.failures[0]
    assert not report.passed


async def test_a_warm_arm_is_served_from_the_cache(results: Results) -> None:
    report = await run("exact,warm", results, replace(SUITE, number=1))
    warm = [answer.served for answer in report.answers if answer.arm == "warm"]
    assert all((served.cached_tokens or 0) > 500 and served.path == "warm" for served in warm)
    assert report.unwanted_hits == 0


async def test_tasks_that_do_not_fit_are_told(results: Results) -> None:
    with pytest.raises(BadUsage, match="does not fit 100 tokens"):
        await run("exact", results, replace(SUITE, lengths=(100,)))


async def test_an_engine_that_does_not_start_costs_only_its_own_arms(results: Results) -> None:
    works = opener(Script())

    def open_server(variant: Variant) -> AbstractAsyncContextManager[Server]:
        if variant.kv is not None:
            raise StartError("there is no fp8 here")
        return works(variant)

    report = await run_quality(
        parse_arms("exact,exact+kv=fp8"), SUITE, open_server, seed=0, results=results, step=lambda: None
    )
    assert report.failures == ("exact+kv=fp8: not measured, there is no fp8 here",)
    assert report.scores
    assert not report.passed


@pytest.mark.parametrize("name", ["quick", "full", "release"])
async def test_a_suite_can_pass_with_a_fifth_of_it_not_informative(name: str, results: Results) -> None:
    suite = load_suite(name)
    contexts = len(list(suite.for_model("packaged")[0].contexts)) * 4 // 5
    pairs = [Pair(str(context), 1.0, 1.0) for context in range(contexts) for _ in range(suite.questions)]
    assert non_inferiority(pairs, suite.margin, seed=0).outcome == "non-inferior"


async def test_an_engine_without_sparse_prefill_is_not_called_sparse(results: Results) -> None:
    with pytest.raises(BadUsage, match=r"'sparse' needs an engine with sparse prefill.* FOREWORD_ACCELERATION is on"):
        await run("exact,sparse", results)


async def test_a_sparse_arm_tells_how_much_it_read(results: Results) -> None:
    suite = replace(SUITE, number=2)
    report = await run("exact,sparse,again", results, suite, Script(selector="alpha:0.02", density=0.3))
    sparse, again = report.comparisons
    assert [bucket.density for bucket in sparse.buckets] == pytest.approx([0.3, 0.3])
    assert [bucket.density for bucket in again.buckets] == [1.0, 1.0]
    assert (sparse.fallbacks, report.failures) == ({}, ())
    # The later questions find what the first one has read.
    paths = [(answer.question, answer.served.path) for answer in report.answers if answer.arm == "sparse"]
    assert set(paths) == {(0, "sparse"), (1, "warm")}
    assert " 30%" in quality_tables(report)


async def test_prompts_that_are_not_read_sparsely_are_counted_with_their_reason(results: Results) -> None:
    script = Script(selector="alpha:0.02", fallback_reason="short prompt")
    report = await run("exact,sparse", results, replace(SUITE, number=2, questions=1), script)
    assert report.comparisons[0].fallbacks == {"short prompt": 4}
    assert report.failures == ()
    assert "; 4 not read sparsely (short prompt)" in quality_tables(report)


async def test_prompts_that_are_not_read_sparsely_without_a_reason_do_not_count(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedEngine, "_path", lambda *_: ("exact", 1.0))
    with pytest.raises(NotMeasured, match=r"'sparse' gave no answer.* its path is 'exact'"):
        await run("exact,sparse", results, replace(SUITE, number=1), Script(selector="alpha:0.02"))


@pytest.mark.parametrize("name", ["quick", "full", "release"])
def test_packaged_suites_can_be_read(name: str) -> None:
    suite = load_suite(name)
    assert 0 < suite.margin < 0.1
    assert list(suite.contexts)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        pytest.param("nothing", None, "there is no suite 'nothing'; use one of full, quick, release", id="unknown"),
        pytest.param("a.toml", "margin = ", "cannot be read", id="broken"),
        pytest.param("a.toml", WHOLE.replace("hops", "chess"), "names the task 'chess'", id="unknown task"),
        pytest.param("a.toml", WHOLE.replace('"en"', '"fr"'), "names the language 'fr'", id="unknown language"),
        pytest.param("a.toml", WHOLE.replace("questions = 4", "questions = 9"), "asks 9 questions", id="questions"),
        pytest.param("a.toml", WHOLE.replace("margin = 0.1", "margin = 2"), "shares between 0 and 1", id="margin"),
        pytest.param("a.toml", WHOLE.replace("[512]", "[]"), "at least one", id="no lengths"),
        pytest.param("a.toml", "[verdict]\nmargin = 0.1", "cannot be read", id="incomplete"),
    ],
)
def test_wrong_suites_are_told(name: str, content: str | None, told: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
        name = str(tmp_path / name)
    with pytest.raises(BadUsage, match=told):
        load_suite(name)


def test_a_suite_is_narrowed_only_to_what_it_has() -> None:
    suite = load_suite("full")
    assert suite.narrowed(tasks=["hops"], lengths=[512]).tasks == ("hops",)
    with pytest.raises(BadUsage, match="has no task 'chess'"):
        suite.narrowed(tasks=["chess"])
    with pytest.raises(BadUsage, match="has no language 'fr'"):
        suite.narrowed(languages=["fr"])


def test_what_the_packaged_model_cannot_read_is_skipped_by_name() -> None:
    suite, skipped = load_suite("full").for_model("packaged")
    assert suite.languages == ("en",)
    assert skipped == ("skipped zh: the packaged model reads English only",)
    assert load_suite("full").for_model("/models/other")[0].languages == ("en", "zh")
