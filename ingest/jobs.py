"""The queue of files on their way in: one at a time, in the background, with progress.

Uploaded bytes wait in memory only, because nothing is written before it is redacted; the queue therefore bounds them.
A file that was waiting when the service stopped has to be uploaded again, and its entry says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import dropwhile
from typing import Literal

import structlog

from ingest.changes import Changes
from ingest.errors import IngestError, QueueFull
from ingest.extract import MediaType
from ingest.pipeline import Pipeline, ingest_document
from retrieval.catalogue import FINAL, READABLE, Document, Status
from retrieval.errors import RetrievalError, UnknownDocument

log = structlog.get_logger(__name__)

OnDuplicate = Literal["skip", "replace", "version"]
_MAX_WAITING_BYTES = 500 * 2**20
_INTERRUPTED = "the service stopped before it was done; upload the file again"
_CANCELLED = "cancelled by the user"


@dataclass(frozen=True, slots=True)
class Upload:
    """A checked file. `name` is redacted; `digest` is a keyed digest of the bytes."""

    name: str
    media_type: MediaType
    data: bytes
    digest: str
    collection: str
    on_duplicate: OnDuplicate = "skip"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The document an upload became, or the one that already holds the same bytes."""

    id: str
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """How far a running ingest is."""

    stage: Status
    done: int
    total: int
    unit: str


async def _nobody(*_: object) -> None:
    """In place of somebody who wants to be told."""


