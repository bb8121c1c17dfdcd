"""OffloadingConnector before 0.26, presented in the terms of later releases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch import geometry, older_connectors
from kvpatch.fence import Fence

KV_CACHES = {"layer.0": object()}


@pytest.fixture
def registered(monkeypatch) -> list[Any]:
    """What was given to the registration of later releases."""
    given: list[Any] = []

    def register(wrapped: Any, worker: Any, *rest: Any) -> None:
        given.append((worker, *rest))
        worker.kvpatch_rows = [(0x1000, 4096)]

    monkeypatch.setattr(geometry, "register_regions", register)
    return given


@pytest.mark.parametrize(
    ("register", "init"),
    [
        (older_connectors.register_with_spec, "_init_worker"),
        (older_connectors.register_with_handlers, "_register_handlers"),
    ],
)
def test_the_plan_comes_from_the_spec(registered, register, init):
    plan, started = object(), []
    spec = SimpleNamespace(
        kv_cache_config=plan, cpu_page_size_per_worker=3 * 4096, block_size_factor=3
    )
    worker = SimpleNamespace(spec=spec, **{init: started.append})
    register(lambda: pytest.fail("vLLM's own ran"), worker, (KV_CACHES,), {})
    ((later, args, kwargs),) = registered
    assert (args, kwargs) == ((KV_CACHES,), {})
    assert later.kv_cache_config is plan
    # The CPU tier counts in chunks of blocks; a region's bytes are a block's.
    assert later.spec.config.worker_kv_bytes_per_block == 4096
    assert worker.kvpatch_rows == [(0x1000, 4096)]  # for what names the files of a tier
    later._init_worker("regions")
    assert started == ["regions"]


def test_the_fence_is_told_the_blocks_on_the_devices_side_of_a_pair():
    def job(source: list[int], destination: list[int]) -> SimpleNamespace:
        pair = (SimpleNamespace(block_ids=source), SimpleNamespace(block_ids=destination))
        return SimpleNamespace(req_id="r", transfer_spec=pair)

    fence = Fence(lambda page: (page * 10, page * 10 + 10), workers=1)
    planner = SimpleNamespace(
        kvpatch_fence=fence,
        kvpatch_manager=SimpleNamespace(capture_physical_release_marker=lambda: 7),
    )
    meta = SimpleNamespace(store_jobs={1: job([11, 12], [90])}, load_jobs={2: job([90], [33])})
    output = object()
    made = older_connectors.around_build(
        lambda scheduler_output: meta if scheduler_output is output else None,
        planner,
        (output,),
        {},
    )
    assert made is meta
    assert {job_id: named.blocks for job_id, named in fence.transfers.items()} == {
        1: (11, 12),
        2: (33,),
    }
    released, held = fence.split([(7, [0, 1, 3, 9])], can_plan=True)
    assert released == [0, 9]
    assert held == [(7, [1, 3])]


class OffloadingConnector(SimpleNamespace):
    """vLLM's, by its name."""


@pytest.mark.parametrize("in_multi", [False, True], ids=["alone", "inside a MultiConnector"])
@pytest.mark.parametrize(
    ("vllm_asks", "holding", "asked"),
    [(False, 0, False), (True, 0, True), (False, 2, True)],
)
def test_an_engine_steps_while_a_page_is_held_back(vllm_asks, holding, asked, in_multi):
    planner = SimpleNamespace(kvpatch_fence=SimpleNamespace(holding=holding))
    connector = OffloadingConnector(connector_scheduler=planner)
    if in_multi:
        connector = SimpleNamespace(_connectors=[SimpleNamespace(), connector])
    scheduler = SimpleNamespace(connector=connector)
    assert older_connectors.around_has_requests(lambda: vllm_asks, scheduler, (), {}) is asked


def test_an_engine_without_a_connector_steps_as_it_did():
    scheduler = SimpleNamespace(connector=None)
    assert older_connectors.around_has_requests(lambda: True, scheduler, (), {}) is True
    assert older_connectors.around_has_requests(lambda: False, scheduler, (), {}) is False


