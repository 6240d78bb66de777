"""A document ends even when the stores break, also when what it left behind cannot be removed."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ingest.jobs import Jobs, Upload
from ingest.pipeline import Pipeline
from retrieval.catalogue import Document
from retrieval.errors import StorageFailed

LIMIT_S = 30.0


def upload(text: str) -> Upload:
    data = text.encode()
    return Upload("a.txt", "text/plain", data, sha256(data).hexdigest(), "default")


async def ingested(jobs: Jobs, file: Upload) -> Document:
    id = (await jobs.add_all([file]))[0].id
    async with asyncio.timeout(LIMIT_S):
        *_, last = [document async for document in jobs.watch(id)]
    return last


async def test_broken_vector_store(pipeline: Pipeline, tmp_path: Path) -> None:
    """Neither adding nor removing works any more; whoever watches must be told all the same."""
    jobs = Jobs(pipeline)
    await jobs.start()
    (tmp_path / "vectors" / "chroma.sqlite3").write_bytes(b"garbage" * 1000)
    for text in ("The pump runs.", "The queue goes on."):
        document = await ingested(jobs, upload(text))
        assert document.status == "failed"
        assert document.reason is not None
        assert document.reason.startswith("the vector store cannot be read or written")
        assert pipeline.catalogue.pages(document.id) == []
    await jobs.stop()


async def test_the_first_cause_is_kept(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageFailed("the disk is full")

    def fail_too(_: str) -> None:
        raise RuntimeError("secret words of the document")

    ends: list[str] = []
    jobs = Jobs(pipeline, on_end=lambda status, _: ends.append(status))
    await jobs.start()
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.catalogue, "store", fail)
        patch.setattr(pipeline.vectors, "delete", fail_too)
        document = await ingested(jobs, upload("The pump runs."))
    assert (document.status, document.reason) == ("failed", "the disk is full")
    # Once the stores are well again, so is the queue.
    assert (await ingested(jobs, upload("The pump runs."))).status == "ready"
    await jobs.stop()
    assert ends == ["failed", "ready"]


async def test_what_cannot_be_recorded_is_logged_without_its_text(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret words of the document")

    monkeypatch.setattr(pipeline.catalogue, "set_status", fail)
    jobs = Jobs(pipeline)
    with capture_logs() as logs:
        await jobs.start()
        await jobs.add_all([upload("The pump runs.")])
        async with asyncio.timeout(LIMIT_S):
            while not [entry for entry in logs if entry["event"] == "ingest_not_recorded"]:
                await asyncio.sleep(0.01)
    await jobs.stop()
    assert "RuntimeError" in str(logs)
    assert "secret" not in str(logs)
