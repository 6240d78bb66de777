"""KV pages on disk: one file a block, `root/<fingerprint>/<namespace>/<block hash>.kv`.

A fingerprint names what pages mean (model, types, layout), a namespace the salt that they were computed under, so that
everything of one salt goes by removing one folder. A file is a header and the pages of all layers, as they are in
memory. It appears whole, by renaming, but is not synced: what a crash has torn is known by its size or its checksum,
which also covers where the file belongs. Names that are not of this shape are nobody's business here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from serving.engine import DiskState, KvDisk

Buffer = bytes | bytearray | memoryview

# Magic with the version of the format, bytes of all pages, checksum.
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"FwKV\0\0\0\1"
_NAME = re.compile(r"[0-9a-f]{32}")
_BLOCK, _TEMPORARY, _REMOVED = ".kv", ".tmp", ".removed"
# Over its quota the store gives back a little more than it must, so that it need not look at all files every time.
_KEPT_SHARE = 0.9
_RETRY_S = 60.0
_SPEED = "speed"
# The time that less takes says more about the system than about the disk.
_TELLING_BYTES = 4 * 2**20
# A disk that was slow once is tried again after so long.
_SPEED_S = 3600.0
# The size of the next file, before there are any.
_SOME_BYTES = 2**20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def digest(text: str) -> str:
    """A name for a folder: 32 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def namespace(salt: str) -> str:
    """The name of the folder of a salt."""
    return digest(salt)


@dataclass(frozen=True, slots=True)
class _Folder:
    """A namespace of one fingerprint; `used` is when it was last read or written, in seconds of the epoch.

    `bytes` are those of all its files, `largest` those of one.
    """

    path: Path
    used: float
    bytes: int
    largest: int


