"""The disk tier as a KV connector of vLLM, for one worker on a CPU.

The scheduler's half asks the disk for what follows the cached part of a prompt, and plans; the worker's half copies
pages to a writer, and reads files straight into pages. Loads are asynchronous in vLLM's sense, although they are done
within one call: vLLM computes nothing with such pages, and shares them with nobody, before it has heard that they are
good. So a file that turns out to be torn costs time and never a wrong answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from serving.accel import plugin
from serving.kv.files import KvFiles, digest
from serving.kv.plans import Plan, Planner
from serving.kv.writer import Writer

# Several times what a step computes; only the blocks of a prompt that was in memory already can be more.
_QUEUE_BYTES = 512 * 2**20
# vLLM kills an engine that takes 5 s to stop; what is not written by then is computed again.
_CLOSE_S = 2.0

log = init_logger("vllm.foreword.kv")


@dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan on its way to the worker."""

    plan: Plan


@dataclass
class _Fingerprint(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What the worker has found out about its pages."""

    fingerprint: str


class DiskConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Stores the prompts of requests that ask for it, and loads what is there for any request with the same salt.

    `settings.transfer_config` has the settings.

    Raises:
        ValueError: vLLM is set up in a way that this cannot serve.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse_what_is_not_served(vllm_config, kv_cache_config)
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._settings = self._kv_transfer_config.kv_connector_extra_config
        # Known when the worker has its pages; each half is made then.
        self._planner: Planner | None = None
        self._worker: _Worker | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not stored is computed again."""
        return False

    def _files(self, fingerprint: str) -> KvFiles:
        return KvFiles(Path(self._settings["root"]), int(self._settings["quota_bytes"]), fingerprint)

    # --- the worker's half ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pages = list(_byte_pages(kv_caches))
        layers = self._vllm_config.compilation_config.static_forward_context
        # The order of keys within a page depends on the instruction set that reads it.
        orders = [str(getattr(layers.get(name), "isa", None)) for name in kv_caches]
        cache = self._vllm_config.cache_config
        fingerprint = digest(
            repr(
                (
                    self._settings["fingerprint"],
                    vllm.__version__,
                    self._block_size,
                    str(cache.cache_dtype),
                    str(self._vllm_config.model_config.dtype),
                    [(name, str(one.dtype), tuple(one.shape[1:])) for name, one in kv_caches.items()],
                    orders,
                )
            )
        )
        files = self._files(fingerprint)
        files.clean()
        self._worker = _Worker(files, pages, fingerprint)

    def get_handshake_metadata(self) -> _Fingerprint | None:
        return None if self._worker is None else _Fingerprint(self._worker.fingerprint)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is computed with pages that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages are copied when all layers have been computed."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.store(self._get_connector_metadata().plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        return None, None if self._worker is None else self._worker.take_loaded()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_invalid()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # --- the scheduler's half ---

    def set_xfer_handshake_metadata(self, metadata: dict[int, _Fingerprint]) -> None:
        (one,) = metadata.values()
        self._planner = Planner(self._files(one.fingerprint), self._block_size, sparse=plugin.switch() == "sparse")

    def on_new_request(self, request: Any) -> None:
        self._plans.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._plans.found(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (pages,) = blocks.get_block_ids()
        self._plans.allocated(request, pages, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> _Metadata:
        state = scheduler_output.kv_connector_block_state
        return _Metadata(
            self._plans.step(scheduler_output.num_scheduled_tokens, lambda id: state.resolve_block_ids(id)[0])
        )

    def update_connector_output(self, connector_output: Any) -> None:
        self._plans.loaded(connector_output.finished_recving or (), connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        self._plans.end(request.request_id)
        return False, None

    @property
    def _plans(self) -> Planner:
        assert self._planner is not None, "the worker reports its pages before the first request"
        return self._planner


class _Worker:
    """Moves pages between memory and files.

    Args:
        pages: of each layer, [pages, bytes of a page].
    """

    def __init__(self, files: KvFiles, pages: list[np.ndarray[Any, np.dtype[np.uint8]]], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._files = files
        self._pages = pages
        self._block_bytes = sum(page.shape[1] for page in pages)
        self._writer = Writer(files, _QUEUE_BYTES)
        self._loaded: set[str] = set()
        self._invalid: set[int] = set()
        self._state = files.state

    def load(self, plan: Plan) -> None:
        for id, blocks in plan.loads.items():
            started = time.perf_counter()
            read = 0
            for block_hash, page in zip(blocks.hashes, blocks.pages, strict=True):
                if not self._files.read(blocks.namespace, block_hash, [layer[page].data for layer in self._pages]):
                    log.warning("A block of a prompt could not be read from disk; the rest will be computed")
                    self._invalid.update(blocks.pages[read:])
                    break
                read += 1
            self._loaded.add(id)
            seconds = time.perf_counter() - started
            self._files.observe(read * self._block_bytes, seconds)
            log.info("Loaded %d blocks, %.1f MB, in %.3f s", read, read * self._block_bytes / 1e6, seconds)

    def store(self, plan: Plan) -> None:
        for blocks in plan.stores:
            for number, (block_hash, page) in enumerate(zip(blocks.hashes, blocks.pages, strict=True)):
                first = blocks.first and number == 0
                copy = _Copy(self._pages, page)
                # A later block is of no use without this one.
                if not self._writer.offer(blocks.namespace, block_hash, copy, self._block_bytes, first=first):
                    break
        if self._state != self._files.state:
            self._state = self._files.state
            log.warning("The KV files on disk are now: %s", self._state)

    def take_loaded(self) -> set[str]:
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_invalid(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def close(self) -> None:
        self._writer.close(_CLOSE_S)


@dataclass(frozen=True, slots=True)
class _Copy:
    """The bytes of a page of all layers."""

    pages: list[np.ndarray[Any, np.dtype[np.uint8]]]
    page: int

    def __call__(self) -> memoryview:
        return memoryview(np.concatenate([layer[self.page] for layer in self.pages]))


def _refuse_what_is_not_served(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    workers = vllm_config.parallel_config.world_size
    if workers > 1:
        raise ValueError(f"the disk tier serves one worker and there are {workers}; switch it off")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = [type(spec).__name__ for spec in specs]
        raise ValueError(f"the disk tier serves models whose layers all keep every token, not {kinds!r}; switch it off")
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise ValueError(f"kv_load_failure_policy is {policy!r}; the disk tier needs 'recompute'")
    settings = vllm_config.kv_transfer_config.kv_connector_extra_config
    if missing := {"root", "quota_bytes", "fingerprint"} - settings.keys():
        raise ValueError(f"kv_connector_extra_config lacks {sorted(missing)!r}")


def _byte_pages(kv_caches: dict[str, torch.Tensor]) -> Iterable[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Each layer's pages as bytes, [pages, bytes of a page], in memory; layers that share pages come once."""
    seen = set()
    for name, cache in kv_caches.items():
        if cache.device.type != "cpu":
            raise ValueError(f"the disk tier reads pages in the CPU's memory, and {name} is on {cache.device}")
        if not cache[0].is_contiguous():
            raise ValueError(f"a page of {name} is not in one piece; the disk tier cannot read this layout")
        if cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            yield cache.flatten(1).view(torch.uint8).numpy()
