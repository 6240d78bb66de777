"""What requests ask for, whose the rows are, and when a request is reported; runners are fakes in vLLM's two shapes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from serving.accel.policy import DENSE_TAIL, Selector
from serving.accel.requests import UNREADABLE, Asked, Requests, follow, understood

PROMPT = 1000
TAIL = PROMPT - DENSE_TAIL


def _sparse(dense_from: int = TAIL, selector: str = "alpha", **given: Any) -> Asked:
    return Asked(PROMPT, sparse=True, dense_from=dense_from, selector=Selector.parse(selector), **given)


@pytest.mark.parametrize(
    ("extra_args", "default_sparse", "asked"),
    [
        pytest.param(None, False, Asked(PROMPT), id="says nothing"),
        pytest.param(None, True, _sparse(), id="says nothing where sparse is the default"),
        pytest.param({"other": 1}, False, Asked(PROMPT), id="says something to somebody else"),
        pytest.param({"foreword_prefill": "sparse"}, False, _sparse(), id="sparse"),
        pytest.param({"foreword_prefill": "exact"}, True, Asked(PROMPT), id="exact where sparse is the default"),
        pytest.param({"foreword_trace": "r"}, False, Asked(PROMPT, trace="r"), id="a name"),
        pytest.param({"foreword_trace": 7}, True, _sparse(trace="7"), id="a name that is a number"),
        pytest.param(
            {"foreword_prefill": "sparse", "foreword_selector": "mass:0.9,tile=128"},
            False,
            _sparse(selector="mass:0.9,tile=128"),
            id="a selector",
        ),
        pytest.param({"foreword_selector": "mass:0.9"}, False, Asked(PROMPT), id="a selector alone asks for nothing"),
        pytest.param({"foreword_dense_from": 900}, True, _sparse(900), id="where the question begins"),
        pytest.param({"foreword_dense_from": "900"}, True, _sparse(900), id="as text"),
        pytest.param({"foreword_dense_from": 1000}, True, _sparse(999), id="the last token is always dense"),
        pytest.param({"foreword_dense_from": 10**30}, True, _sparse(999), id="far behind the end"),
        pytest.param({"foreword_dense_from": 0}, True, _sparse(0), id="everything is dense"),
        pytest.param({"foreword_dense_from": -(10**30)}, True, _sparse(0), id="far before the beginning"),
    ],
)
def test_understood(extra_args: Mapping[str, Any] | None, default_sparse: bool, asked: Asked) -> None:
    assert understood(PROMPT, extra_args, sparse=default_sparse) == asked


@pytest.mark.parametrize(("prompt", "dense_from"), [(1, 0), (DENSE_TAIL, 0), (DENSE_TAIL + 5, 5)])
def test_a_short_prompt_is_dense_from_its_beginning(prompt: int, dense_from: int) -> None:
    assert understood(prompt, None, sparse=True).dense_from == dense_from


@pytest.mark.parametrize(
    "extra_args",
    [
        pytest.param({"foreword_prefill": "fast"}, id="no such way"),
        pytest.param({"foreword_prefill": None}, id="no way"),
        pytest.param({"foreword_prefill": ["sparse"]}, id="a list"),
        pytest.param({"foreword_selector": "best:1"}, id="no such rule"),
        pytest.param({"foreword_selector": 5}, id="a selector that is a number"),
        pytest.param({"foreword_selector": ""}, id="an empty selector"),
        pytest.param({"foreword_dense_from": "the end"}, id="no number"),
        pytest.param({"foreword_dense_from": None}, id="nothing"),
        pytest.param({"foreword_dense_from": [900]}, id="a list of numbers"),
        pytest.param({"foreword_dense_from": float("inf")}, id="infinity"),
        pytest.param({"foreword_dense_from": float("nan")}, id="not a number"),
    ],
)
def test_what_cannot_be_understood_is_refused(extra_args: Mapping[str, Any]) -> None:
    asked = understood(PROMPT, {"foreword_prefill": "sparse", "foreword_trace": "r", **extra_args}, sparse=False)
    assert (asked.sparse, asked.trace, asked.refusal) == (True, "r", UNREADABLE)


@pytest.mark.parametrize(
    ("asked", "path", "reason"),
    [
        pytest.param(Asked(PROMPT), "exact", None, id="exact as it was asked"),
        pytest.param(Asked(PROMPT, sparse=True, was_sparse=True), "sparse", None, id="sparse as it was asked"),
        pytest.param(Asked(PROMPT, sparse=True), "exact", "short prompt", id="nothing to leave out"),
        pytest.param(Asked(PROMPT, sparse=True, refusal="ALiBi"), "exact", "ALiBi", id="refused"),
        pytest.param(
            Asked(PROMPT, sparse=True, refusal="ALiBi", was_sparse=True), "sparse", None, id="refused by some layers"
        ),
    ],
)
def test_reports(asked: Asked, path: str, reason: str | None) -> None:
    asked.trace, asked.kept_pages, asked.total_pages, asked.selector_s = "r", 3, 7, 0.12345678
    assert asked.report() == {
        "trace": "r",
        "path": path,
        "kept_pages": 3,
        "total_pages": 7,
        "selector_s": 0.123457,
        "fallback_reason": reason,
    }


def _new(id: str, prompt: int | None = PROMPT, **extra_args: Any) -> Any:
    """As vLLM's scheduler announces a request."""
    return SimpleNamespace(
        req_id=id,
        prompt_token_ids=None if prompt is None else [0] * prompt,
        sampling_params=SimpleNamespace(extra_args=extra_args or None),
    )


