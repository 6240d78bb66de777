"""The judge, with a server that replies as told."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from eval.errors import NotMeasured
from eval.judge import Judge, Judged

SPLIT = '{"statements": ["The key is in locker 47.", "The locker is red."]}'


def replying(*replies: str, asked: list[str] | None = None) -> Callable[[httpx.Request], httpx.Response]:
    left = list(replies)

    def reply(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(json.loads(request.content)["messages"][1]["content"])
        return httpx.Response(200, json={"choices": [{"message": {"content": left.pop(0)}}]})

    return reply


async def judged(handler: Callable[[httpx.Request], httpx.Response], answer: str = "It is in a red locker.") -> Judged:
    async with httpx.AsyncClient(base_url="http://judge/v1", transport=httpx.MockTransport(handler)) as http:
        return await Judge(http, "big").faithfulness(answer, "The key is in locker 47.", question="Where is the key?")


async def test_the_share_of_statements_that_the_context_bears_out() -> None:
    asked: list[str] = []
    found = await judged(replying(SPLIT, 'Here:\n```json\n{"verdicts": [1, 0]}\n```', asked=asked))
    assert (found.verdicts, found.share) == ((True, False), 0.5)
    assert "Where is the key?" in asked[0]
    assert asked[1].endswith("1. The key is in locker 47.\n2. The locker is red.")


async def test_what_states_nothing_has_no_share() -> None:
    assert (await judged(replying('{"statements": []}'))).share is None
    assert (await judged(replying(), answer=" ")).share is None


@pytest.mark.parametrize(
    ("replies", "told"),
    [
        pytest.param(["I would say so."], "did not reply with JSON that has 'statements'", id="prose"),
        pytest.param(['{"other": []}'], "JSON that has 'statements'", id="another key"),
        pytest.param(['{"statements": "one"}'], "as no list", id="no list"),
        pytest.param(['{"statements": [7]}'], "statements that are no text", id="no text"),
        pytest.param([SPLIT, '{"verdicts": [1]}'], "1 verdicts on 2 statements", id="too few"),
        pytest.param([SPLIT, '{"verdicts": [1, "yes"]}'], "other than 0 and 1", id="other verdicts"),
    ],
)
async def test_nonsense_is_no_verdict(replies: list[str], told: str) -> None:
    with pytest.raises(NotMeasured, match=told):
        await judged(replying(*replies))


def late(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("too late", request=request)


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        pytest.param(late, "did not answer in time", id="late"),
        pytest.param(lambda _: httpx.Response(500), "HTTPStatusError", id="error"),
        pytest.param(lambda _: httpx.Response(200, text="<html>"), "JSONDecodeError", id="no API"),
        pytest.param(lambda _: httpx.Response(200, json={"choices": []}), "IndexError", id="no choice"),
    ],
)
async def test_a_judge_that_fails_is_told(handler: Callable[[httpx.Request], httpx.Response], told: str) -> None:
    with pytest.raises(NotMeasured, match=told):
        await judged(handler)
