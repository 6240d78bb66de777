"""Reading before anybody asks, on the scripted engine and a real catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app import warmer as module
from app.prompt import build_messages
from app.scope import Scope, prompt_of, salt_of, whole_sources
from app.warmer import Warmer, WarmError, Warmth
from retrieval.catalogue import Catalogue, Document, StoredPage
from serving.engine import Request, Sampling
from serving.scripted_engine import Script, ScriptedEngine

KEY = b"k" * 32
LIMIT_S = 10.0


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'catalogue.sqlite3'}")
    yield catalogue
    catalogue.close()


def add(catalogue: Catalogue, name: str, words: int = 1500, pages: int = 3) -> Scope:
    """A document whose words are its own."""
    minute = len(catalogue.documents())
    created = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute)
    catalogue.add(Document(name, f"{name}.txt", "default", "text", 1, name, created, status="storing"))
    texts = [" ".join(f"{name}{page}{word}" for word in range(words // pages)) for page in range(pages)]
    stored = [StoredPage(name, n, str(n), text, len(text.split())) for n, text in enumerate(texts, start=1)]
    catalogue.store(name, stored, [], {})
    catalogue.set_status(name, "ready")
    return Scope((name,))


Make = Callable[..., "Running"]


class Running:
    """A warmer at work."""

    def __init__(self, catalogue: Catalogue, script: Script, **settings: Any) -> None:
        self.engine = ScriptedEngine(script)
        self.read: list[int] = []
        self.warmer = Warmer(self.engine, catalogue, KEY, on_read=self.read.append, **settings)

    async def until(self, scope: Scope, *states: str) -> Warmth:
        """Wait for a scope to be in one of these states."""
        async with asyncio.timeout(LIMIT_S):
            while (warmth := self.warmer.warmth(scope)).state not in states:
                await self.warmer.changes()
        return warmth

    @property
    def order(self) -> list[str]:
        """Salts of the scopes that were read, in the order of their first step."""
        return list(dict.fromkeys(request.salt for request in self.engine.requests if request.background))

    def salt(self, scope: Scope) -> str:
        return salt_of(scope, "exact", self.engine, KEY)


@pytest.fixture
async def make(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes warmers, not yet started, whose engine is; a moment of quiet is enough to read again."""
    monkeypatch.setattr(module, "_CALM_S", 0.02)
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    made: list[Running] = []

    def one(script: Script | None = None, **settings: Any) -> Running:
        made.append(Running(catalogue, script or Script(seconds_per_token=1e-5), **settings))
        return made[-1]

    yield one
    for running in made:
        await running.warmer.stop()
        await running.engine.stop()


async def start(running: Running) -> None:
    await running.engine.start()
    await running.warmer.start()


