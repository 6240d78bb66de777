"""The queue: how documents end, duplicates, cancelling, deleting, restarting, limits. All parts are real."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pytest

from ingest import jobs as jobs_module
from ingest import pipeline as pipeline_module
from ingest.errors import QueueFull
from ingest.jobs import Accepted, Jobs, OnDuplicate, Upload
from ingest.pipeline import Pipeline
from ingest.workers import Workers
from retrieval.catalogue import Document, Status, StoredPage
from retrieval.errors import StorageFailed, UnknownDocument
from retrieval.passage import Chunk
from tests.documents import scanned_pdf, truncated_pdf

LIMIT_S = 60.0


def text_upload(
    text: str, name: str = "a.txt", collection: str = "default", on_duplicate: OnDuplicate = "skip"
) -> Upload:
    data = text.encode()
    return Upload(name, "text/plain", data, sha256(data).hexdigest(), collection, on_duplicate)


def pdf_upload(data: bytes) -> Upload:
    return Upload("a.pdf", "application/pdf", data, sha256(data).hexdigest(), "default")


async def add(jobs: Jobs, upload: Upload) -> Accepted:
    (accepted,) = await jobs.add_all([upload])
    return accepted


async def ended(jobs: Jobs, id: str) -> Document:
    """The document once its ingest has ended."""
    async with asyncio.timeout(LIMIT_S):
        *_, last = [document async for document in jobs.watch(id)]
    return last


async def ingested(jobs: Jobs, upload: Upload) -> Document:
    return await ended(jobs, (await add(jobs, upload)).id)


def assert_nothing_left(pipeline: Pipeline, id: str) -> None:
    assert pipeline.vectors.count(id) == 0
    assert pipeline.catalogue.pages(id) == []
    assert pipeline.catalogue.chunks([(id, number) for number in range(20)]) == []


@dataclass
class Gate:
    """Holds a blocking method of a part in its thread until it is opened."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    passed: threading.Event = field(default_factory=threading.Event)

    def hold(self, patch: pytest.MonkeyPatch, part: object, method: str) -> None:
        original = getattr(part, method)

        def held(*args: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(LIMIT_S)
            try:
                return original(*args)
            finally:
                self.passed.set()

        patch.setattr(part, method, held)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, LIMIT_S)


@pytest.fixture
async def waiting(pipeline: Pipeline) -> Jobs:
    """A queue that nobody works off."""
    return Jobs(pipeline)


@pytest.fixture
async def jobs(pipeline: Pipeline) -> AsyncIterator[Jobs]:
    """A queue that is worked off."""
    jobs = Jobs(pipeline)
    await jobs.start()
    yield jobs
    await jobs.stop()


# --- how documents end ---


async def test_ready(pipeline: Pipeline) -> None:
    ends: list[tuple[Status, float]] = []
    jobs = Jobs(pipeline, on_end=lambda *end: ends.append(end))
    await jobs.start()
    document = await ingested(jobs, text_upload("Please contact Robert Callahan at the service desk."))
    await jobs.stop()
    assert (document.status, document.reason, document.pages, document.chunks) == ("ready", None, 1, 1)
    assert document.entities == {"PERSON": 1}
    assert "Callahan" not in pipeline.catalogue.page(document.id, 1).text
    assert jobs.stage(document.id) is None
    assert [status for status, seconds in ends if seconds > 0] == ["ready"]


async def test_a_document_is_ready_whatever_comes_of_that(pipeline: Pipeline) -> None:
    async def broken(*_: object) -> None:
        raise StorageFailed("the disk is gone")

    ends: list[tuple[Status, float]] = []
    jobs = Jobs(pipeline, on_ready=broken, on_end=lambda *end: ends.append(end))
    await jobs.start()
    document = await ingested(jobs, text_upload("The lamp is trimmed every evening."))
    await jobs.stop()
    assert document.status == "ready"
    assert [status for status, _ in ends] == ["ready"]