class KvFiles:
    """The store under one root. Reading and writing never raise: what does not work is said by `state`.

    One thread writes; others may read, and other processes may remove, at the same time.
    """

    def __init__(
        self,
        root: Path,
        quota_bytes: int,
        fingerprint: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is touched yet.

        Args:
            quota_bytes: most bytes of files under the root, of all fingerprints.
            fingerprint: whose blocks are read and written, as `digest` names it; None for one who only looks after the
                store as a whole.
        """
        self._root = root
        self._quota = quota_bytes
        self._fingerprint = fingerprint
        self._clock = clock
        self._state = "ok"
        self._retry_at = 0.0
        # Unknown until something is written; then at least what there is.
        self._bytes: int | None = None

    @property
    def state(self) -> str:
        """ "ok", "full" (the disk, or the quota with what may not go), or "unusable: " and why; about writing."""
        return self._state

    @property
    def accepts(self) -> bool:
        """Whether a write is worth trying: a failure is forgotten after a minute."""
        return self._state == "ok" or self._clock() >= self._retry_at

    def has(self, namespace: str, block_hash: bytes) -> bool:
        """Whether a block is there, not whether it is whole."""
        try:
            return self._path(namespace, block_hash).exists()
        except OSError:
            return False

    def read(self, namespace: str, block_hash: bytes, pages: Sequence[Buffer]) -> bool:
        """Read a block into the pages of all layers, in the order in which they were written.

        Returns:
            whether it was there and whole; if not, the pages hold anything, and the file is gone.
        """
        path = self._path(namespace, block_hash)
        header = bytearray(_HEADER.size)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            read = os.preadv(file, [header, *pages], 0)
            whole = read == os.fstat(file).st_size and header == self._header(path, pages)
            os.utime(path.parent)
        except OSError:
            whole = False
        finally:
            os.close(file)
        if not whole:
            with contextlib.suppress(OSError):
                path.unlink()
        return whole

    def begin(self, namespace: str) -> None:
        """Make the folder of a namespace, for the first block of a prompt.

        Later blocks do not bring back a folder that was removed meanwhile: they would be of no use, and the removal
        would not have removed them.
        """
        folder = self._path(namespace, b"").parent
        try:
            for path in (self._root, folder.parent, folder):
                # Whether it is a folder shows when something is written; it may be removed at any time.
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700, parents=path == self._root)
        except FileNotFoundError:  # the folder above was removed meanwhile
            return
        except OSError as error:
            self._fail(error)

    def write(self, namespace: str, block_hash: bytes, pages: Sequence[Buffer]) -> bool:
        """Write a block, making room by removing what was used least recently.

        Returns:
            whether it is there now.
        """
        if not self.accepts:
            return False
        path = self._path(namespace, block_hash)
        header = self._header(path, pages)
        size = len(header) + sum(map(len, pages))
        try:
            if not path.parent.exists():
                return False
            if not self._make_room(path.parent, size):
                raise OSError(errno.EDQUOT, "over the quota")
            _write(path, [header, *pages], size)
        except FileNotFoundError:  # the namespace was removed meanwhile
            return False
        except OSError as error:
            self._fail(error)
            return False
        self._state = "ok"
        self._bytes = (self._bytes or 0) + size
        return True

    def remove(self, namespace: str) -> None:
        """Remove everything of a namespace, whatever its fingerprint.

        Raises:
            OSError: something could not be removed.
        """
        for fingerprint in _folders(self._root):
            _remove(fingerprint / _checked(namespace))

    def namespaces(self) -> set[str]:
        """The namespaces that hold something, of all fingerprints."""
        return {folder.path.name for folder in self._scan()}

    def count(self, namespace: str) -> int:
        """Blocks of a namespace, whatever its fingerprint."""
        found = [fingerprint / _checked(namespace) for fingerprint in _folders(self._root)]
        return max((sum(1 for _ in folder.glob(f"*{_BLOCK}")) for folder in found), default=0)

    def observe(self, bytes: int, seconds: float) -> None:
        """Record how long reading so much took, for `seconds`, in any process, now and after a restart."""
        if bytes < _TELLING_BYTES or seconds <= 0:
            return
        speed, before = bytes / seconds, self._speed()
        with contextlib.suppress(OSError):
            text = repr(speed if before is None else (speed + before) / 2).encode()
            _write(self._root / _SPEED, [text], len(text))

    def seconds(self, namespace: str) -> float | None:
        """How long reading everything of a namespace takes; None when nobody has measured that lately."""
        speed = self._speed()
        if speed is None:
            return None
        found = (sum(_sizes(fingerprint / _checked(namespace))) for fingerprint in _folders(self._root))
        return max(found, default=0) / speed

    def size(self) -> int:
        """Bytes of all files."""
        return sum(folder.bytes for folder in self._scan())

    def look(self) -> KvDisk:
        """What there is, and whether one more file could be written, which is tried by taking the room for a moment.

        So it is true whoever writes: before anything was written, after a restart, and as soon as there is room again.
        """
        folders = sorted(self._scan(), key=lambda folder: folder.used)
        used = sum(folder.bytes for folder in folders)
        size = max((folder.largest for folder in folders), default=0) or _SOME_BYTES
        if (folders[-1].bytes if folders else 0) + size > self._quota:
            return KvDisk("full", used, self._quota, "what was used last fills the quota alone")
        try:
            # Over the quota, older files go before a new one is written.
            _reserve(self._root, size if used + size <= self._quota else 0)
        except OSError as error:
            return KvDisk(_state_after(error), used, self._quota, error.strerror)
        return KvDisk("ok", used, self._quota)

    def clean(self) -> None:
        """Remove what an interrupted writer or remover has left. For the one who writes, before it begins."""
        for fingerprint in _folders(self._root):
            for left in fingerprint.glob(f"*{_REMOVED}"):
                shutil.rmtree(left, ignore_errors=True)
            for left in fingerprint.glob(f"*/*{_TEMPORARY}"):
                left.unlink(missing_ok=True)

    def _speed(self) -> float | None:
        """Bytes a second of the last reads."""
        path = self._root / _SPEED
        try:
            return None if time.time() - path.stat().st_mtime > _SPEED_S else float(path.read_text()) or None
        except (OSError, ValueError):
            return None

    def _path(self, namespace: str, block_hash: bytes) -> Path:
        assert self._fingerprint is not None, "blocks belong to a fingerprint"
        return self._root / _checked(self._fingerprint) / _checked(namespace) / f"{block_hash.hex()}{_BLOCK}"

    def _header(self, path: Path, pages: Sequence[Buffer]) -> bytes:
        checksum = xxhash.xxh3_64("/".join(path.relative_to(self._root).parts).encode())
        for page in pages:
            checksum.update(page)
        return _HEADER.pack(_MAGIC, sum(map(len, pages)), checksum.intdigest())

    def _fail(self, error: OSError) -> None:
        state = _state_after(error)
        self._state = f"{state}: {error.strerror}" if state == "unusable" else state
        self._retry_at = self._clock() + _RETRY_S
        # The disk is not as it was believed to be.
        self._bytes = None

    def _make_room(self, written: Path, size: int) -> bool:
        if self._bytes is not None and self._bytes + size <= self._quota:
            return True
        # Others may have removed something, so look again before anything has to go.
        folders = list(self._scan())
        self._bytes = sum(folder.bytes for folder in folders)
        if self._bytes + size <= self._quota:
            return True
        for folder in sorted(folders, key=lambda one: (one.path.parent == written.parent, one.used)):
            if self._bytes + size <= self._quota * _KEPT_SHARE:
                break
            if folder.path != written:
                with contextlib.suppress(OSError):
                    _remove(folder.path)
                    self._bytes -= folder.bytes
        return self._bytes + size <= self._quota

    def _scan(self) -> Iterator[_Folder]:
        for fingerprint in _folders(self._root):
            for path in _folders(fingerprint):
                # It may be removed at any time.
                with contextlib.suppress(FileNotFoundError):
                    used = path.stat().st_mtime
                    sizes = list(_sizes(path))
                    yield _Folder(path, used, sum(sizes), max(sizes, default=0))


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a folder of KV pages; use files.digest")
    return name


def _folders(path: Path) -> list[Path]:
    """Folders of a folder whose names are digests; none if it is not there."""
    try:
        with os.scandir(path) as entries:
            return [Path(entry) for entry in entries if _NAME.fullmatch(entry.name) and entry.is_dir()]
    except OSError:
        return []


def _sizes(path: Path) -> Iterator[int]:
    """Of the files of a folder, which may go at any time."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.stat(follow_symlinks=False).st_size


def _state_after(error: OSError) -> DiskState:
    return "full" if error.errno in _FULL else "unusable"


def _reserve(folder: Path, size: int) -> None:
    """Take room for a file, and give it back; where the folder is yet to be made, beside it."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    # It has no name, so that nothing of it is left whatever happens.
    with tempfile.TemporaryFile(dir=there) as file:
        if size > 0:
            os.posix_fallocate(file.fileno(), 0, size)


def _write(path: Path, parts: Sequence[Buffer], size: int) -> None:
    temporary = path.with_suffix(f".{os.getpid()}{_TEMPORARY}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            # A disk that is almost full takes a part.
            if os.writev(file, parts) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _remove(path: Path) -> None:
    # Out of a writer's way first: it would put files into a folder that is being emptied.
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_REMOVED}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        shutil.rmtree(aside)