@pytest.mark.parametrize("size", [4, (4,)])
def test_up_to_0_18_each_region_is_a_layer_of_its_own_backend(monkeypatch, size):
    torch = pytest.importorskip("torch")
    region = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64).view(torch.int8)

    def checked(worker, kv_caches):
        assert kv_caches is KV_CACHES
        assert worker.kv_cache_config is plan
        assert worker.spec.config.worker_kv_bytes_per_block == 64
        return SimpleNamespace(tensors=[region, region])

    monkeypatch.setattr(geometry, "checked_regions", checked)
    plan = SimpleNamespace(num_blocks=3, kv_cache_tensors=[SimpleNamespace(size=96)] * 2)
    spec = SimpleNamespace(kv_cache_config=plan, gpu_block_size=size)
    given = []
    worker = SimpleNamespace(spec=spec, _register_handlers=lambda *both: given.append(both))
    older_connectors.register_with_backends(lambda: None, worker, (KV_CACHES,), {})
    ((regions, backends),) = given
    assert regions.keys() == backends.keys() and len(regions) == 2
    for name, tensor in regions.items():
        # As vLLM reads it: blocks first, the tokens of a block behind them, whole blocks.
        assert backends[name].get_kv_cache_shape(1234, 16, 8, 256).index(1234) == 0
        assert backends[name].get_kv_cache_shape(1234, 16, 8, 256).index(16) == 1
        assert tensor.shape == (3, 4, 16)
        assert tensor.data_ptr() == region.data_ptr()
        assert tensor.element_size() * tensor.stride(0) == 64


def test_blocks_that_left_a_window_are_not_stored_for_it():
    def blocks(*null):
        return [SimpleNamespace(is_null=index in null) for index in range(5)]

    def state(stored, ids):
        return SimpleNamespace(next_stored_block_idx=stored, block_ids=ids)

    groups = [state(0, [1, 2, 3]), state(1, [4, 5, 6, 7])]
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(
            coordinator=SimpleNamespace(
                single_type_managers=[
                    SimpleNamespace(req_to_blocks={"r": blocks(0, 1)}),
                    SimpleNamespace(req_to_blocks={"r": blocks(0, 1, 2, 4)}),
                ]
            )
        )
    )
    planner = SimpleNamespace(
        kvpatch_manager=SimpleNamespace(kvpatch_scheduler=scheduler),
        _sliding_window_groups=(1,),
        _req_status={"r": SimpleNamespace(group_states=groups), "new": SimpleNamespace()},
        config=SimpleNamespace(block_size_factor=1),
    )
    planner._req_status["new"].group_states = [state(0, []), state(0, [])]
    assert older_connectors.before_build(lambda output: output, planner, ("step",), {}) == "step"
    assert groups[0].block_ids == [1, 2, 3]  # full attention keeps them all
    assert groups[1].block_ids == [4, 0, 0, 7]  # what is stored already is let be


@pytest.mark.parametrize(
    ("status", "computed", "held", "storable"),
    [
        ("FINISHED_STOPPED", 640, 12, 5),
        ("FINISHED_STOPPED", 640, 3, 1),  # of two blocks each
        ("FINISHED_ABORTED", 0, 0, 0),
        ("FINISHED_ABORTED", 64, 12, 2),
    ],
)
def test_of_an_aborted_request_0_26_stores_what_it_has_computed(status, computed, held, storable):
    group = SimpleNamespace(group_idx=1, tokens_per_chunk=32)
    state = SimpleNamespace(
        req=SimpleNamespace(status=SimpleNamespace(name=status), num_computed_tokens=computed),
        config=SimpleNamespace(blocks_per_chunk=2),
        group_states=[None, SimpleNamespace(block_ids=[7] * held)],
    )
    assert older_connectors.around_storable(lambda *both: 5, state, (group, 640), {}) == storable
