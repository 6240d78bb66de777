"""The thread that writes blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from serving.kv.files import Buffer, KvFiles, digest, namespace
from serving.kv.writer import Writer

SALT = namespace("salt")
LIMIT_S = 10.0


class SlowFiles(KvFiles):
    """Writes when it is let."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, 2**20, digest("a model"))
        self.let = threading.Event()

    def write(self, namespace: str, block_hash: bytes, pages: Sequence[Buffer]) -> bool:
        assert self.let.wait(LIMIT_S)
        return super().write(namespace, block_hash, pages)


@pytest.fixture
def files(tmp_path: Path) -> SlowFiles:
    return SlowFiles(tmp_path)


def offer(writer: Writer, number: int, size: int = 10, first: bool = False) -> bool:
    return writer.offer(SALT, bytes([number]), lambda: bytes([number]) * size, size, first=first)


def written(files: KvFiles, number: int, size: int = 10) -> bool:
    page = bytearray(size)
    return files.read(SALT, bytes([number]), [page]) and bytes(page) == bytes([number]) * size


def test_what_waits_is_written_before_it_ends(files: SlowFiles) -> None:
    writer = Writer(files, 100)
    assert offer(writer, 0, first=True)
    assert offer(writer, 1)
    assert not files.has(SALT, bytes([0]))
    files.let.set()
    writer.close(LIMIT_S)
    assert written(files, 0)
    assert written(files, 1)


def test_what_does_not_fit_the_queue_is_not_copied(files: SlowFiles) -> None:
    writer = Writer(files, 25)
    assert [offer(writer, number, first=number == 0) for number in range(4)] == [True, True, False, False]
    # What waits already is not copied again.
    assert writer.offer(SALT, bytes([1]), lambda: pytest.fail("copied"), 10, first=False)
    files.let.set()
    writer.close(LIMIT_S)
    assert [files.has(SALT, bytes([number])) for number in range(4)] == [True, True, False, False]


def test_what_is_there_is_not_copied(files: SlowFiles) -> None:
    files.let.set()
    writer = Writer(files, 100)
    offer(writer, 0, first=True)
    writer.close(LIMIT_S)
    assert Writer(files, 100).offer(SALT, bytes([0]), lambda: pytest.fail("copied"), 10, first=True)


def test_nothing_is_copied_for_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("not a folder")
    files = KvFiles(root, 2**20, digest("a model"))
    writer = Writer(files, 100)
    assert offer(writer, 0, first=True)
    writer.close(LIMIT_S)
    assert files.state.startswith("unusable: ")
    assert not Writer(files, 100).offer(SALT, bytes([0]), lambda: pytest.fail("copied"), 10, first=True)


def test_it_does_not_end_later_than_it_may(files: SlowFiles) -> None:
    writer = Writer(files, 100)
    offer(writer, 0, first=True)
    writer.close(0.01)
    files.let.set()
