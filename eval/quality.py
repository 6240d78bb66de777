"""Answer quality, paired: every arm answers the same questions, and each is compared with the first arm.

The questions of one context share its cache namespace, so that a context is read once an arm; contexts, arms and runs
share nothing. Requests go one at a time, so that a run repeated on the same engine gives the same answers.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from eval.arms import Arm, by_engine
from eval.datasets import Dataset, within
from eval.errors import BadUsage, NotMeasured
from eval.faithfulness import abstains
from eval.measures import agreement, contains, exact, f1, first_token, rouge_l, supported_share
from eval.results import Results
from eval.serve import EngineServer, OpenServer, messages_of, probe
from eval.served import Served, Server
from eval.statistics import Difference, McNemar, Pair, Verdict, holm, loss, mcnemar, non_inferiority, paired_difference
from eval.tasks import TASKS
from eval.tasks.task import Context, Question, build_context
from eval.tasks.words import Language
from serving.errors import StartError
from serving.model import PACKAGED

_SUITES = Path(__file__).parent / "suites"
_LOGPROBS = 20
# The word lists hold no more that can be told apart.
_MOST_QUESTIONS = 6
_PACKAGED_LANGUAGES = ("en",)
# As LongBench v2 reads answers (Bai et al., 2024, arXiv:2412.15204), or the letter alone.
_CHOSEN = re.compile(r"correct answer is:?\s*\**\(?([A-D])\b")
_LETTER_ALONE = re.compile(r"^\W*([A-D])(?:\W*$|[).:])")


@dataclass(frozen=True, slots=True)
class Suite:
    """What is asked, and what decides; all of it fixed before a run. Margins are in points of 1."""

    name: str
    margin: float
    alpha: float
    informative: float
    tasks: tuple[str, ...]
    languages: tuple[Language, ...]
    lengths: tuple[int, ...]
    number: int
    questions: int

    def narrowed(
        self,
        *,
        tasks: Sequence[str] | None = None,
        languages: Sequence[str] | None = None,
        lengths: Sequence[int] | None = None,
        number: int | None = None,
    ) -> Suite:
        """The suite with only these tasks and languages, or with other lengths or numbers; None leaves it as it is.

        Raises:
            BadUsage: the suite has no such task or language.
        """
        for kind, wanted, there in (("task", tasks, self.tasks), ("language", languages, self.languages)):
            if unknown := set(wanted or ()) - set(there):
                raise BadUsage(f"the suite {self.name!r} has no {kind} {min(unknown)!r}; it has {', '.join(there)}")
        return replace(
            self,
            tasks=tuple(task for task in self.tasks if tasks is None or task in tasks),
            languages=tuple(one for one in self.languages if languages is None or one in languages),
            lengths=tuple(lengths or self.lengths),
            number=number or self.number,
        )

    def for_model(self, model: str) -> tuple[Suite, tuple[str, ...]]:
        """The suite without what the model is not made for, and a line for each language that is left out."""
        if model != PACKAGED:
            return self, ()
        left_out = [language for language in self.languages if language not in _PACKAGED_LANGUAGES]
        kept = tuple(language for language in self.languages if language in _PACKAGED_LANGUAGES)
        if not kept:
            raise BadUsage("the packaged model reads English only; set FOREWORD_MODEL to one that reads the others")
        return replace(self, languages=kept), tuple(
            f"skipped {language}: the packaged model reads English only" for language in left_out
        )

    @property
    def contexts(self) -> Iterator[tuple[str, Language, int, int]]:
        """Task, language, length and number of each context; lengths come last, so that short ones are done first."""
        for length in self.lengths:
            for language in self.languages:
                for task in self.tasks:
                    for number in range(self.number):
                        yield task, language, length, number


@dataclass(frozen=True, slots=True)
class Answer:
    """One question through one arm, and its scores; `score` is the share of the gold strings that it contains."""

    arm: str
    context: str
    bucket: str
    question: int
    gold: tuple[str, ...]
    lead: str
    served: Served
    score: float
    f1: float
    rouge_l: float
    exact: float
    supported: float | None


@dataclass(frozen=True, slots=True)
class Score:
    """The control's own means in one task, language and length; `supported` over answers with a number or a name."""

    bucket: str
    n: int
    score: float
    exact: float
    f1: float
    rouge_l: float
    supported: float | None
    informative: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """One task, language and length of a comparison; `p` is Holm-adjusted, and small where the arm has lost.

    `density` is the arm's mean over the first questions, which read their contexts; None where it is not told.
    """

    name: str
    control: float
    treated: float
    difference: Difference
    mcnemar: McNemar
    p: float
    informative: bool
    density: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against the control. `verdict` pools the informative buckets; it is None when there is none.

    `fallbacks` counts the arm's prompts that were to be read sparsely and were not, by reason.
    """

    arm: str
    control: str
    verdict: Verdict | None
    buckets: tuple[Bucket, ...]
    same_answer: float | None
    answer_f1: float | None
    same_first_token: float | None
    first_token_kl: float | None
    largest_kl: float | None
    fallbacks: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `unwanted_hits` are first questions on a context that found something cached; None: not told."""

    scores: tuple[Score, ...]
    comparisons: tuple[Comparison, ...]
    answers: tuple[Answer, ...]
    failures: tuple[str, ...]
    unwanted_hits: int | None
    skipped: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether every arm is shown to be no worse than the control, on prompts that nothing had been cached of."""
        verdicts = [comparison.verdict for comparison in self.comparisons]
        no_worse = all(verdict is not None and verdict.outcome == "non-inferior" for verdict in verdicts)
        return no_worse and self.unwanted_hits == 0 and not self.failures


def suite_names() -> list[str]:
    """The suites of the package."""
    return sorted(path.stem for path in _SUITES.glob("*.toml"))


def suite_file(name: str) -> Path:
    """Where a suite of the package lies, by name, or a TOML file, by path."""
    return Path(name) if "/" in name or name.endswith(".toml") else _SUITES / f"{name}.toml"


def read_suite(name: str) -> dict[str, Any]:
    """The content of a suite's file.

    Raises:
        BadUsage: there is none, or it cannot be read.
    """
    try:
        return tomllib.loads(suite_file(name).read_text("utf-8"))
    except FileNotFoundError as error:
        known = ", ".join(suite_names())
        raise BadUsage(f"there is no suite {name!r}; use one of {known}, or give a TOML file") from error
    except (OSError, ValueError) as error:
        raise BadUsage(f"the suite {name!r} cannot be read: {error}") from error


def load_suite(name: str) -> Suite:
    """What a suite of the package, or a TOML file by path, says of quality.

    Raises:
        BadUsage: there is none, or it lacks something.
    """
    content = read_suite(name)
    try:
        settings = {**content["verdict"], **content["contexts"]}
        tuples = {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
        suite = Suite(name=name, **{**settings, **tuples})
    except (KeyError, TypeError) as error:
        raise BadUsage(f"the suite {name!r} cannot be read: {error}") from error
    if told := _fault(suite):
        raise BadUsage(f"the suite {name!r} cannot be used: {told}")
    return suite


def _fault(suite: Suite) -> str | None:
    """What is wrong with a suite, or None."""
    if unknown := set(suite.tasks) - set(TASKS):
        return f"it names the task {min(unknown)!r}; use {', '.join(TASKS)}"
    if strange := set(suite.languages) - set(get_args(Language)):
        return f"it names the language {min(strange)!r}; use {', '.join(get_args(Language))}"
    if not (suite.tasks and suite.languages and suite.lengths and suite.number > 0):
        return "it needs at least one task, language, length and context"
    if not 1 <= suite.questions <= _MOST_QUESTIONS:
        return f"it asks {suite.questions} questions of a context; ask 1 to {_MOST_QUESTIONS}"
    if not all(0 < share < 1 for share in (suite.margin, suite.alpha, suite.informative)):
        return "margin, alpha and informative are shares between 0 and 1"
    return None


async def run_quality(
    arms: Sequence[Arm],
    suite: Suite,
    open_server: OpenServer,
    *,
    seed: int,
    results: Results,
    step: Callable[[], None],
    at_once: int = 1,
    known: Sequence[Answer] = (),
    own: Dataset | None = None,
) -> Report:
    """Ask every question of the suite through every arm.

    Args:
        own: what is asked in the place of the suite's tasks; the suite then says what decides.
        at_once: contexts of an arm that are in work together; their times then mean nothing.
        known: answers of a run that was broken off; contexts that an arm has answered wholly are not asked again.
        open_server: what serves a variant, such as `serve.opened` with its settings.
        step: called after each context of each arm.

    Raises:
        BadUsage: an arm cannot be served as it says.
        NotMeasured: an arm gave no answer at all.
        StartError: an engine does not start.
    """
    contexts: list[Context] = []
    answers: list[Answer] = []
    asked = Counter((answer.arm, answer.context) for answer in known if not answer.served.error)
    whole: set[tuple[str, str]] = set()
    skipped: list[str] = []
    left_out: tuple[str, ...] = ()
    await probe(arms, open_server)
    for variant, group in by_engine(arms):
        try:
            async with open_server(variant) as server:
                for arm in group:
                    server.require(arm)
                results.add("engine", {"variant": str(variant), **server.about})
                if not contexts:
                    contexts, left_out = _contexts(suite, own, seed, server)
                    every = [(arm.name, context) for arm in arms for context in contexts]
                    whole = {(name, one.id) for name, one in every if asked[name, one.id] >= len(one.questions)}
                    answers += [answer for answer in known if (answer.arm, answer.context) in whole]
                for number, start in enumerate(range(0, len(contexts), at_once)):
                    together = contexts[start : start + at_once]
                    # Whatever drifts over time meets both first and last arms alike.
                    for arm in group if number % 2 == 0 else reversed(group):
                        left = [context for context in together if (arm.name, context.id) not in whole]
                        for given in await asyncio.gather(*(_ask(context, arm, server) for context in left)):
                            answers += given
                            for answer in given:
                                results.add("answer", asdict(answer))
                            step()
        except (StartError, BadUsage) as error:
            if not answers:
                raise
            skipped += [f"{arm.name}: not measured, {error}" for arm in group]
    answered = {answer.arm for answer in answers}
    report = report_of([arm for arm in arms if arm.name in answered], answers, suite, seed)
    return replace(report, failures=(*skipped, *report.failures), skipped=left_out)


def _counting(server: Server) -> EngineServer:
    if not isinstance(server, EngineServer):
        raise BadUsage("the first arm is the control and counts the tokens; let it be one of this machine")
    return server


def _contexts(suite: Suite, own: Dataset | None, seed: int, server: Server) -> tuple[list[Context], tuple[str, ...]]:
    """What is asked, and a line for what does not fit."""
    if own is None:
        return list(_build(suite, seed, server)), ()
    counting = _counting(server)
    fitting = within(own, counting.window, counting.count_prompt)
    told = f"{fitting.skipped} of the contexts of {own.name!r} are longer than the window"
    return list(fitting.contexts), (told,) if fitting.skipped else ()


def _build(suite: Suite, seed: int, server: Server) -> Iterator[Context]:
    counting = _counting(server)
    for task, language, length, number in suite.contexts:
        try:
            yield build_context(
                task,
                TASKS[task],
                language=language,
                length=length,
                number=number,
                seed=seed,
                questions=suite.questions,
                count_prompt=counting.count_prompt,
            )
        except ValueError as error:
            raise BadUsage(str(error)) from error


async def _ask(context: Context, arm: Arm, server: Server) -> list[Answer]:
    salt = uuid.uuid4().hex
    answers = []
    for number, question in enumerate(context.questions):
        served = await server.serve(
            messages_of(context.sources, question, arm.keep),
            arm,
            salt=salt,
            max_tokens=question.max_tokens,
            logprobs=_LOGPROBS,
        )
        answers.append(_scored(context, question, number, arm, served))
    return answers


def _scored(context: Context, question: Question, number: int, arm: Arm, served: Served) -> Answer:
    said = _first_sentence(served.text) if question.at_once else served.text
    text = "\n".join(excerpt.text for source in context.sources for excerpt in source.excerpts)
    golds = [" ".join(gold) for gold in (question.gold, *question.others)]
    return Answer(
        arm=arm.name,
        context=context.id,
        bucket=f"{context.task} {context.language} {context.length}",
        question=number,
        gold=question.gold,
        lead=question.lead,
        served=served,
        score=_right(said, question),
        f1=max(f1(said, gold) for gold in golds),
        rouge_l=max(rouge_l(said, gold) for gold in golds),
        exact=max(exact(said, gold) for gold in golds),
        supported=supported_share(served.text, text, question=question.text),
    )


def _right(said: str, question: Question) -> float:
    """How right an answer is, from 0 to 1."""
    if question.judged == "letter":
        chosen = _CHOSEN.search(said) or _LETTER_ALONE.match(said)
        return float(chosen is not None and chosen[1] == question.gold[0])
    if question.judged == "refusal":
        return float(abstains(said, question=question.text))
    return max(contains(said, gold) for gold in (question.gold, *question.others))


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[。！？])|(?<=[.!?])\s|\n", text.strip(), maxsplit=1)[0]


def report_of(arms: Sequence[Arm], answers: Sequence[Answer], suite: Suite, seed: int) -> Report:
    """Every arm against the first, by the suite's margins; contexts are told apart by their ids.

    Raises:
        NotMeasured: an arm gave no answer at all.
    """
    failures = tuple(f"{a.arm}: {a.context}: {a.served.error}" for a in answers if a.served.error)
    by_arm = {arm.name: {(a.context, a.question): a for a in answers if a.arm == arm.name} for arm in arms}
    for name, given in by_arm.items():
        if all(answer.served.error for answer in given.values()):
            first = next((answer.served.error for answer in given.values()), None)
            raise NotMeasured(f"the arm {name!r} gave no answer; the first failure was {first!r}")
    control = arms[0].name
    comparisons = tuple(_compare(control, arm.name, by_arm[control], by_arm[arm.name], suite, seed) for arm in arms[1:])
    cold = {arm.name for arm in arms if not arm.warm}
    firsts = [a.served.cached_tokens for a in answers if a.arm in cold and a.question == 0 and not a.served.error]
    hits = None if any(cached is None for cached in firsts) else sum(1 for cached in firsts if cached)
    scores = _scores([answer for answer in answers if answer.arm == control], suite)
    return Report(tuple(scores), comparisons, tuple(answers), failures, hits)


def _scores(answers: Sequence[Answer], suite: Suite) -> Iterator[Score]:
    for name in dict.fromkeys(answer.bucket for answer in answers):
        ones = [answer for answer in answers if answer.bucket == name]
        supported = [answer.supported for answer in ones if answer.supported is not None]
        score = fmean(answer.score for answer in ones)
        yield Score(
            bucket=name,
            n=len(ones),
            score=score,
            exact=fmean(answer.exact for answer in ones),
            f1=fmean(answer.f1 for answer in ones),
            rouge_l=fmean(answer.rouge_l for answer in ones),
            supported=fmean(supported) if supported else None,
            informative=score >= suite.informative,
        )


def _compare(
    control: str,
    arm: str,
    controls: dict[tuple[str, int], Answer],
    treated: dict[tuple[str, int], Answer],
    suite: Suite,
    seed: int,
) -> Comparison:
    """A failed request is a wrong answer: what cannot be served is not true."""
    both = [(controls[key], treated[key]) for key in controls if key in treated]
    buckets = [
        _bucket(name, [pair for pair in both if pair[0].bucket == name], suite, seed)
        for name in dict.fromkeys(answer.bucket for answer, _ in both)
    ]
    adjusted = holm({bucket.name: bucket.p for bucket in buckets if bucket.informative})
    buckets = [replace(bucket, p=adjusted.get(bucket.name, bucket.p)) for bucket in buckets]
    counted = {bucket.name for bucket in buckets if bucket.informative}
    pooled = [_pair(*pair) for pair in both if pair[0].bucket in counted]
    answered = [(c, t) for c, t in both if not c.served.error and not t.served.error]
    alike = [agreement(c.served.text, t.served.text) for c, t in answered]
    firsts = [first_token(c.served.first, t.served.first) for c, t in both if c.served.first and t.served.first]
    return Comparison(
        arm=arm,
        control=control,
        verdict=non_inferiority(pooled, suite.margin, seed, alpha=suite.alpha) if pooled else None,
        buckets=tuple(buckets),
        same_answer=fmean(one.exact for one in alike) if alike else None,
        answer_f1=fmean(one.f1 for one in alike) if alike else None,
        same_first_token=fmean(first.top1 for first in firsts) if firsts else None,
        first_token_kl=fmean(first.kl for first in firsts) if firsts else None,
        largest_kl=max((first.kl for first in firsts), default=None),
        fallbacks=dict(Counter(t.served.fallback_reason for t in treated.values() if t.served.fallback_reason)),
    )


def _bucket(name: str, both: Sequence[tuple[Answer, Answer]], suite: Suite, seed: int) -> Bucket:
    pairs = [_pair(*pair) for pair in both]
    control = fmean(pair.control for pair in pairs)
    densities = [t.served.density for _, t in both if t.question == 0 and t.served.density is not None]
    return Bucket(
        name=name,
        control=control,
        treated=fmean(pair.treated for pair in pairs),
        difference=paired_difference(pairs, seed),
        mcnemar=mcnemar(pairs),
        p=loss(pairs, seed),
        informative=control >= suite.informative,
        density=fmean(densities) if densities else None,
    )


def _pair(control: Answer, treated: Answer) -> Pair:
    return Pair(context=control.context, treated=treated.score, control=control.score)


def summary(report: Report) -> dict[str, Any]:
    """The report without the single answers."""
    return {
        "scores": [asdict(score) for score in report.scores],
        "comparisons": [asdict(comparison) for comparison in report.comparisons],
        "failures": list(report.failures),
        "unwanted_hits": report.unwanted_hits,
        "skipped": list(report.skipped),
    }
