"""What every generated context must hold, whatever the task, language, length and seed."""

from __future__ import annotations

import re
from random import Random

import pytest

from eval.measures import contains, supported_share
from eval.serve import EngineServer, messages_of
from eval.tasks import TASKS
from eval.tasks.carrier import paragraph
from eval.tasks.task import Context, build_context
from eval.tasks.words import WORDS, Language
from serving.scripted_engine import ScriptedEngine

LANGUAGES: tuple[Language, ...] = ("en", "zh")
every_task = pytest.mark.parametrize("task", TASKS)
every_language = pytest.mark.parametrize("language", LANGUAGES)


def build(task: str, language: Language = "en", length: int = 2000, number: int = 0, seed: int = 0) -> Context:
    return build_context(
        task,
        TASKS[task],
        language=language,
        length=length,
        number=number,
        seed=seed,
        questions=4,
        count_prompt=EngineServer(ScriptedEngine()).count_prompt,
    )


def text_of(context: Context) -> str:
    return "\n".join(excerpt.text for source in context.sources for excerpt in source.excerpts)


@every_task
@every_language
def test_the_answer_is_in_the_context(task: str, language: Language) -> None:
    context = build(task, language)
    assert len(context.questions) == 4
    for question in context.questions:
        assert contains(text_of(context), question.gold) == 1
        assert contains(question.text, question.gold) == 0
        assert supported_share(f"{question.lead} {' '.join(question.gold)}", text_of(context)) in (1, None)


@every_task
def test_what_the_answer_begins_with_is_in_the_context(task: str) -> None:
    context = build(task)
    # Tracked variables and hops are answered in words of their own.
    leads = [question.lead for question in context.questions]
    assert all(lead in text_of(context) for lead in leads)


@every_task
@every_language
@pytest.mark.parametrize("length", [1000, 3000])
def test_prompts_are_nearly_as_long_as_asked_and_never_longer(task: str, language: Language, length: int) -> None:
    engine = ScriptedEngine()
    context = build(task, language, length)
    longest = max(len(engine.render_chat(messages_of(context.sources, q))) for q in context.questions)
    assert length - 300 < longest <= length


@every_task
def test_a_seed_decides_everything(task: str) -> None:
    assert build(task, seed=1) == build(task, seed=1)
    others = [build(task, seed=2), build(task, seed=1, number=1), build(task, seed=1, length=2100)]
    assert all(text_of(other) != text_of(build(task, seed=1)) for other in others)


@every_task
@every_language
def test_a_context_that_is_too_short_is_told(task: str, language: Language) -> None:
    with pytest.raises(ValueError, match=f"task '{task}' does not fit 100 tokens"):
        build(task, language, length=100)


def test_questions_of_look_alikes_have_as_many_distractors() -> None:
    assert text_of(build("facts-distractors")).count("access code") == 8


def test_documents_are_told_apart_by_their_titles() -> None:
    context = build("documents")
    assert len({source.name for source in context.sources}) == len(context.sources) == 4


@every_language
def test_the_carrier_holds_no_number_and_nothing_that_is_planted(language: Language) -> None:
    draw = Random(0)
    text = " ".join(paragraph(draw, language) for _ in range(500))
    assert not re.search(r"\d|[{}]", text)
    planted = [word for name in ("people", "cities", "colours") for word in WORDS[language][name]]
    assert not [word for word in planted if word in text]


def test_chinese_contexts_are_chinese() -> None:
    for task in TASKS:
        text = text_of(build(task, "zh"))
        assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 20 * len(re.findall(r"[a-z]", text))
