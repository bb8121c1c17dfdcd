"""The real, compiled vllm-ascend on kvcached's pools of an emulated NPU.

Needs ``scripts/environment ascend-0.23.0``, and is not in the default run.
"""

from pathlib import Path

import pytest

from harness import ascend

HALVES = [
    f"layer{layer} {half} {block}" for layer in (0, 1) for half in "KV" for block in (3, 7, 40)
]


@pytest.fixture(scope="module", params=ascend.RELEASES)
def seen(request, tmp_path_factory):
    """What the scenarios of the driver saw."""
    ledger: Path = tmp_path_factory.mktemp("ledger")
    return ascend.drive(request.param, ledger)


def test_every_row_finds_its_target_in_the_installed_packages(seen):
    assert len(seen["targets"]) == 11
    assert set(seen["targets"].values()) == {""}


def test_the_pools_are_tensors_of_the_npu(seen):
    """Two pages of each half of two layers' pools, 2 MiB each, and the scratch page."""
    device, free = seen["memory"]
    assert device == "npu"
    assert free == 1024 - 2 * (2 * 2 * 2 + 1)


def test_without_the_row_v_is_lost_without_an_error(seen):
    found = seen["unpatched"]
    assert found["erased"] == len(HALVES)  # the blocks were really gone in between
    assert found["wrong"] == [half for half in HALVES if " V " in half]


def test_without_the_row_the_workers_tier_is_not_the_schedulers(seen):
    found = seen["unpatched"]
    assert found["worker's tier"] == 2 * found["scheduler's tier"]


def test_with_the_row_no_byte_is_wrong_in_either_direction(seen):
    found = seen["patched"]
    assert found["erased"] == len(HALVES)
    assert found["wrong"] == []
    assert found["batches"] == 2  # one call of ACL for the stores, one for the loads


def test_with_the_row_the_tier_is_as_large_in_worker_and_scheduler(seen):
    found = seen["patched"]
    assert found["worker's tier"] == found["scheduler's tier"] == 64


def test_a_store_waits_for_the_computation_with_the_row_only(seen):
    assert seen["stale without the row"] == ["region0", "region1", "region2", "region3"]
    assert seen["stale with the row"] == []


def test_a_page_unmapped_under_a_queued_store_is_lost_without_the_fence(seen):
    assert seen["lost without the fence"] == HALVES
    assert seen["lost with the fence"] == []


def test_what_vllm_ascend_replaces_after_a_row_is_seen(seen):
    assert seen["replaced"] == {"before": [], "after": ["elastic_memory.engine_core"]}


def test_the_fences_barrier_waits_for_the_computation_of_an_npu(seen):
    assert seen["barrier"] == {"returned before the computation": False, "returned": True}


def test_without_kvpatch_a_sleep_ends_with_an_error_of_the_connector(seen):
    assert "SimpleCPUOffloadConnector does not support reset_cache()" in seen["sleeping"]
