"""The connector without an engine: what it refuses, what it calls the same, and what it moves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from serving.kv.files import digest, namespace
from serving.kv.plans import Blocks, Plan
from serving.kv.settings import transfer_config

SALT = namespace("salt")
HASHES = [bytes([number]) * 32 for number in range(3)]
PAGES = 10


@pytest.fixture(scope="module")
def connector_module() -> ModuleType:
    """Loading vLLM takes seconds and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from serving.kv import disk_connector

    return disk_connector


class Make:
    """Makes connectors, one half each, and closes them."""

    def __init__(self, module: ModuleType, root: Path) -> None:
        self.module = module
        self.root = root
        self.made: list[Any] = []

    def __call__(
        self,
        workers: int = 1,
        groups: int = 1,
        cache_dtype: str = "auto",
        isa: str = "vec",
        without: str | None = None,
        policy: str = "recompute",
        fingerprint: str = "a model",
    ) -> Any:
        from vllm.config import KVTransferConfig
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        settings = transfer_config(self.root, 2**30, fingerprint) | {"kv_load_failure_policy": policy}
        settings["kv_connector_extra_config"].pop(without, None)
        config = SimpleNamespace(
            kv_transfer_config=KVTransferConfig(**settings),
            parallel_config=SimpleNamespace(world_size=workers),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            model_config=SimpleNamespace(dtype=torch.float32),
            compilation_config=SimpleNamespace(static_forward_context={"layer.0": SimpleNamespace(isa=isa)}),
        )
        spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * groups)
        connector = self.module.DiskConnector(config, None, cache)
        self.made.append(connector)
        return connector

    def worker(self, caches: dict[str, torch.Tensor] | None = None, **settings: Any) -> Any:
        """The half that has pages."""
        connector = self(**settings)
        connector.register_kv_caches(layers() if caches is None else caches)
        return connector


@pytest.fixture
def make(connector_module: ModuleType, tmp_path: Path) -> Iterator[Make]:
    make = Make(connector_module, tmp_path / "kv")
    yield make
    for connector in make.made:
        connector.shutdown()


def layers(size: int = 16) -> dict[str, torch.Tensor]:
    """Two layers with pages of random numbers, and a third that shares the first's."""
    first, second = torch.randn(PAGES, 2, 32, size), torch.randn(PAGES, 2, 32, size)
    return {"layer.0": first, "layer.1": second, "layer.2": first}


def run(connector: Any, plan: Plan) -> None:
    """One step of a worker."""
    connector.bind_connector_metadata(SimpleNamespace(plan=plan))
    connector.start_load_kv(None)
    connector.wait_for_save()
    connector.clear_connector_metadata()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param({"workers": 2}, "serves one worker and there are 2", id="several workers"),
        pytest.param({"groups": 2}, "whose layers all keep every token", id="layers of several kinds"),
        pytest.param({"policy": "fail"}, "'fail'; the disk tier needs 'recompute'", id="policy"),
        pytest.param({"without": "root"}, r"lacks \['root'\]", id="no folder"),
    ],
)
def test_what_it_cannot_serve_is_refused(make: Make, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make(**settings)


def test_a_page_in_pieces_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"a page of layer\.0 is not in one piece"):
        make.worker({"layer.0": torch.zeros(PAGES, 32, 2, 16).transpose(1, 2)})


def test_pages_of_another_device_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"layer\.0 is on meta"):
        make.worker({"layer.0": torch.zeros(PAGES, 2, 32, 16, device="meta")})


def test_only_the_same_pages_have_the_same_fingerprint(make: Make) -> None:
    workers = [
        make.worker(),
        make.worker(fingerprint="another model"),
        make.worker(isa="amx"),
        make.worker(cache_dtype="fp8"),
        make.worker(layers(size=32)),
    ]
    fingerprints = [worker.get_handshake_metadata().fingerprint for worker in workers]
    assert len(set(fingerprints)) == len(fingerprints)
    assert make.worker().get_handshake_metadata().fingerprint == fingerprints[0]
    assert make().get_handshake_metadata() is None


def test_pages_come_back_byte_for_byte(make: Make, tmp_path: Path) -> None:
    before, after = layers(), layers()
    writer = make.worker(before)
    run(writer, Plan(stores=[Blocks(SALT, HASHES, [7, 0, 9], first=True)]))
    # Pages are written to again as soon as the step is over.
    expected = {name: cache.clone() for name, cache in before.items()}
    for cache in before.values():
        cache.zero_()
    writer.shutdown()

    reader = make.worker(after)
    untouched = after["layer.1"][5].clone()
    run(reader, Plan(loads={"r": Blocks(SALT, HASHES, [1, 2, 3])}))
    assert reader.get_finished(set()) == (None, {"r"})
    assert reader.get_block_ids_with_load_errors() == set()
    for name, cache in after.items():
        assert torch.equal(cache[1:4], expected[name][[7, 0, 9]])
    assert torch.equal(after["layer.1"][5], untouched)
    assert reader.get_finished(set()) == (None, set())


def test_pages_that_were_not_loaded_are_told(make: Make) -> None:
    writer = make.worker()
    run(writer, Plan(stores=[Blocks(SALT, HASHES[:1], [0], first=True)]))
    writer.shutdown()
    reader = make.worker()
    run(reader, Plan(loads={"r": Blocks(SALT, HASHES, [4, 5, 6])}))
    assert reader.get_finished(set()) == (None, {"r"})
    assert reader.get_block_ids_with_load_errors() == {5, 6}
    assert reader.get_block_ids_with_load_errors() == set()


def test_the_scheduler_s_half_looks_where_the_worker_writes(make: Make) -> None:
    worker = make.worker()
    run(worker, Plan(stores=[Blocks(SALT, HASHES, [0, 1, 2], first=True)]))
    worker.shutdown()
    scheduler = make()
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    request = SimpleNamespace(
        request_id="r",
        cache_salt="salt",
        num_tokens=100,
        block_hashes=HASHES,
        sampling_params=SimpleNamespace(extra_args=None),
    )
    assert scheduler.get_num_new_matched_tokens(request, 32) == (64, True)
    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([4, 5, 6],)), 64)
    output = SimpleNamespace(kv_connector_block_state=None, num_scheduled_tokens={})
    plan = scheduler.build_connector_meta(output).plan
    assert plan == Plan({"r": Blocks(SALT, HASHES[1:], [5, 6])})
    scheduler.update_connector_output(SimpleNamespace(finished_recving={"r"}, invalid_block_ids={6}))
    assert scheduler.get_num_new_matched_tokens(request, 32) == (0, False)
    assert scheduler.request_finished(request, [4, 5, 6]) == (False, None)
    assert digest("salt") == SALT
