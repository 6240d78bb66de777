"""The store of KV pages on disk."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.engine import KvDisk
from serving.kv.files import KvFiles, digest, namespace
from tests.conftest import fill, small_disk

MIB = 2**20
FINGERPRINT = digest("a model")
SALT = namespace("salt")
BLOCK = b"\x01" * 32
PAGES = [bytes([layer]) * 4096 for layer in range(3)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def files(root: Path) -> KvFiles:
    return KvFiles(root, 100 * MIB, FINGERPRINT)


def put(files: KvFiles, salt: str = SALT, block: bytes = BLOCK, pages: list[bytes] | None = None) -> bool:
    files.begin(salt)
    return files.write(salt, block, PAGES if pages is None else pages)


def get(files: KvFiles, salt: str = SALT, block: bytes = BLOCK, sizes: tuple[int, ...] = (4096,) * 3) -> list[bytes]:
    """The pages of a block, or none."""
    into = [bytearray(size) for size in sizes]
    return [bytes(page) for page in into] if files.read(salt, block, [memoryview(page) for page in into]) else []


def only(root: Path, pattern: str = "*/*/*.kv") -> Path:
    (path,) = root.glob(pattern)
    return path


def used(root: Path, salt: str, seconds: int, fingerprint: str = FINGERPRINT) -> None:
    """Say when a namespace was used last."""
    os.utime(root / fingerprint / salt, (seconds, seconds))


def test_a_block_comes_back_as_it_was_written(files: KvFiles, root: Path) -> None:
    assert not files.has(SALT, BLOCK)
    assert get(files) == []
    assert put(files)
    assert files.has(SALT, BLOCK)
    assert get(files) == PAGES
    assert get(KvFiles(root, 0, FINGERPRINT)) == PAGES
    assert files.namespaces() == {SALT}
    assert files.size() == only(root).stat().st_size == sum(map(len, PAGES)) + 24
    assert files.state == "ok"


def test_pages_may_be_written_in_one_piece(files: KvFiles) -> None:
    put(files, pages=[b"".join(PAGES)])
    assert get(files) == PAGES


def test_nobody_else_may_read_it(files: KvFiles, root: Path) -> None:
    put(files)
    folders = [root, root / FINGERPRINT, root / FINGERPRINT / SALT]
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700] * 3
    assert stat.S_IMODE(only(root).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "tear",
    [
        pytest.param(lambda data: data[:-1], id="cut"),
        pytest.param(lambda data: data + b"x", id="longer"),
        pytest.param(lambda data: data[:-4096] + b"\0" * 4096, id="a hole"),
        pytest.param(lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], id="one bit"),
        pytest.param(lambda data: b"FwKV\0\0\0\2" + data[8:], id="another version"),
        pytest.param(lambda data: data[:10], id="part of the header"),
        pytest.param(lambda data: b"", id="empty"),
    ],
)
def test_what_is_not_whole_is_not_served_and_goes(files: KvFiles, root: Path, tear: Callable[[bytes], bytes]) -> None:
    put(files)
    path = only(root)
    path.write_bytes(tear(path.read_bytes()))
    assert get(files) == []
    assert not path.exists()


def test_a_block_of_other_pages_is_not_served(files: KvFiles) -> None:
    put(files)
    assert get(files, sizes=(4096, 4096)) == []
    put(files)
    assert get(files, sizes=(4096, 4096, 4097)) == []


def test_a_file_in_another_s_place_is_not_served(files: KvFiles, root: Path) -> None:
    put(files)
    other = b"\x02" * 32
    only(root).rename(root / FINGERPRINT / SALT / f"{other.hex()}.kv")
    assert files.has(SALT, other)
    assert get(files, block=other) == []


def test_fingerprints_and_salts_do_not_see_each_other(files: KvFiles, root: Path) -> None:
    put(files)
    assert get(files, salt=namespace("another")) == []
    assert get(KvFiles(root, 100 * MIB, digest("another model"))) == []


@pytest.mark.parametrize("name", ["..", "a/b", "", "A" * 32, "salt"])
def test_a_namespace_is_a_digest(files: KvFiles, root: Path, name: str) -> None:
    put(files)
    for call in (files.begin, files.remove):
        with pytest.raises(ValueError, match=r"use files\.digest"):
            call(name)


def test_removing_a_namespace_leaves_no_byte_of_it(files: KvFiles, root: Path) -> None:
    put(files)
    put(files, salt=namespace("another"))
    put(KvFiles(root, 100 * MIB, digest("an older model")))
    KvFiles(root, 0).remove(SALT)
    assert files.namespaces() == {namespace("another")}
    assert {path.name for path in root.glob("*/*")} == {namespace("another")}
    files.remove(SALT)


def test_a_removed_namespace_comes_back_with_its_first_block_only(files: KvFiles) -> None:
    put(files)
    files.remove(SALT)
    assert not files.write(SALT, b"\x02" * 32, PAGES)
    assert files.namespaces() == set()
    assert files.state == "ok"
    assert put(files)


def test_a_namespace_is_removed_while_it_is_written(files: KvFiles, root: Path) -> None:
    keeper = KvFiles(root, 0)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            put(files, block=number.to_bytes(32, "big"))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            keeper.remove(SALT)
    finally:
        stop.set()
        writer.join()
    assert files.state == "ok"
    keeper.remove(SALT)
    assert list(root.glob("*/*")) == []


def test_over_the_quota_what_was_used_least_recently_goes_first(root: Path) -> None:
    files = KvFiles(root, 4 * MIB, FINGERPRINT)
    salts = [namespace(str(number)) for number in range(4)]
    for salt in salts[:3]:
        put(files, salt, pages=[bytes(MIB)])
    for salt, seconds in zip(salts, (20, 30, 10), strict=False):
        used(root, salt, seconds)
    # Reading is using.
    assert get(files, salts[2], sizes=(MIB,))
    put(files, salts[3], pages=[bytes(MIB)])
    assert files.namespaces() == {salts[1], salts[2], salts[3]}
    assert files.size() <= 4 * MIB
    assert files.state == "ok"


def test_what_an_older_model_has_left_goes_before_anything_else(root: Path) -> None:
    older = digest("an older model")
    put(KvFiles(root, 4 * MIB, older), pages=[bytes(MIB)])
    files = KvFiles(root, 4 * MIB, FINGERPRINT)
    for number in range(2):
        put(files, namespace(str(number)), pages=[bytes(MIB)])
        used(root, namespace(str(number)), 10)
    put(files, namespace("new"), pages=[bytes(MIB + MIB // 2)])
    assert files.namespaces() == {namespace("0"), namespace("1"), namespace("new")}


def test_what_is_being_written_does_not_go_and_the_store_is_full(root: Path) -> None:
    now = [0.0]
    files = KvFiles(root, 3 * MIB, FINGERPRINT, clock=lambda: now[0])
    put(files, namespace("another"), pages=[bytes(MIB)])
    written = [put(files, block=bytes([n]) * 32, pages=[bytes(MIB)]) for n in range(4)]
    assert written == [True, True, False, False]
    assert files.namespaces() == {SALT}
    assert files.state == "full"
    assert not files.accepts
    # After a while another may have the room.
    assert not put(files, namespace("third"), pages=[bytes(MIB)])
    now[0] = 61
    assert put(files, namespace("third"), pages=[bytes(MIB)])
    assert files.state == "ok"
    assert files.namespaces() == {namespace("third")}


def test_what_others_have_removed_is_room(root: Path) -> None:
    files = KvFiles(root, 4 * MIB, FINGERPRINT)
    for number in range(3):
        put(files, namespace(str(number)), pages=[bytes(MIB)])
    KvFiles(root, 0).remove(namespace("1"))
    put(files, namespace("3"), pages=[bytes(MIB)])
    assert files.namespaces() == {namespace(number) for number in "023"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_state_and_is_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    now = [0.0]
    files = KvFiles(root, 100 * MIB, FINGERPRINT, clock=lambda: now[0])

    def refuse(file: int, parts: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse)
        assert not put(files)
    assert files.state == "full"
    assert list(root.glob("*/*/*")) == []
    assert not put(files)
    now[0] = 60
    assert put(files)
    assert files.state == "ok"


def test_a_disk_that_takes_a_part_is_full(files: KvFiles, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [parts[0]]))
    assert not put(files)
    assert files.state == "full"
    assert list(root.glob("*/*/*")) == []


def test_a_folder_that_cannot_be_written_is_a_state(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    files = KvFiles(root, 100 * MIB, FINGERPRINT, clock=lambda: now[0])
    root.write_text("not a folder")
    assert not put(files)
    assert files.state.startswith("unusable: ")
    assert not files.has(SALT, BLOCK)
    assert get(files) == []
    assert files.namespaces() == set()
    assert files.size() == 0
    files.clean()
    root.unlink()
    now[0] = 60
    assert put(files)
    assert files.state == "ok"


def test_a_missing_folder_holds_nothing(files: KvFiles) -> None:
    assert files.namespaces() == set()
    assert files.size() == 0
    files.clean()
    files.remove(SALT)
    assert not files.write(SALT, BLOCK, PAGES)
    assert files.state == "ok"


def test_what_an_interrupted_writer_has_left_goes_at_start(files: KvFiles, root: Path) -> None:
    put(files)
    folder = root / FINGERPRINT / SALT
    (folder / f"{'02' * 32}.123.tmp").write_bytes(b"half")
    removed = root / FINGERPRINT / f"{namespace('another')}.0123.removed"
    removed.mkdir()
    (removed / "block.kv").write_bytes(b"old")
    files.clean()
    assert list(root.glob("*/*")) == [folder]
    assert list(folder.iterdir()) == [only(root)]
    assert get(files) == PAGES


def test_what_is_not_ours_is_left_alone(root: Path) -> None:
    stranger = root / "notes" / SALT
    stranger.mkdir(parents=True)
    (stranger / "letter.txt").write_bytes(bytes(MIB))
    files = KvFiles(root, MIB, FINGERPRINT)
    put(files)
    put(files, namespace("another"), pages=[bytes(MIB // 2)])
    put(files, namespace("third"), pages=[bytes(MIB // 2)])
    files.remove(SALT)
    files.clean()
    assert (stranger / "letter.txt").exists()


def test_what_is_there_and_how_much_may_be(files: KvFiles, root: Path) -> None:
    keeper = KvFiles(root, 100 * MIB)
    assert keeper.look() == KvDisk("ok", 0, 100 * MIB)
    assert not root.exists()
    put(files)
    assert keeper.look() == KvDisk("ok", files.size(), 100 * MIB)
    assert list(root.iterdir()) == [root / FINGERPRINT]


def test_a_full_disk_is_seen_by_all_until_there_is_room(tmp_path: Path) -> None:
    root, now = tmp_path / "disk" / "kv", [0.0]
    with small_disk(root.parent, 8):
        writer = KvFiles(root, 100 * MIB, FINGERPRINT, clock=lambda: now[0])
        assert put(writer, pages=[bytes(MIB)])
        filler = fill(root.parent)
        # Also after a restart, when nobody has written anything yet.
        keeper = KvFiles(root, 100 * MIB)
        assert keeper.look() == KvDisk("full", writer.size(), 100 * MIB, os.strerror(errno.ENOSPC))
        assert not put(writer, block=b"\x02" * 32, pages=[bytes(MIB)])
        assert writer.state == "full"
        assert get(writer, sizes=(MIB,)) == [bytes(MIB)]
        os.truncate(filler, filler.stat().st_size - MIB // 2)
        assert keeper.look().state == "full"
        filler.unlink()
        assert keeper.look() == KvDisk("ok", writer.size(), 100 * MIB)
        now[0] = 60
        assert put(writer, block=b"\x02" * 32, pages=[bytes(MIB)])


def test_a_full_disk_is_not_full_for_those_who_make_room_in_it(tmp_path: Path) -> None:
    root = tmp_path / "disk" / "kv"
    with small_disk(root.parent, 8):
        files = KvFiles(root, 3 * MIB, FINGERPRINT)
        for number in range(2):
            put(files, namespace(str(number)), pages=[bytes(MIB)])
            used(root, namespace(str(number)), 10 + number)
        fill(root.parent)
        # No third file is allowed, so an older one goes before it is written.
        assert files.look().state == "ok"
        assert put(files, namespace("2"), pages=[bytes(MIB)])


def test_a_quota_that_is_filled_by_what_may_not_go_is_full(root: Path) -> None:
    assert KvFiles(root, 1000).look().state == "full"
    files = KvFiles(root, 3 * MIB, FINGERPRINT)
    for number in range(2):
        assert files.look().state == "ok"
        assert put(files, block=bytes([number]) * 32, pages=[bytes(MIB)])
    assert files.look() == KvDisk("full", files.size(), 3 * MIB, "what was used last fills the quota alone")
    assert not put(files, block=b"\x02" * 32, pages=[bytes(MIB)])


def test_a_folder_that_is_none_is_unusable(root: Path) -> None:
    root.write_text("not a folder")
    assert KvFiles(root, 100 * MIB).look() == KvDisk("unusable", 0, 100 * MIB, os.strerror(errno.ENOTDIR))


def test_how_long_reading_takes_is_known_to_all_for_an_hour(files: KvFiles, root: Path) -> None:
    put(files)
    size = only(root).stat().st_size
    assert files.seconds(SALT) is None
    # The time of so little would be that of the system.
    files.observe(1000, 1.0)
    assert files.seconds(SALT) is None
    files.observe(100 * MIB, 1.0)
    other = KvFiles(root, 100 * MIB)
    assert other.seconds(SALT) == pytest.approx(size / (100 * MIB))
    assert other.seconds(namespace("nothing of it")) == 0
    # What came before counts, too.
    other.observe(100 * MIB, 0.5)
    assert files.seconds(SALT) == pytest.approx(size / (150 * MIB))
    assert other.namespaces() == {SALT}
    hours_ago = time.time() - 2 * 3600
    os.utime(root / "speed", (hours_ago, hours_ago))
    assert files.seconds(SALT) is None
    (root / "speed").write_text("rubbish")
    assert files.seconds(SALT) is None
