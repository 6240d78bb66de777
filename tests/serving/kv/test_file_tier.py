"""The disk tier of a GPU, below a region of memory that stands for the host's."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.kv.settings import NAMESPACE

pytestmark = pytest.mark.filterwarnings("ignore")

CHUNKS, SIZE = 8, 96
FOLDER, OTHER = "a" * 32, "b" * 32


class Host:
    """A tier with the memory above it."""

    def __init__(
        self, root: Path, *, fingerprint: str = "model", quota: int = 2**20, view: memoryview | None = None
    ) -> None:
        from serving.kv.file_tier import FileTier

        self.memory = np.zeros((CHUNKS, SIZE), dtype=np.uint8)
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["a", "b"])],
            model=SimpleNamespace(dtype="bfloat16"),
            kv_cache_layout=None,
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=2, tokens_per_block=(16,))
        self.tier = FileTier(
            spec, view or self.memory.data, "FileTier", root=str(root), quota_bytes=quota, fingerprint=fingerprint
        )
        self._jobs = 0

    @staticmethod
    def request(folder: str | None = FOLDER) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext("request", kv_transfer_params=folder and {NAMESPACE: folder})
        for number in range(CHUNKS):
            context.set_offload_key_position(key(number), (number + 1) * 32)
        return context

    def store(self, numbers: list[int], context: Any) -> Any:
        self.tier.submit_store(self._job(numbers, context, promotion=False))
        return self._result()

    def load(self, numbers: list[int], context: Any) -> Any:
        self.tier.submit_load(self._job(numbers, context, promotion=True))
        return self._result()

    def finds(self, number: int, context: Any) -> bool:
        from vllm.v1.kv_offload.base import LookupResult

        return bool(self.tier.lookup(key(number), context) is LookupResult.HIT)

    def _job(self, numbers: list[int], context: Any, *, promotion: bool) -> Any:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        return TransferJob(self._jobs, [key(n) for n in numbers], np.array(numbers), promotion, context)

    def _result(self) -> Any:
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self._jobs
        return result


def key(number: int) -> bytes:
    """The hash of a chunk, and the number of its group of layers."""
    return bytes([number]) * 32 + bytes(4)


def fill(host: Host) -> np.ndarray[Any, Any]:
    host.memory[:] = np.random.default_rng(1).integers(0, 256, host.memory.shape, dtype=np.uint8)
    return host.memory.copy()


def test_chunks_come_back_after_a_restart(tmp_path: Path) -> None:
    host = Host(tmp_path)
    before = fill(host)
    stored = host.store([2, 0, 1], host.request())
    assert stored.success
    assert stored.transfer_bytes == 3 * SIZE
    host.tier.shutdown()

    again = Host(tmp_path)
    context = again.request()
    assert [again.finds(number, context) for number in range(4)] == [True, True, True, False]
    assert again.load([0, 2], context).success
    assert (again.memory[[0, 2]] == before[[0, 2]]).all()
    assert not again.memory[1].any()
    again.tier.shutdown()


def test_other_models_and_other_salts_find_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path)
    fill(host)
    host.store([0], host.request())
    assert not host.finds(0, host.request(OTHER))
    assert not host.finds(0, host.request(None))
    host.tier.shutdown()
    other = Host(tmp_path, fingerprint="another model")
    assert not other.finds(0, other.request())
    other.tier.shutdown()


def test_a_request_without_a_folder_stores_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert not host.store([0, 1], host.request(None)).success
    assert not list(tmp_path.rglob("*.kv"))
    host.tier.shutdown()


def test_a_torn_file_is_told_and_not_found_again(tmp_path: Path) -> None:
    host = Host(tmp_path)
    fill(host)
    context = host.request()
    host.store([0, 1, 2], context)
    torn = next(path for path in tmp_path.rglob("*.kv") if path.stem == (bytes([1]) * 32).hex())
    torn.write_bytes(torn.read_bytes()[:-1])
    host.memory[:] = 0
    result = host.load([0, 1, 2], context)
    assert not result.success
    assert set(result.successful_keys) == {key(0), key(2)}
    assert [host.finds(number, context) for number in range(3)] == [True, False, True]
    # Computed and stored anew, it is as good as before.
    assert host.store([1], context).success
    assert host.finds(1, context)
    host.tier.shutdown()


def test_a_folder_that_was_removed_does_not_come_back_in_mid_prompt(tmp_path: Path) -> None:
    host = Host(tmp_path)
    fill(host)
    context = host.request()
    host.store([0, 1], context)
    for fingerprint in tmp_path.iterdir():
        (fingerprint / FOLDER).rename(tmp_path / "gone")
    assert not host.store([2], context).success
    assert not host.finds(2, context)
    host.tier.shutdown()


def test_a_quota_that_is_too_small_stops_the_storing_and_nothing_else(tmp_path: Path) -> None:
    host = Host(tmp_path, quota=2 * SIZE)
    fill(host)
    context = host.request()
    result = host.store([0, 1, 2], context)
    assert not result.success
    assert host.finds(0, context)
    assert not host.finds(2, context)
    assert host.load([0], context).success
    host.tier.shutdown()


def test_a_transfer_that_breaks_ends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path)

    def broken(*_: Any) -> bool:
        raise RuntimeError("secret")

    monkeypatch.setattr(host.tier._files, "write", broken)
    started = time.monotonic()
    assert not host.store([0], host.request()).success
    assert time.monotonic() - started < 5
    host.tier.shutdown()


def test_under_vllms_own_manager_chunks_go_down_and_come_back(tmp_path: Path) -> None:
    keys = [key(number) for number in range(3)]
    context = Host.request()
    with _managed(tmp_path) as (manager, memory):
        manager.on_new_request(context)
        rows = manager.prepare_store(keys, context).store_spec.chunk_ids
        memory[rows] = np.random.default_rng(2).integers(0, 256, memory[rows].shape, dtype=np.uint8)
        before = memory[rows].copy()
        # vLLM tells of them as a set.
        manager.complete_store(set(keys), context)
        _until(manager, lambda: not manager.has_pending_work())

    with _managed(tmp_path) as (manager, memory):
        manager.on_new_request(context)
        _until(manager, lambda: all(_hit(manager, number, context) for number in range(3)))
        assert not _hit(manager, 3, context)
        assert (memory[manager.prepare_load(keys, context).chunk_ids] == before).all()


@contextlib.contextmanager
def _managed(root: Path) -> Iterator[tuple[Any, Any]]:
    """vLLM's manager with its region of memory and our tier, and the region's rows."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

    size = 4096
    region = SharedOffloadRegion(f"test-{uuid.uuid4().hex}", CHUNKS, None, size, size)
    primary = CPUPrimaryTierOffloadingManager(CHUNKS, region)
    view = primary.get_kv_memoryview()
    manager = TieringOffloadingManager(primary, [Host(root, view=view, quota=2**24).tier])
    rows = np.frombuffer(view, dtype=np.uint8).reshape(CHUNKS, size)
    try:
        yield manager, rows
    finally:
        del rows
        manager.shutdown()


def _hit(manager: Any, number: int, context: Any) -> bool:
    from vllm.v1.kv_offload.base import LookupResult

    return bool(manager.lookup(key(number), context) is LookupResult.HIT)


def _until(manager: Any, done: Callable[[], bool]) -> None:
    """Schedule steps until something holds."""
    from vllm.v1.kv_offload.base import ScheduleEndContext

    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        manager.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.01)