class Jobs:
    """Takes uploads and works them off."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        on_end: Callable[[Status, float], None] = lambda *_: None,
        on_ready: Callable[[str, bool], Awaitable[None]] = _nobody,
        on_delete: Callable[[str], Awaitable[None]] = _nobody,
    ) -> None:
        """Args:
        on_end: told the final status of each ingest and its seconds.
        on_ready: told the id of a document that can be read now, and whether no other one waits.
        on_delete: told the id of a document that is about to be deleted.
        """
        self._pipeline = pipeline
        self._catalogue = pipeline.catalogue
        self._on_end, self._on_ready, self._on_delete = on_end, on_ready, on_delete
        self._waiting: OrderedDict[str, Upload] = OrderedDict()
        self._stages: dict[str, Stage] = {}
        self._current: tuple[str, asyncio.Task[Status]] | None = None
        self._changes = Changes()
        self._stopping = False
        self._worker: asyncio.Task[None] | None = None
        self._adding = asyncio.Lock()

    async def start(self) -> None:
        """Close the entries that an earlier run left open, and begin to work."""
        # The service takes uploads while the models load: those in the queue or on the way into it are this run's own.
        async with self._adding:
            for document in await asyncio.to_thread(self._catalogue.documents):
                if document.status not in FINAL and document.id not in self._waiting:
                    await self._end(document.id, "failed", _INTERRUPTED)
                    await asyncio.to_thread(self._remove_parts, document.id)
        self._worker = asyncio.create_task(self._work(), name="ingest")

    async def stop(self) -> None:
        """Stop at once; the running ingest and those that wait end as failed."""
        if self._worker is None:
            return
        self._stopping = True
        self._worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._worker
        self._worker = None
        for id in list(self._waiting):
            await self._end(id, "failed", _INTERRUPTED)
        self._waiting.clear()

    async def add_all(self, uploads: Sequence[Upload]) -> list[Accepted]:
        """Enter the files of one request into the catalogue and the queue: all of them or none.

        Raises:
            QueueFull: too many bytes wait already.
        """
        async with self._adding:
            accepted, new = await asyncio.to_thread(self._sort_out, uploads)
            waiting = sum(len(upload.data) for upload in self._waiting.values())
            if self._waiting and waiting + sum(len(upload.data) for _, upload in new) > _MAX_WAITING_BYTES:
                raise QueueFull(f"{len(self._waiting)} files wait already; upload again when some are done")
            await asyncio.to_thread(self._catalogue.add, *(document for document, _ in new))
            self._waiting.update((document.id, upload) for document, upload in new)
        self._changes.notify()
        return accepted

    def stage(self, id: str) -> Stage | None:
        """How far a document is, or None when it is not being ingested."""
        return self._stages.get(id)

    async def cancel(self, id: str) -> bool:
        """Stop a document's ingest; false when it has ended otherwise or was about to."""
        if self._waiting.pop(id, None) is not None:
            await self._end(id, "cancelled", _CANCELLED)
            return True
        if self._current is not None and self._current[0] == id:
            task = self._current[1]
            # A task cancelled before its first step would never end its document, so let it begin.
            await asyncio.sleep(0)
            # Without a stage it is ending already, and must not be torn out of its clean-up by a second call.
            if id in self._stages:
                task.cancel()
            await asyncio.wait([task])
            return not task.cancelled() and task.exception() is None and task.result() == "cancelled"
        return False

    async def delete(self, id: str) -> None:
        """Remove a document in whatever state it is.

        Raises:
            UnknownDocument: there is none of this id.
        """
        await asyncio.to_thread(self._catalogue.get, id)
        await self.cancel(id)
        await self._on_delete(id)
        await asyncio.to_thread(self._pipeline.vectors.delete, id)
        await asyncio.to_thread(self._catalogue.delete, id)
        log.info("document_deleted", document=id)

    async def watch(self, id: str) -> AsyncIterator[Document]:
        """The document at each change, until its ingest has ended.

        Raises:
            UnknownDocument: there is none of this id.
        """
        last: tuple[Document, Stage | None] | None = None
        while True:
            changed = self._changes.next()
            document = await asyncio.to_thread(self._catalogue.get, id)
            if (document, self.stage(id)) != last:
                last = (document, self.stage(id))
                yield document
            if document.status in FINAL:
                return
            await changed.wait()

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                await self._changes.next().wait()
            id, upload = self._waiting.popitem(last=False)
            task = asyncio.create_task(self._ingest(id, upload), name=f"ingest {id}")
            self._current = (id, task)
            try:
                await asyncio.wait([task])
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait([task])
                self._current = None
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.error("ingest_not_recorded", document=id, error=type(error).__name__)

    def _sort_out(self, uploads: Sequence[Upload]) -> tuple[list[Accepted], list[tuple[Document, Upload]]]:
        """What each upload becomes, and the new ones among them as entries of the catalogue."""
        accepted: list[Accepted] = []
        new: list[tuple[Document, Upload]] = []
        for upload in uploads:
            same = self._same(upload, [document for document, _ in new])
            if same is None:
                new.append((_entry(upload), upload))
            accepted.append(Accepted((same or new[-1][0]).id, duplicate=same is not None))
        return accepted, new

    def _same(self, upload: Upload, earlier: Sequence[Document]) -> Document | None:
        """The document that an upload need not be stored beside; `earlier` are those of its own request."""
        here = [document for document in earlier if document.collection == upload.collection]
        if upload.on_duplicate == "skip":
            alike = [document for document in here if document.digest == upload.digest]
            return alike[0] if alike else self._catalogue.find_same(upload.collection, upload.digest)
        if upload.on_duplicate == "replace":
            # Another name is another document, and an older one of this name is about to be replaced.
            named = [document for document in here if document.name == upload.name]
            newest = named[-1] if named else self._catalogue.find_newest(upload.collection, upload.name)
            return newest if newest is not None and newest.digest == upload.digest else None
        return None

    async def _ingest(self, id: str, upload: Upload) -> Status:
        """Work off one upload; always ends the document in a final status, with nothing half-stored."""
        started = time.monotonic()
        status: Status = "failed"
        reason: str | None = None
        try:
            outcome = await ingest_document(
                id,
                upload.name,
                upload.media_type,
                upload.data,
                pipeline=self._pipeline,
                report=lambda *stage: self._report(id, Stage(*stage)),
            )
            status, reason = outcome.status, outcome.reason
        except asyncio.CancelledError:
            status, reason = ("failed", _INTERRUPTED) if self._stopping else ("cancelled", _CANCELLED)
        except (IngestError, RetrievalError) as error:
            reason = str(error)
        except Exception as error:
            # Anything else is our own mistake: its text may quote the document, so only its type is kept.
            reason = f"an internal error ended the ingest ({type(error).__name__}); the document was not stored"
            log.error("ingest_broke", document=id, error=type(error).__name__)
        self._stages.pop(id, None)
        if status not in READABLE:
            try:
                await asyncio.to_thread(self._remove_parts, id)
            # What cannot be removed is never read, because only readable documents are; the document must end.
            except Exception as error:
                log.error("parts_not_removed", document=id, error=type(error).__name__)
        await asyncio.to_thread(self._catalogue.set_status, id, status, reason)
        if status in READABLE:
            # Before anybody is told that it is ready: what they see then includes what comes of this.
            try:
                await self._on_ready(id, not self._waiting)
            # The document is ready whatever comes of it.
            except RetrievalError as error:
                log.warning("ready_not_told", document=id, error=type(error).__name__)
        self._changes.notify()
        if status in READABLE and upload.on_duplicate == "replace":
            await self._delete_older(id, upload)
        seconds = time.monotonic() - started
        self._on_end(status, seconds)
        log.info("ingest_ended", document=id, status=status, seconds=round(seconds, 2), bytes=len(upload.data))
        return status

    async def _delete_older(self, id: str, upload: Upload) -> None:
        newest_first = await asyncio.to_thread(self._catalogue.documents, upload.collection)
        for other in dropwhile(lambda document: document.id != id, newest_first):
            if other.name == upload.name and other.id != id and other.status in FINAL:
                with contextlib.suppress(UnknownDocument):
                    await self.delete(other.id)

    def _remove_parts(self, id: str) -> None:
        self._pipeline.vectors.delete(id)
        self._catalogue.clear(id)

    def _report(self, id: str, stage: Stage) -> None:
        previous = self._stages.get(id)
        self._stages[id] = stage
        if previous is None or previous.stage != stage.stage:
            log.info("ingest_stage", document=id, stage=stage.stage)
        self._changes.notify()

    async def _end(self, id: str, status: Status, reason: str | None) -> None:
        await asyncio.to_thread(self._catalogue.set_status, id, status, reason)
        self._changes.notify()


def _entry(upload: Upload) -> Document:
    return Document(
        id=f"d_{uuid.uuid4().hex[:16]}",
        name=upload.name,
        collection=upload.collection,
        media_type=upload.media_type,
        bytes=len(upload.data),
        digest=upload.digest,
        created_at=datetime.now(UTC),
    )