async def test_partial(jobs: Jobs, pipeline: Pipeline, half_broken_pdf: bytes) -> None:
    document = await ingested(jobs, pdf_upload(half_broken_pdf))
    assert (document.status, document.reason) == ("partial", "1 pages could not be read: 2")
    assert pipeline.vectors.count(document.id) == document.chunks == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(truncated_pdf(), "'a.pdf' is damaged or cut off", id="damaged"),
        pytest.param(scanned_pdf(1), "'a.pdf' holds no text that can be read", id="no text"),
    ],
)
async def test_failed_file(jobs: Jobs, pipeline: Pipeline, data: bytes, reason: str) -> None:
    document = await ingested(jobs, pdf_upload(data))
    assert document.status == "failed"
    assert document.reason is not None
    assert document.reason.startswith(reason)
    assert_nothing_left(pipeline, document.id)
    # The queue goes on.
    assert (await ingested(jobs, text_upload("The pump runs."))).status == "ready"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(StorageFailed("the disk is full"), "the disk is full", id="storage"),
        pytest.param(
            RuntimeError("secret words of the document"),
            "an internal error ended the ingest (RuntimeError); the document was not stored",
            id="our own mistake quotes nothing",
        ),
    ],
)
async def test_failed_at_the_last_step(
    jobs: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(pipeline.catalogue, "store", fail)
    document = await ingested(jobs, text_upload("The pump runs."))
    assert (document.status, document.reason) == ("failed", reason)
    assert_nothing_left(pipeline, document.id)


async def test_a_file_that_takes_too_long(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Workers()
    jobs = Jobs(replace(pipeline, workers=own))
    # Importing the parser alone takes the process longer than this.
    monkeypatch.setattr(pipeline_module, "reading_limit_s", lambda _: 0.01)
    await jobs.start()
    document = await ingested(jobs, text_upload("The pump runs."))
    await jobs.stop()
    own.close()
    assert document.status == "failed"
    assert document.reason is not None
    assert "took longer than" in document.reason


async def test_documents_are_taken_in_turn(jobs: Jobs, pipeline: Pipeline) -> None:
    ids = [(await add(jobs, text_upload(f"The pump number {n} runs."))).id for n in range(3)]
    assert (await ended(jobs, ids[2])).status == "ready"
    assert {pipeline.catalogue.get(id).status for id in ids} == {"ready"}


async def test_watch_shows_the_stages(jobs: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate.hold(monkeypatch, pipeline.vectors, "add")
    id = (await add(jobs, text_upload("The pump runs."))).id
    await gate.wait()
    stage = jobs.stage(id)
    assert stage is not None
    assert (stage.stage, stage.done, stage.total, stage.unit) == ("embedding", 0, 1, "chunks")
    seen = jobs.watch(id)
    assert (await anext(seen)).status == "queued"
    gate.opened.set()
    async with asyncio.timeout(LIMIT_S):
        statuses = [document.status async for document in seen]
    assert statuses[-1] == "ready"
    with pytest.raises(UnknownDocument):
        await anext(jobs.watch("d_none"))


# --- duplicates ---


async def test_same_bytes_are_kept_once(waiting: Jobs) -> None:
    first = await add(waiting, text_upload("same", name="a.txt"))
    again = await add(waiting, text_upload("same", name="b.txt"))
    assert not first.duplicate
    assert (again.id, again.duplicate) == (first.id, True)
    elsewhere = await add(waiting, text_upload("same", collection="other"))
    assert not elsewhere.duplicate
    assert elsewhere.id != first.id


async def test_many_at_once_are_kept_once(waiting: Jobs) -> None:
    accepted = await asyncio.gather(*(add(waiting, text_upload("same")) for _ in range(5)))
    assert len({one.id for one in accepted}) == 1
    assert sorted(one.duplicate for one in accepted) == [False, True, True, True, True]


async def test_a_version_is_kept_beside_the_old_one(waiting: Jobs, pipeline: Pipeline) -> None:
    first = await add(waiting, text_upload("same"))
    second = await add(waiting, text_upload("same", on_duplicate="version"))
    assert not second.duplicate
    assert {document.id for document in pipeline.catalogue.documents()} == {first.id, second.id}


async def test_what_failed_or_was_cancelled_may_come_again(waiting: Jobs) -> None:
    first = await add(waiting, text_upload("same"))
    await waiting.cancel(first.id)
    second = await add(waiting, text_upload("same"))
    assert not second.duplicate
    assert second.id != first.id


async def test_replace_deletes_older_ones_of_the_name(jobs: Jobs, pipeline: Pipeline) -> None:
    old = await ingested(jobs, text_upload("The old pump."))
    other = await ingested(jobs, text_upload("Another file.", name="b.txt"))
    elsewhere = await ingested(jobs, text_upload("The old pump.", collection="other"))
    failed = await ingested(jobs, pdf_upload(truncated_pdf()))
    new = await ingested(jobs, text_upload("The new pump.", on_duplicate="replace"))
    # Its status is final before the older ones go.
    async with asyncio.timeout(LIMIT_S):
        while len(pipeline.catalogue.documents()) > 4:
            await asyncio.sleep(0.01)
    assert {d.id for d in pipeline.catalogue.documents()} == {other.id, elsewhere.id, failed.id, new.id}
    assert_nothing_left(pipeline, old.id)
    assert pipeline.vectors.count() == 3


async def test_replace_knows_a_document_by_its_name(waiting: Jobs) -> None:
    """The same bytes under another name are another document: the caller asked for this name to hold them."""
    other = await add(waiting, text_upload("same", name="b.txt"))
    first = await add(waiting, text_upload("same", name="a.txt", on_duplicate="replace"))
    again = await add(waiting, text_upload("same", name="a.txt", on_duplicate="replace"))
    assert (first.duplicate, first.id != other.id) == (False, True)
    assert (again.duplicate, again.id) == (True, first.id)


async def test_replacing_back_and_forth(waiting: Jobs) -> None:
    """The first of these is deleted when the second is ready, so the third cannot be told that it is there already."""
    first = await add(waiting, text_upload("old", on_duplicate="replace"))
    await add(waiting, text_upload("new", on_duplicate="replace"))
    back = await add(waiting, text_upload("old", on_duplicate="replace"))
    assert (back.duplicate, back.id != first.id) == (False, True)


async def test_replace_spares_what_came_later(jobs: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate.hold(monkeypatch, pipeline.vectors, "add")
    old = await add(jobs, text_upload("The old pump.", on_duplicate="replace"))
    await gate.wait()
    later = await add(jobs, text_upload("The new pump.", on_duplicate="version"))
    await jobs.cancel(later.id)
    gate.opened.set()
    assert (await ended(jobs, old.id)).status == "ready"
    # The queue takes the next one only after the older ones of the last are gone.
    await ingested(jobs, text_upload("The fan runs.", name="b.txt"))
    assert pipeline.catalogue.get(later.id).status == "cancelled"


async def test_a_failed_replacement_deletes_nothing(jobs: Jobs, pipeline: Pipeline) -> None:
    old = await ingested(jobs, text_upload("The old pump."))
    bad = replace(pdf_upload(truncated_pdf()), name="a.txt", on_duplicate="replace")
    assert (await ingested(jobs, bad)).status == "failed"
    assert pipeline.catalogue.get(old.id).status == "ready"
    assert pipeline.vectors.count(old.id) == 1


# --- cancelling and deleting ---


async def test_cancel_while_waiting(waiting: Jobs, pipeline: Pipeline) -> None:
    id = (await add(waiting, text_upload("The pump runs."))).id
    assert await waiting.cancel(id)
    document = await ended(waiting, id)
    assert (document.status, document.reason) == ("cancelled", "cancelled by the user")
    assert not await waiting.cancel(id)
    assert not await waiting.cancel("d_none")
    # It is no longer in the queue.
    await waiting.start()
    assert (await ingested(waiting, text_upload("Another."))).status == "ready"
    await waiting.stop()
    assert pipeline.catalogue.get(id).status == "cancelled"


async def test_delete_while_waiting(waiting: Jobs, pipeline: Pipeline) -> None:
    id = (await add(waiting, text_upload("The pump runs."))).id
    await waiting.delete(id)
    assert pipeline.catalogue.documents() == []
    with pytest.raises(UnknownDocument):
        await waiting.delete(id)


async def test_delete_when_ready(jobs: Jobs, pipeline: Pipeline) -> None:
    document = await ingested(jobs, text_upload("The pump runs."))
    kept = await ingested(jobs, text_upload("The fan runs."))
    await jobs.delete(document.id)
    assert_nothing_left(pipeline, document.id)
    assert [d.id for d in pipeline.catalogue.documents()] == [kept.id]
    assert pipeline.vectors.count() == 1


@pytest.mark.parametrize(("part", "method"), [("vectors", "add"), ("catalogue", "store")])
@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_end_while_something_is_being_written(
    jobs: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, part: str, method: str, how: str
) -> None:
    """A thread cannot be stopped: what it still writes must be cleaned up all the same."""
    gate = Gate()
    gate.hold(monkeypatch, getattr(pipeline, part), method)
    id = (await add(jobs, text_upload("The pump runs."))).id
    await gate.wait()
    ending = asyncio.create_task(getattr(jobs, how)(id))
    await asyncio.sleep(0.05)
    gate.opened.set()
    async with asyncio.timeout(LIMIT_S):
        await ending
    # Not before the thread is through, whoever waited for it.
    assert await asyncio.to_thread(gate.passed.wait, LIMIT_S)
    assert_nothing_left(pipeline, id)
    if how == "cancel":
        document = pipeline.catalogue.get(id)
        assert (document.status, document.pages, document.chunks, document.tokens) == ("cancelled", 0, 0, None)
    else:
        assert pipeline.catalogue.documents() == []
    assert (await ingested(jobs, text_upload("The fan runs."))).status == "ready"


async def test_a_second_cancel_does_not_disturb_the_first(
    jobs: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clean-up after a cancel takes a moment, in which an impatient user clicks again."""
    adding, cleaning = Gate(), Gate()
    adding.hold(monkeypatch, pipeline.vectors, "add")
    cleaning.hold(monkeypatch, pipeline.catalogue, "clear")
    id = (await add(jobs, text_upload("The pump runs."))).id
    await adding.wait()
    first = asyncio.create_task(jobs.cancel(id))
    adding.opened.set()
    await cleaning.wait()
    second = asyncio.create_task(jobs.cancel(id))
    await asyncio.sleep(0.05)
    cleaning.opened.set()
    async with asyncio.timeout(LIMIT_S):
        assert all(await asyncio.gather(first, second))
    assert pipeline.catalogue.get(id).status == "cancelled"
    assert_nothing_left(pipeline, id)


async def test_cancel_of_what_is_ending_already(
    jobs: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes too late to cancel anything, and says so."""
    gate = Gate()
    gate.hold(monkeypatch, pipeline.catalogue, "set_status")
    id = (await add(jobs, text_upload("The pump runs."))).id
    await gate.wait()
    cancelling = asyncio.create_task(jobs.cancel(id))
    await asyncio.sleep(0.05)
    gate.opened.set()
    async with asyncio.timeout(LIMIT_S):
        assert not await cancelling
    assert pipeline.catalogue.get(id).status == "ready"


async def test_cancel_at_the_very_first_step(pipeline: Pipeline) -> None:
    """A task that is cancelled before it has begun would leave its document open for ever."""
    # A cancelled extraction ends its process, so it is not the one that the other tests share.
    own = Workers()
    jobs = Jobs(replace(pipeline, workers=own))
    id = (await add(jobs, text_upload("The pump runs."))).id
    await jobs.start()
    while jobs._current is None:
        await asyncio.sleep(0)
    await jobs.cancel(id)
    assert pipeline.catalogue.get(id).status == "cancelled"
    await jobs.stop()
    own.close()


# --- stopping and starting ---


async def test_stop_ends_what_runs_and_what_waits(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(pipeline)
    await jobs.start()
    gate = Gate()
    gate.hold(monkeypatch, pipeline.vectors, "add")
    ids = [(await add(jobs, text_upload(f"The pump number {n} runs."))).id for n in range(2)]
    await gate.wait()
    stopping = asyncio.create_task(jobs.stop())
    await asyncio.sleep(0.05)
    gate.opened.set()
    async with asyncio.timeout(LIMIT_S):
        await stopping
    await jobs.stop()
    for id in ids:
        document = pipeline.catalogue.get(id)
        assert document.status == "failed"
        assert document.reason is not None
        assert "upload the file again" in document.reason
        assert_nothing_left(pipeline, id)


async def test_start_closes_what_an_earlier_run_left_open(pipeline: Pipeline) -> None:
    statuses: tuple[Status, ...] = ("queued", "embedding", "ready")
    for status in statuses:
        pipeline.catalogue.add(Document(status, "a.txt", "default", "text/plain", 1, status, datetime.now(UTC)))
        chunk = Chunk(status, 0, 1, 0, 4, "text")
        pipeline.catalogue.store(status, [StoredPage(status, 1, "1", "text", 1)], [chunk], {"PERSON": 1})
        pipeline.catalogue.set_status(status, status)
        pipeline.vectors.add([chunk])
    jobs = Jobs(pipeline)
    await jobs.start()
    await jobs.stop()
    for id in ("queued", "embedding"):
        document = pipeline.catalogue.get(id)
        assert (document.status, document.pages, document.chunks, document.tokens) == ("failed", 0, 0, None)
        assert document.entities == {}
        assert document.reason is not None
        assert "upload the file again" in document.reason
        assert_nothing_left(pipeline, id)
    assert pipeline.catalogue.get("ready").pages == 1
    assert pipeline.vectors.count() == 1


async def test_the_queue_has_a_limit(waiting: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_MAX_WAITING_BYTES", 10)
    # One file may always wait, however large it is.
    first = (await add(waiting, text_upload("x" * 50))).id
    with pytest.raises(QueueFull, match="1 files wait already; upload again"):
        await add(waiting, text_upload("y"))
    assert len(pipeline.catalogue.documents()) == 1
    await waiting.cancel(first)
    await add(waiting, text_upload("12345"))
    await add(waiting, text_upload("67890"))
    with pytest.raises(QueueFull):
        await add(waiting, text_upload("z"))
    assert (await add(waiting, text_upload("12345"))).duplicate


async def test_a_request_is_taken_whole_or_not_at_all(
    waiting: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_MAX_WAITING_BYTES", 10)
    await add(waiting, text_upload("1234"))
    with pytest.raises(QueueFull, match="1 files wait already"):
        await waiting.add_all([text_upload("5"), text_upload("67890x")])
    assert len(pipeline.catalogue.documents()) == len(waiting._waiting) == 1
    assert [one.duplicate for one in await waiting.add_all([text_upload("5"), text_upload("67890")])] == [False, False]
    assert len(pipeline.catalogue.documents()) == len(waiting._waiting) == 3


async def test_a_request_that_cannot_be_entered_leaves_nothing(
    waiting: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = jobs_module._entry
    monkeypatch.setattr(jobs_module, "_entry", lambda upload: replace(entry(upload), id="d_same"))
    with pytest.raises(StorageFailed):
        await waiting.add_all([text_upload("one"), text_upload("two")])
    assert pipeline.catalogue.documents() == []
    assert not waiting._waiting


@pytest.mark.parametrize(
    ("on_duplicate", "new"),
    [("skip", [True, False, True, False]), ("replace", [True, False, True, True]), ("version", [True] * 4)],
)
async def test_duplicates_within_a_request(waiting: Jobs, on_duplicate: OnDuplicate, new: list[bool]) -> None:
    uploads = [
        text_upload(text, name=name, on_duplicate=on_duplicate)
        for text, name in (("one", "a.txt"), ("one", "a.txt"), ("two", "a.txt"), ("one", "a.txt"))
    ]
    accepted = await waiting.add_all(uploads)
    assert [not one.duplicate for one in accepted] == new
    assert len({one.id for one in accepted}) == new.count(True)
    elsewhere = await add(waiting, text_upload("one", collection="other", on_duplicate=on_duplicate))
    assert not elsewhere.duplicate


async def test_start_leaves_uploads_alone_that_are_being_entered(
    waiting: Jobs, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the catalogue and the queue an entry looks like one that an earlier run left open."""
    catalogue, entered, opened = pipeline.catalogue, threading.Event(), threading.Event()
    original = catalogue.add

    def slow(*documents: Document) -> None:
        original(*documents)
        entered.set()
        assert opened.wait(LIMIT_S)

    monkeypatch.setattr(catalogue, "add", slow)
    adding = asyncio.create_task(add(waiting, text_upload("The pump runs.")))
    await asyncio.to_thread(entered.wait, LIMIT_S)
    starting = asyncio.create_task(waiting.start())
    await asyncio.sleep(0.1)
    opened.set()
    await starting
    assert (await ended(waiting, (await adding).id)).status == "ready"
    await waiting.stop()
