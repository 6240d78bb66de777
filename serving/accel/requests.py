"""What each request asked for, and which row of a batch is whose: vLLM gives an attention backend neither.

A request says it in `SamplingParams.extra_args` (over HTTP `vllm_xargs`), as flat values:

    foreword_prefill      "sparse" or "exact"; without it the process's default
    foreword_selector     settings of the selection, as `Selector.parse` reads them
    foreword_dense_from   position of the first token that attends to everything
    foreword_trace        under this name the request is reported

The model runner learns of it once, when a request is new. It is wrapped in two places, which both of vLLM's runners
have: `execute_model` sees new and finished requests; `_prepare_inputs` (runner V1) and `prepare_inputs` (runner V2) fix
the order of the rows. Rows of warm-up and graph capture belong to nobody; they are read exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol

from serving.accel.channel import DENSE_FROM, PREFILL, SELECTOR, TRACE
from serving.accel.policy import DENSE_TAIL, BadSelector, Selector, Tiling

# Of a request that cannot be understood; other refusals come from layers, and each layer has its own.
UNREADABLE = "unreadable settings"


class Counted(Protocol):
    """What a device counts of a request."""

    def close(self) -> None:
        """Nothing more is counted. Called where the work is given to the device."""

    def read(self) -> tuple[int, float]:
        """Pages kept, and seconds that went into choosing them. Waits for the device."""


@dataclass(slots=True)
class Asked:
    """A request of the engine: what it asked for, and what has been done.

    `refusal` is why it, or some of the layers, is read exactly although it asked for sparse prefill. `kept_pages` of
    `total_pages` were read by its tiles, over layers and heads; `selector_s` seconds went into choosing them. Where
    that is known to the device only, `counted` holds the rest.
    """

    prompt_tokens: int
    sparse: bool = False
    selector: Selector = field(default_factory=Selector)
    dense_from: int = 0
    trace: str | None = None
    refusal: str | None = None
    kept_pages: int = 0
    total_pages: int = 0
    was_sparse: bool = False
    selector_s: float = 0.0
    reported: bool = False
    counted: Counted | None = None

    def takes(self, tiles: Tiling, rows: int) -> bool:
        """Whether tiles have a choice. Those without one are counted: a page counts for `rows`, layers times heads."""
        if tiles.sparse:
            self.was_sparse = True
        else:
            self.kept_pages += tiles.total * rows
            self.total_pages += tiles.total * rows
        return tiles.sparse

    def settle(self) -> None:
        """Add what the device has counted."""
        if self.counted is not None:
            kept_pages, selector_s = self.counted.read()
            self.kept_pages += kept_pages
            self.selector_s += selector_s
            self.counted = None

    def report(self) -> dict[str, Any]:
        """What the service is told of it: small, flat, and only once."""
        return {
            "trace": self.trace,
            "path": "sparse" if self.was_sparse else "exact",
            "kept_pages": self.kept_pages,
            "total_pages": self.total_pages,
            "selector_s": round(self.selector_s, 6),
            "fallback_reason": None if self.was_sparse or not self.sparse else self.refusal or "short prompt",
        }


def understood(
    prompt_tokens: int, extra_args: Mapping[str, Any] | None, *, sparse: bool, selector: Selector | None = None
) -> Asked:
    """A request as it was asked; one that cannot be understood is read exactly and says why.

    Args:
        sparse: what a request that does not say gets.
        selector: likewise.
    """
    given = extra_args or {}
    trace = given.get(TRACE)
    selector = selector or Selector()
    asked = Asked(prompt_tokens, selector=selector, trace=None if trace is None else str(trace))
    mode = given.get(PREFILL, "sparse" if sparse else "exact")
    if mode == "exact":
        return asked
    asked.sparse = True
    try:
        if mode != "sparse":
            raise BadSelector(f"{PREFILL} is {mode!r}")
        if (text := given.get(SELECTOR)) is not None:
            asked.selector = Selector.parse(str(text), selector)
        # The last token's attention is what the answer begins with.
        asked.dense_from = max(0, min(int(given.get(DENSE_FROM, prompt_tokens - DENSE_TAIL)), prompt_tokens - 1))
    except (ValueError, TypeError, OverflowError):
        asked.refusal = UNREADABLE
    return asked


class Requests:
    """The requests that the model runner works on, and the rows of the step that is running."""

    def __init__(self, *, sparse: bool, report: Callable[[Asked], None], selector: Selector | None = None) -> None:
        self._sparse = sparse
        self._selector = selector
        self._report = report
        self._asked: dict[str, Asked] = {}
        self._rows: tuple[str, ...] = ()
        self._ending: list[Asked] = []

    def row(self, number: int) -> Asked | None:
        """The request in this row of the running step, or None when it is nobody's."""
        return self._asked.get(self._rows[number]) if number < len(self._rows) else None

    def ends(self, asked: Asked) -> None:
        """With the running step the request's prompt is read."""
        if asked.trace is not None and not asked.reported:
            asked.reported = True
            self._ending.append(asked)

    def begin(self, scheduler_output: Any) -> None:
        """A step begins; called by the wrapped runner."""
        for request in scheduler_output.finished_req_ids:
            self._asked.pop(request, None)
        for new in scheduler_output.scheduled_new_reqs:
            # Runner V2 sends a request that was preempted as a new one.
            if new.req_id in self._asked or new.prompt_token_ids is None:
                continue
            extra_args = getattr(new.sampling_params, "extra_args", None)
            self._asked[new.req_id] = understood(
                len(new.prompt_token_ids), extra_args, sparse=self._sparse, selector=self._selector
            )

    def order(self, rows: tuple[str, ...]) -> None:
        """The rows of the running step; called by the wrapped runner."""
        self._rows = rows

    def end(self) -> None:
        """The step is over; called by the wrapped runner, before anyone hears of the step's tokens."""
        self._rows = ()
        ending, self._ending = self._ending, []
        for asked in ending:
            self._report(asked)


def follow(runner: type, requests: Requests) -> None:
    """Wrap a class of model runners so that it tells `requests` what it does. Safe to call again."""
    followed = hasattr(runner, "_foreword_requests")
    runner._foreword_requests = requests  # type: ignore[attr-defined]
    if followed:
        return
    execute_model = runner.execute_model  # type: ignore[attr-defined]

    @wraps(execute_model)
    def execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # Runner V2 makes its dummy runs through here.
        if kwargs.get("dummy_run"):
            return execute_model(self, scheduler_output, *args, **kwargs)
        self._foreword_requests.begin(scheduler_output)
        try:
            return execute_model(self, scheduler_output, *args, **kwargs)
        finally:
            self._foreword_requests.end()

    runner.execute_model = execute  # type: ignore[attr-defined]
    name = "_prepare_inputs" if hasattr(runner, "_prepare_inputs") else "prepare_inputs"
    prepare_inputs = getattr(runner, name)

    @wraps(prepare_inputs)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare_inputs(self, *args, **kwargs)
        # Runner V1 keeps the batch, runner V2 returns it.
        batch = getattr(self, "input_batch", prepared)
        self._foreword_requests.order(tuple(batch.req_ids[: batch.num_reqs]))
        return prepared

    setattr(runner, name, prepare)
