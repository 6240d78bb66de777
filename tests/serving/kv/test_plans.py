"""What is loaded and stored in each step, with requests that look like vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.kv.files import KvFiles, digest, namespace
from serving.kv.plans import Blocks, Planner

BLOCK = 32
KEPT = {"foreword_keep": 1}


@dataclass
class Request:
    """A request of vLLM, as far as the planner looks; block n of any prompt has the hash n."""

    num_prompt_tokens: int = 100
    extra_args: dict[str, Any] | None = None
    cache_salt: str | None = "salt"
    request_id: str = "r"
    num_computed_tokens: int = 0
    answered: int = 0
    sampling_params: Any = field(init=False)

    def __post_init__(self) -> None:
        self.sampling_params = SimpleNamespace(extra_args=self.extra_args)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.answered

    @property
    def block_hashes(self) -> list[bytes]:
        return [hash_of(number) for number in range(self.num_tokens // BLOCK)]


def hash_of(number: int) -> bytes:
    return bytes([number]) * 32


def pages(id: str) -> list[int]:
    """Block n is in page 100 + n."""
    return list(range(100, 200))


@pytest.fixture
def files(tmp_path: Path) -> KvFiles:
    return KvFiles(tmp_path, 2**20, digest("a model"))


@pytest.fixture
def planner(files: KvFiles) -> Planner:
    return Planner(files, BLOCK, sparse=False)


def put(files: KvFiles, *numbers: int, salt: str = "salt") -> None:
    files.begin(namespace(salt))
    for number in numbers:
        assert files.write(namespace(salt), hash_of(number), [b"page"])


def stored(planner: Planner, request: Request, scheduled: int) -> list[tuple[list[int], bool]]:
    """The pages to be stored after a step, and whether they begin the prompt; the request is moved on."""
    plan = planner.step({request.request_id: scheduled}, pages)
    request.num_computed_tokens += scheduled
    assert all(blocks.hashes == [hash_of(page - 100) for page in blocks.pages] for blocks in plan.stores)
    return [(blocks.pages, blocks.first) for blocks in plan.stores]


@pytest.mark.parametrize(
    ("on_disk", "computed", "tokens", "found"),
    [
        pytest.param([], 0, 100, 0, id="nothing there"),
        pytest.param([0, 1, 2], 0, 100, 96, id="all whole blocks"),
        pytest.param([0, 1, 2], 0, 96, 64, id="something must be left to compute"),
        pytest.param([0, 1, 2], 0, 97, 96, id="one token is left"),
        pytest.param([0, 2], 0, 100, 32, id="up to a hole"),
        pytest.param([1, 2], 0, 100, 0, id="without the first"),
        pytest.param([1, 2], 32, 100, 64, id="after what is in memory"),
        pytest.param([0, 1, 2], 96, 100, 0, id="all in memory"),
        pytest.param([0], 0, 20, 0, id="shorter than a block"),
    ],
)
def test_whole_blocks_that_follow_are_found(
    planner: Planner, files: KvFiles, on_disk: list[int], computed: int, tokens: int, found: int
) -> None:
    put(files, *on_disk)
    assert planner.found(Request(tokens), computed) == found


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(Request(cache_salt=None), id="no salt"),
        pytest.param(Request(cache_salt="another"), id="another salt"),
        pytest.param(Request(extra_args={"foreword_prefill": "sparse"}), id="sparse"),
        pytest.param(Request(extra_args={"foreword_compute": 1}), id="computed sooner"),
    ],
)
def test_who_finds_nothing(planner: Planner, files: KvFiles, request_: Request) -> None:
    put(files, 0, 1, 2)
    assert planner.found(request_, 0) == 0


def test_what_a_request_does_not_say_is_the_engine_s_default(files: KvFiles) -> None:
    put(files, 0, 1, 2)
    planner = Planner(files, BLOCK, sparse=True)
    assert planner.found(Request(), 0) == 0
    assert planner.found(Request(extra_args={"foreword_prefill": "exact"}), 0) == 96


def test_a_request_without_sampling_is_none_of_ours(planner: Planner) -> None:
    request = Request()
    request.sampling_params = None
    planner.begin(request)
    assert planner.found(request, 0) == 0


def test_a_load_is_planned_once_into_the_last_pages(planner: Planner) -> None:
    request = Request()
    planner.allocated(request, [7, 8, 9], 64)
    assert planner.step({}, pages).loads == {
        "r": Blocks(namespace("salt"), [hash_of(1), hash_of(2)], [8, 9]),
    }
    planner.loaded({"r"}, set())
    # Then it is given pages for the rest.
    planner.allocated(request, [7, 8, 9, 10], 0)
    assert planner.step({"r": 4}, pages).loads == {}


def test_what_could_not_be_read_is_not_looked_for_again(planner: Planner, files: KvFiles) -> None:
    put(files, 0, 1, 2)
    bad, good = Request(request_id="bad"), Request(request_id="good")
    planner.allocated(bad, [1, 2, 3], 96)
    planner.allocated(good, [4, 5, 6], 96)
    planner.step({}, pages)
    planner.loaded({"bad", "good"}, {2, 3})
    assert planner.found(bad, 0) == 0
    assert planner.found(good, 0) == 96
    planner.end("bad")
    assert planner.found(Request(request_id="bad"), 0) == 96


def test_a_load_of_a_request_that_has_ended_is_forgotten(planner: Planner) -> None:
    request = Request()
    planner.allocated(request, [1, 2, 3], 96)
    planner.end("r")
    assert planner.step({}, pages).loads == {}
    planner.loaded({"r"}, {1})
    planner.end("r")


def test_blocks_are_stored_when_they_are_full(planner: Planner) -> None:
    request = Request(100, KEPT)
    planner.begin(request)
    assert stored(planner, request, 20) == []
    assert stored(planner, request, 20) == [([100], True)]
    assert stored(planner, request, 60) == [([101, 102], False)]
    request.answered = 60
    assert stored(planner, request, 60) == []


def test_the_last_block_of_a_prompt_is_stored_if_it_is_whole(planner: Planner) -> None:
    request = Request(96, KEPT)
    planner.begin(request)
    assert stored(planner, request, 96) == [([100, 101, 102], True)]


def test_blocks_that_were_in_memory_are_stored(planner: Planner) -> None:
    request = Request(100, KEPT)
    planner.begin(request)
    request.num_computed_tokens = 64
    assert stored(planner, request, 36) == [([100, 101, 102], True)]


def test_a_preempted_request_goes_on_where_it_was(planner: Planner) -> None:
    request = Request(100, KEPT)
    planner.begin(request)
    assert stored(planner, request, 40) == [([100], True)]
    request.num_computed_tokens = 0
    assert stored(planner, request, 40) == []
    assert stored(planner, request, 60) == [([101, 102], False)]


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(Request(), id="did not ask"),
        pytest.param(Request(extra_args={"foreword_keep": 0}), id="asked not to"),
        pytest.param(Request(extra_args=KEPT, cache_salt=None), id="no salt"),
        pytest.param(Request(extra_args=KEPT | {"foreword_prefill": "sparse"}), id="sparse"),
    ],
)
def test_who_is_not_stored(planner: Planner, request_: Request) -> None:
    planner.begin(request_)
    assert stored(planner, request_, 100) == []


def test_a_request_that_has_ended_is_not_stored(planner: Planner) -> None:
    request = Request(100, KEPT)
    planner.begin(request)
    planner.end("r")
    assert stored(planner, request, 100) == []