async def test_a_document_is_read_in_growing_prefixes_of_whole_blocks(make: Make, catalogue: Catalogue) -> None:
    running = make()
    scope = add(catalogue, "a")
    await start(running)
    await running.warmer.arrived("a", last=True)
    warmth = await running.until(scope, "warm")
    prompt = prompt_of(scope, catalogue, running.engine)
    block = running.engine.limits.block
    assert (warmth.tokens, warmth.total) == (len(prompt) // block * block,) * 2
    requests = running.engine.requests
    ends = [len(request.prompt) for request in requests]
    assert len(ends) > 1
    assert ends == sorted(set(ends))
    assert all(end % block == 0 for end in ends)
    assert all(list(request.prompt) == prompt[: len(request.prompt)] for request in requests)
    assert {(r.background, r.keep, r.prefill, r.salt) for r in requests} == {(True, True, "exact", running.salt(scope))}
    assert sum(running.read) == warmth.total


async def test_a_question_has_only_itself_to_be_read(make: Make, catalogue: Catalogue) -> None:
    running = make()
    scope = add(catalogue, "a")
    await start(running)
    await running.warmer.arrived("a", last=True)
    total = (await running.until(scope, "warm")).total
    sources = whole_sources([catalogue.get("a")], catalogue.pages("a"))
    for question in ("What is it?", "它是什么?", "?", "</document>", "Question: " * 50):
        prompt = running.engine.render_chat(build_messages(sources, question))
        plan = running.engine.plan(Request(prompt, "q", running.salt(scope)))
        assert plan.path == "warm"
        assert plan.tokens_to_compute == len(prompt) - (total or 0)
        assert running.engine.plan(Request(prompt, "q", running.salt(Scope(("b",))))).path == "exact"


async def test_what_was_used_last_comes_first_and_what_somebody_looks_at_before_it(
    make: Make, catalogue: Catalogue
) -> None:
    running = make()
    old, middle, new = (add(catalogue, name) for name in ("old", "middle", "new"))
    await running.engine.start()
    for name in ("old", "middle", "new"):
        await running.warmer.arrived(name, last=False)
    with running.warmer.watched(middle):
        await running.warmer.start()
        for scope in (old, middle, new):
            await running.until(scope, "warm")
    assert running.order == [running.salt(scope) for scope in (middle, new, old)]


async def test_documents_of_a_collection_are_also_read_together(make: Make, catalogue: Catalogue) -> None:
    running = make()
    for name in ("a", "b"):
        add(catalogue, name)
        await running.warmer.arrived(name, last=name == "b")
    await start(running)
    scopes = [Scope(("b",)), Scope(("a", "b")), Scope(("a",))]
    for scope in scopes:
        await running.until(scope, "warm")
    assert running.warmer.warm_scopes() == set(scopes)
    assert running.order == [running.salt(scope) for scope in scopes]


async def test_no_step_is_sent_while_a_question_is_in_work(make: Make, catalogue: Catalogue) -> None:
    running = make(Script(seconds_per_token=1e-5, answer=("a", "b", "c"), gap_s=0.1))
    scope = add(catalogue, "a")
    await start(running)
    answering = running.engine.generate(Request(range(20), "question", "s", Sampling(max_tokens=9)))
    await anext(answering)
    await running.warmer.arrived("a", last=True)
    async for _ in answering:
        assert running.warmer.warmth(scope).state == "warming"
        assert [request.id for request in running.engine.requests] == ["question"]
    await running.until(scope, "warm")


async def test_background_requests_are_nobodys_questions(make: Make, catalogue: Catalogue) -> None:
    running = make(Script(seconds_per_token=1e-3, max_pending=1))
    scope = add(catalogue, "a")
    await start(running)
    await running.warmer.arrived("a", last=True)
    while not running.engine.requests:
        await asyncio.sleep(0.005)
    assert running.engine.stats.pending == 0
    await running.engine.prefill(Request(range(20), "question", "s"))
    await running.warmer.release(scope)


async def test_there_is_room_for_the_last_ones_only(make: Make, catalogue: Catalogue) -> None:
    # A cache of two windows; half of it may be filled early.
    running = make(Script(window=5000, kv_windows=2))
    scopes = [add(catalogue, name) for name in ("a", "b", "c")]
    total = len(prompt_of(scopes[0], catalogue, running.engine))
    assert total < 5000 < 2 * total
    await running.engine.start()
    for scope in scopes:
        await running.warmer.arrived(scope.documents[0], last=False)
    await running.warmer.start()
    await running.until(scopes[2], "warm")
    for scope in scopes[:2]:
        warmth = await running.until(scope, "cold")
        assert warmth.reason is not None
        assert "no room" in warmth.reason
    # A question makes it the last one.
    running.warmer.asked(scopes[0])
    await running.until(scopes[0], "warm")


async def test_what_is_driven_out_is_told_and_read_again(
    make: Make, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time to look at it before it is read again.
    monkeypatch.setattr(module, "_CALM_S", 1.0)
    running = make(Script(window=5000, kv_windows=2))
    scope = add(catalogue, "a")
    await start(running)
    await running.warmer.arrived("a", last=True)
    await running.until(scope, "warm")
    for number in range(3):
        flood = f"flood {number}"
        await running.engine.prefill(Request(range(4900), flood, flood, Sampling(max_tokens=1)))
    assert running.warmer.warmth(scope).state == "evicted"
    await running.until(scope, "warm")


async def test_what_is_driven_out_again_and_again_is_left_alone(
    make: Make, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CALM_S", 0.05)
    running = make(Script(window=5000, kv_windows=2))
    scope = add(catalogue, "a")
    await start(running)
    await running.warmer.arrived("a", last=True)
    waits = []
    for number in range(3):
        await running.until(scope, "warm")
        await asyncio.sleep(0.02)
        running.engine._cache.clear()
        started = asyncio.get_running_loop().time()
        await running.until(scope, "warm")
        waits.append(asyncio.get_running_loop().time() - started)
        assert waits[number] >= 0.05 * 2**number


async def test_an_engine_that_dies_is_filled_again(make: Make, catalogue: Catalogue) -> None:
    running = make(Script(seconds_per_token=1e-5))
    scopes = [add(catalogue, name) for name in ("a", "b")]
    await start(running)
    for name in ("a", "b"):
        await running.warmer.arrived(name, last=False)
    await running.until(scopes[1], "warm")
    await running.warmer.warm(scopes[0])
    running.engine.die()
    await asyncio.sleep(0.05)
    running.engine.requests.clear()
    await running.engine.start()
    for scope in reversed(scopes):
        await running.until(scope, "warm")
    assert running.order == [running.salt(scopes[0]), running.salt(scopes[1])]


async def test_what_was_warm_when_the_engine_died_is_read_at_once_the_last_one_first(
    make: Make, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was driven out would wait for this long.
    monkeypatch.setattr(module, "_CALM_S", 60.0)
    running = make()
    scopes = [add(catalogue, name) for name in ("a", "b", "c")]
    await start(running)
    for name in ("a", "b", "c"):
        await running.warmer.arrived(name, last=False)
    for scope in scopes:
        await running.until(scope, "warm")
    running.warmer.asked(scopes[0])
    await running.until(scopes[0], "warm")
    running.engine.die()
    running.engine._cache.clear()
    for scope in scopes:
        warmth = await running.until(scope, "cold", "evicted")
        assert warmth.reason == "the engine is down: killed by the script"
    running.engine.requests.clear()
    await asyncio.sleep(0.05)
    await running.engine.start()
    for scope in scopes:
        await running.until(scope, "warm")
    assert running.order == [running.salt(scopes[number]) for number in (0, 2, 1)]
    assert len(running.warmer._entries) == 3


async def test_a_failure_leaves_the_document_cold_and_the_others_go_on(
    make: Make, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = make()
    scopes = [add(catalogue, name) for name in ("a", "b")]
    pages = catalogue.pages

    def broken(id: str) -> list[StoredPage]:
        if id == "b":
            raise RuntimeError("the text of b")
        return pages(id)

    monkeypatch.setattr(catalogue, "pages", broken)
    await start(running)
    for name in ("a", "b"):
        await running.warmer.arrived(name, last=False)
    await running.until(scopes[0], "warm")
    warmth = await running.until(scopes[1], "cold")
    assert warmth.reason == "an internal error ended the reading (RuntimeError)"
    assert catalogue.get("b").status == "ready"


async def test_a_document_longer_than_the_window_stays_cold_with_the_reason(make: Make, catalogue: Catalogue) -> None:
    running = make(Script(window=1000))
    scope = add(catalogue, "a")
    await start(running)
    await running.warmer.arrived("a", last=True)
    assert running.warmer.warmth(scope) == Warmth("cold")
    await running.warmer.warm(scope)
    warmth = await running.until(scope, "cold")
    assert warmth.reason is not None
    assert "model's window 1,000" in warmth.reason


async def test_a_deleted_document_is_read_no_further(make: Make, catalogue: Catalogue) -> None:
    running = make(Script(seconds_per_token=1e-4))
    scopes = [add(catalogue, name) for name in ("a", "b")]
    await start(running)
    for name in ("a", "b"):
        await running.warmer.arrived(name, last=name == "b")
    while not running.engine.requests:
        await asyncio.sleep(0.001)
    await running.warmer.forget("b")
    catalogue.delete("b")
    await running.until(scopes[0], "warm")
    assert running.warmer.warmth(scopes[1]) == Warmth("cold")
    assert running.warmer.warm_scopes() == {scopes[0]}
    assert catalogue.scopes() == [(("a",), None)]
    # Whatever slower memory holds of it goes, too, also of the documents that were read together with it.
    assert set(running.engine.forgotten) == {running.salt(scope) for scope in (scopes[1], Scope(("a", "b")))}


async def test_a_document_is_let_go(make: Make, catalogue: Catalogue) -> None:
    running = make(Script(seconds_per_token=1e-4))
    scope = add(catalogue, "a")
    await start(running)
    await running.warmer.arrived("a", last=True)
    while running.warmer.warmth(scope).tokens == 0:
        await asyncio.sleep(0.001)
    await running.warmer.release(scope)
    partly = await running.until(scope, "partly")
    assert partly.total is not None
    assert 0 < partly.tokens < partly.total
    # Its next use begins where it was left.
    running.warmer.asked(scope)
    await running.until(scope, "warm")
    assert sum(running.read) == partly.total


async def test_the_next_run_begins_with_what_was_used_last(make: Make, catalogue: Catalogue) -> None:
    first, second = make(), make()
    scopes = [add(catalogue, name) for name in ("a", "b", "c")]
    await start(first)
    for scope in scopes:
        await first.warmer.arrived(scope.documents[0], last=False)
    for scope in scopes:
        await first.until(scope, "warm")
    first.warmer.asked(scopes[1])
    await first.until(scopes[1], "warm")
    while catalogue.scopes()[0] != (("b",), None):
        await asyncio.sleep(0.001)
    await first.warmer.stop()
    await start(second)
    for scope in scopes:
        await second.until(scope, "warm")
    assert second.order[0] == second.salt(scopes[1])


async def test_what_nobody_knows_any_more_is_not_kept(make: Make, catalogue: Catalogue) -> None:
    running = make()
    scopes = [add(catalogue, name) for name in ("a", "b")]
    for scope in scopes:
        catalogue.use_scope(scope.documents)
    catalogue.delete("b")
    await start(running)
    await running.until(scopes[0], "warm")
    assert running.engine.retained == frozenset({running.salt(scopes[0])})


async def test_fifty_documents_all_come_to_an_end(make: Make, catalogue: Catalogue) -> None:
    running = make(Script(window=5000, kv_windows=8))
    scopes = [add(catalogue, f"d{number}", words=300) for number in range(50)]
    await start(running)
    for scope in scopes:
        await running.warmer.arrived(scope.documents[0], last=scope is scopes[-1])
    states = [(await running.until(scope, "warm", "cold", "evicted", "partly")).state for scope in scopes]
    assert states[-1] == "warm"
    assert states.count("warm") > 20


async def test_a_pin_is_held_until_it_is_let_go(make: Make, catalogue: Catalogue) -> None:
    running = make()
    scopes = [add(catalogue, name) for name in ("a", "b", "c")]
    await start(running)
    for scope in scopes[:2]:
        await running.warmer.warm(scope, pin=True)
    async with asyncio.timeout(LIMIT_S):
        while not all(running.warmer.warmth(scope).pinned for scope in scopes[:2]):
            await running.warmer.changes()
    with pytest.raises(WarmError, match="2 documents are pinned already"):
        await running.warmer.warm(scopes[2], pin=True)
    await running.warmer.release(scopes[0])
    assert not running.warmer.warmth(scopes[0]).pinned
    await running.warmer.warm(scopes[2], pin=True)
    # A dead engine holds nothing; the next one does again.
    running.engine.die()
    async with asyncio.timeout(LIMIT_S):
        while running.warmer.warmth(scopes[1]).pinned:
            await asyncio.sleep(0.001)
        await running.engine.start()
        while not running.warmer.warmth(scopes[1]).pinned:
            await running.warmer.changes()


async def test_pins_take_at_most_half_of_the_cache(make: Make, catalogue: Catalogue) -> None:
    running = make(Script(window=5000, kv_windows=1))
    scope = add(catalogue, "a")
    await start(running)
    with pytest.raises(WarmError, match="of 5,000 tokens of the cache, more than half"):
        await running.warmer.warm(scope, pin=True)
    assert not running.warmer.warmth(scope).pinned


async def test_switched_off_only_what_is_asked_for_by_name_is_read(make: Make, catalogue: Catalogue) -> None:
    running = make(enabled=False)
    scopes = [add(catalogue, name) for name in ("a", "b")]
    await start(running)
    for scope in scopes:
        await running.warmer.arrived(scope.documents[0], last=True)
        running.warmer.asked(scope)
    await asyncio.sleep(0.05)
    assert running.engine.requests == []
    await running.warmer.warm(scopes[0])
    await running.until(scopes[0], "warm")
    assert running.warmer.warmth(scopes[1]) == Warmth("cold")