def _step(*new: Any, finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(scheduled_new_reqs=list(new), finished_req_ids=set(finished))


class Reports(list[str | None]):
    """Names of the requests reported so far."""

    def add(self, asked: Asked) -> None:
        self.append(asked.trace)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def requests(reports: Reports) -> Requests:
    return Requests(sparse=False, report=reports.add)


def _prompts(requests: Requests, *rows: str) -> list[int | None]:
    """Prompt lengths of the requests in these rows, and of the row behind them."""
    requests.order(rows)
    found = [requests.row(number) for number in range(len(rows) + 1)]
    return [None if asked is None else asked.prompt_tokens for asked in found]


def test_rows(requests: Requests) -> None:
    requests.begin(_step(_new("a", 10), _new("b", 20)))
    assert _prompts(requests, "b", "a") == [20, 10, None]
    assert _prompts(requests, "b", "unknown", "a") == [20, None, 10, None]
    assert _prompts(requests) == [None]


def test_rows_are_forgotten_with_the_step(requests: Requests) -> None:
    requests.begin(_step(_new("a")))
    requests.order(("a",))
    requests.end()
    assert requests.row(0) is None


def test_a_request_is_remembered_until_it_is_finished(requests: Requests) -> None:
    requests.begin(_step(_new("a", 10), _new("b", 20)))
    requests.begin(_step())
    assert _prompts(requests, "a", "b") == [10, 20, None]
    requests.begin(_step(finished=("a", "never seen")))
    assert _prompts(requests, "a", "b") == [None, 20, None]


def test_a_preempted_request_is_the_same_when_it_comes_back(requests: Requests) -> None:
    requests.begin(_step(_new("a", foreword_prefill="sparse")))
    requests.order(("a",))
    asked = requests.row(0)
    assert asked is not None
    asked.kept_pages = 5
    requests.begin(_step(_new("a", foreword_prefill="sparse")))
    requests.order(("a",))
    assert requests.row(0) is asked


def test_a_name_can_be_used_again_in_the_step_in_which_it_ended(requests: Requests) -> None:
    requests.begin(_step(_new("a", 10)))
    requests.begin(_step(_new("a", 20), finished=("a",)))
    assert _prompts(requests, "a") == [20, None]


@pytest.mark.parametrize(
    "new",
    [
        pytest.param(_new("a", None, foreword_prefill="sparse"), id="embeddings instead of tokens"),
        pytest.param(SimpleNamespace(req_id="b", prompt_token_ids=[1], sampling_params=None), id="pooling"),
    ],
)
def test_requests_of_other_kinds_are_read_exactly(requests: Requests, new: Any) -> None:
    requests.begin(_step(new))
    requests.order((new.req_id,))
    asked = requests.row(0)
    assert asked is None or not asked.sparse


def test_the_default_is_the_process_s(reports: Reports) -> None:
    requests = Requests(sparse=True, report=reports.add)
    requests.begin(_step(_new("a"), _new("b", foreword_prefill="exact")))
    requests.order(("a", "b"))
    assert [bool(asked and asked.sparse) for asked in (requests.row(0), requests.row(1))] == [True, False]


def _ends(requests: Requests, row: int) -> None:
    asked = requests.row(row)
    assert asked is not None
    requests.ends(asked)


def test_a_request_is_reported_once_and_when_the_step_is_over(requests: Requests, reports: Reports) -> None:
    requests.begin(_step(_new("a", foreword_trace="first"), _new("b", foreword_trace="second"), _new("c")))
    for _ in range(3):
        requests.order(("a", "b", "c"))
        before = list(reports)
        # Every group of layers says so.
        for row in (1, 0, 2, 1, 0, 2):
            _ends(requests, row)
        assert reports == before
        requests.end()
        assert reports == ["second", "first"]


class Runner:
    """Looks at its rows as attention backends do, and says that their prompts are read."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []
        self.requests: Requests | None = None

    def _forward(self, scheduler_output: Any) -> Any:
        assert self.requests is not None
        for number in range(len(scheduler_output.rows)):
            asked = self.requests.row(number)
            self.seen.append(None if asked is None else asked.trace)
            if asked is not None:
                self.requests.ends(asked)
        if scheduler_output.fails:
            raise RuntimeError("out of memory")
        return "output"


class RunnerV1(Runner):
    """Keeps its batch, whose list of names is longer than the batch while requests come and go."""

    input_batch: Any = None

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Runs the step."""
        self._prepare_inputs(scheduler_output, "counts")
        return self._forward(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, counts: Any) -> Any:
        self.input_batch = SimpleNamespace(
            req_ids=[*scheduler_output.rows, "left over"], num_reqs=len(scheduler_output.rows)
        )
        return "logits indices", None


class RunnerV2(Runner):
    """Returns its batch, and makes its dummy runs as if they were steps."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> Any:
        """Runs the step."""
        if not dummy_run:
            self.prepare_inputs(scheduler_output, "state")
        return self._forward(scheduler_output)

    def prepare_inputs(self, scheduler_output: Any, state: Any) -> Any:
        return SimpleNamespace(req_ids=list(scheduler_output.rows), num_reqs=len(scheduler_output.rows))


def _runs(*rows: str, new: tuple[Any, ...] = (), fails: bool = False) -> Any:
    return SimpleNamespace(rows=rows, scheduled_new_reqs=list(new), finished_req_ids=set(), fails=fails)


@pytest.fixture(params=[RunnerV1, RunnerV2])
def runner(request: pytest.FixtureRequest, requests: Requests) -> Any:
    """Of a class of its own, which is followed."""
    followed = type("Runner", (request.param,), {})
    follow(followed, requests)
    runner = followed()
    runner.requests = requests
    return runner


FIRST, SECOND = _new("a", foreword_trace="first"), _new("b", foreword_trace="second")


def test_a_runner_is_followed(runner: Any, reports: Reports) -> None:
    assert runner.execute_model(_runs("b", "a", new=(FIRST, SECOND))) == "output"
    assert runner.seen == ["second", "first"]
    assert reports == ["second", "first"]
    assert runner.requests.row(0) is None


def test_a_wrapped_runner_looks_as_before(runner: Any) -> None:
    assert (runner.execute_model.__name__, runner.execute_model.__doc__) == ("execute_model", "Runs the step.")


def test_following_twice_wraps_once(runner: Any, reports: Reports) -> None:
    methods = dict(vars(type(runner)))
    again = Requests(sparse=False, report=reports.add)
    follow(type(runner), again)
    assert {**methods, "_foreword_requests": again} == dict(vars(type(runner)))
    runner.requests = again
    runner.execute_model(_runs("a", new=(FIRST,)))
    assert (runner.seen, reports) == (["first"], ["first"])


def test_a_step_that_fails_is_over_too(runner: Any, reports: Reports) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute_model(_runs("a", new=(FIRST,), fails=True))
    assert runner.requests.row(0) is None
    runner.execute_model(_runs("b", "a", new=(SECOND,)))
    assert (runner.seen, reports) == (["first", "second", "first"], ["first", "second"])


def test_a_dummy_run_is_not_followed(requests: Requests, reports: Reports) -> None:
    followed = type("Runner", (RunnerV2,), {})
    follow(followed, requests)
    runner = followed()
    runner.requests = requests
    # It has neither new nor finished requests that it could tell of.
    dummy = SimpleNamespace(rows=("a", "b"), fails=False)
    assert runner.execute_model(dummy, dummy_run=True) == "output"
    assert (runner.seen, reports) == ([None, None], [])


@pytest.mark.parametrize(
    ("module", "prepare"),
    [
        ("vllm.v1.worker.gpu_model_runner", "_prepare_inputs"),
        ("vllm.v1.worker.gpu.model_runner", "prepare_inputs"),
    ],
)
def test_vllm_s_runners_have_what_is_wrapped(module: str, prepare: str) -> None:
    import ast
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    (runner,) = (
        node
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "GPUModelRunner"
    )
    names = {node.name for node in runner.body if isinstance(node, ast.FunctionDef)}
    assert {"execute_model", prepare} <= names
    assert not {"_prepare_inputs", "prepare_inputs"} - {prepare} & names
