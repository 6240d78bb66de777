"""The disk tier on a GPU: the lowest of vLLM's tiers, below the card's memory and the host's.

vLLM moves chunks (some blocks of a prompt) between the card and a region of the host's memory, and asks the tiers below
for what it does not find there. This one keeps chunks as `files.KvFiles` does, in a folder for each namespace, so that
quota, removal and checks are those of the disk tier on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from serving.kv.files import KvFiles, digest
from serving.kv.settings import NAMESPACE

# A disk reads several files at once faster than one after another.
_READERS = 8

log = init_logger("vllm.foreword.kv")


class FileTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks of prompts in files. `settings.tiers_config` has the settings."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        root: str,
        quota_bytes: int,
        fingerprint: str,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._chunks = primary_kv_view.cast("B")
        config = offloading_spec.config
        meaning = (
            fingerprint,
            vllm.__version__,
            self.block_size_bytes,
            offloading_spec.blocks_per_chunk,
            [(group.tokens_per_block, tuple(group.layer_names)) for group in config.groups],
            str(config.model.dtype),
            str(config.kv_cache_layout),
        )
        self._files = KvFiles(Path(root), quota_bytes, digest(repr(meaning)))
        self._files.clean()
        # A prompt's first chunk ends here.
        self._first = offloading_spec.tokens_per_block[0] * offloading_spec.blocks_per_chunk
        self._unreadable: set[OffloadKey] = set()
        self._state = self._files.state
        # One writes, as the files require; one waits for the readers, job after job.
        self._writer = ThreadPoolExecutor(1, "foreword-kv-writer")
        self._loader = ThreadPoolExecutor(1, "foreword-kv-loader")
        self._readers = ThreadPoolExecutor(_READERS, "foreword-kv-reader")
        self._running: set[Future[None]] = set()
        self._done: SimpleQueue[JobResult] = SimpleQueue()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        name = _namespace(req_context)
        if name is None or key in self._unreadable or not self._files.has(name, get_offload_block_hash(key)):
            return LookupResult.MISS
        return LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._start(self._writer, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._start(self._loader, self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._running = {future for future in self._running if not future.done()}
        if self._state != self._files.state:
            self._state = self._files.state
            log.warning("The KV files on disk are now: %s", self._state)
        while True:
            try:
                yield self._done.get_nowait()
            except Empty:
                return

    def drain_jobs(self) -> None:
        wait(self._running)

    def shutdown(self) -> None:
        for pool in (self._writer, self._loader, self._readers):
            # What is not written by now is computed again.
            pool.shutdown(cancel_futures=True)
        self._chunks.release()

    def _start(self, pool: ThreadPoolExecutor, work: Callable[[TransferJob], JobResult], job: TransferJob) -> None:
        def run() -> None:
            try:
                result = work(job)
            except Exception as error:  # noqa: BLE001 - without a result the chunks would be held for ever
                log.error("A transfer of KV files broke: %s", type(error).__name__)
                result = JobResult(job.job_id, success=False)
            self._done.put(result)

        self._running.add(pool.submit(run))

    def _store(self, job: TransferJob) -> JobResult:
        name = _namespace(job.req_context)
        written = 0
        place = job.req_context.get_offload_key_position
        # They come in any order, and a prompt's folder is made for its first chunk.
        for key, chunk in sorted(zip(job.keys, job.chunk_ids, strict=True), key=lambda pair: place(pair[0]) or 0):
            if name is None:
                break
            if place(key) == self._first:
                self._files.begin(name)
            block = get_offload_block_hash(key)
            # A later chunk is of no use without this one.
            if not (self._files.has(name, block) or self._files.write(name, block, [self._bytes_of(chunk)])):
                break
            self._unreadable.discard(key)
            written += 1
        return JobResult(job.job_id, written == len(job.keys), transfer_bytes=written * self.block_size_bytes)

    def _load(self, job: TransferJob) -> JobResult:
        name = _namespace(job.req_context)
        assert name is not None, "nothing is found without a namespace"
        keys = list(job.keys)

        def read(key: OffloadKey, chunk: int) -> bool:
            return self._files.read(name, get_offload_block_hash(key), [self._bytes_of(chunk)])

        started = time.perf_counter()
        whole = list(self._readers.map(read, keys, job.chunk_ids))
        self._files.observe(sum(whole) * self.block_size_bytes, time.perf_counter() - started)
        self._unreadable.update(key for key, good in zip(keys, whole, strict=True) if not good)
        if not all(whole):
            log.warning("A part of a prompt could not be read from disk; it will be computed")
        return JobResult(
            job.job_id,
            success=all(whole),
            successful_keys=tuple(key for key, good in zip(keys, whole, strict=True) if good),
            transfer_bytes=sum(whole) * self.block_size_bytes,
        )

    def _bytes_of(self, chunk: int) -> memoryview:
        start = int(chunk) * self.block_size_bytes
        return self._chunks[start : start + self.block_size_bytes]


def _namespace(req_context: ReqContext) -> str | None:
    """The folder of a request's chunks; requests without one take no part."""
    return (req_context.kv_transfer_params or {}).get(NAMESPACE)
