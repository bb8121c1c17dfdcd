"""A spill through vLLM's own planners and CPU tiers, without an engine or kvpatch's patches."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.patches.suspend import offloading, simple
from kvpatch.patches.suspend.spill import Spill, cached

ROOM = 10


def key(number: int, group: int = 0) -> bytes:
    return bytes([number]) * 32 + group.to_bytes(4, "big")


class Pool:
    """kvcached's pool, with vLLM's blocks."""

    def __init__(self, keys: dict[int, bytes]) -> None:
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        self.blocks = [KVCacheBlock(number) for number in range(64)]
        self.cached_block_hashes_by_block: dict[int, Any] = {}
        self._cached_blocks: dict[bytes, dict[int, Any]] = {}
        self._block_id_to_key: dict[int, bytes] = {}
        self._evictable_blocks: OrderedDict[int, Any] = OrderedDict()
        for number, its in keys.items():
            self.blocks[number].set_block_hash(its)
            self._cached_blocks.setdefault(its, {})[number] = self.blocks[number]
            self._block_id_to_key[number] = its
            self._evictable_blocks[number] = self.blocks[number]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1
            self._evictable_blocks.pop(block.block_id, None)

    def free_blocks(self, blocks: Any, prepend: bool = False) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._evictable_blocks[block.block_id] = block


def planner(threshold: int = 1, policy: str = "lru", workers: int = 2, chunk: int = 1) -> Any:
    """An OffloadingConnector's scheduler with a CPU tier, of two groups."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    made = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    made.manager = CPUOffloadingManager(ROOM, store_threshold=threshold, cache_policy=policy)
    groups = [SimpleNamespace(group_idx=group, hashes_per_chunk=chunk) for group in (0, 1)]
    made.config = SimpleNamespace(
        blocks_per_chunk=chunk, num_workers=workers, kv_group_configs=groups
    )
    made._job_counter = made._stale_job_threshold = 0
    made._jobs, made._req_status, made._block_id_to_pending_jobs = {}, {}, {}
    made._chunks_being_loaded = set()
    made._connector_stats = OffloadingConnectorStats()
    return made


def report(made: Any, job: int, workers: int) -> None:
    """Let workers report that a store has ended."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingWorkerMetadata,
    )

    for _ in range(workers):
        meta = OffloadingWorkerMetadata()
        meta.mark_completed(job)
        made.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))


def spill_of(made: Any, keys: dict[int, bytes]) -> Spill:
    pool = Pool(keys)
    spill = Spill(offloading.OffloadingTier(made), pool)
    spill.begin(cached(pool))
    return spill


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("threshold", [1, 3])
def test_offloading_stores_what_fits_and_forgets_the_store(policy, threshold):
    made = planner(threshold, policy)
    spill = spill_of(made, {number: key(number, number % 2) for number in range(1, 13)})
    assert spill.tier.why_not() == ""
    ((number, job),) = offloading.store(made, spill).items()
    # Group by group, and the last used blocks of each.
    assert list(job.src_spec.block_ids) == [12, 10, 8, 6, 4, 11, 9, 7, 5, 3]
    assert list(job.src_spec.group_sizes) == [5, 5]
    assert len(set(job.dst_spec.block_ids)) == ROOM
    assert made._block_id_to_pending_jobs.keys() == set(range(3, 13))
    assert not spill.waits
    assert not spill.done
    report(made, number, 1)
    assert not spill.done, "one of two workers has stored it"
    report(made, number, 1)
    assert spill.done
    assert spill.kept() == ROOM
    assert (made._jobs, made._req_status, made._block_id_to_pending_jobs) == ({}, {}, {})
    counts = made.manager.counts
    assert counts is None if threshold == 1 else not counts, "the threshold is forgotten"


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_offloading_evicts_nothing_that_the_spill_needs(policy):
    made = planner(policy=policy)
    first = spill_of(made, {number: key(number) for number in range(1, 11)})
    ((number, _),) = offloading.store(made, first).items()
    report(made, number, 2)
    # The five that were stored as the least important ones are on the device again.
    again = {number: key(number) for number in (*range(1, 6), *range(20, 25))}
    second = spill_of(made, again)
    assert second.count.missing == 5
    ((number, job),) = offloading.store(made, second).items()
    assert sorted(job.src_spec.block_ids) == [20, 21, 22, 23, 24]
    report(made, number, 2)
    assert second.done
    assert second.kept() == 10


def test_offloading_counts_its_own_stores_and_loads_of_the_step():
    """The connector stores two of the blocks at the same time."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
    from vllm.v1.kv_offload.base import ReqContext

    from kvpatch import state

    made = planner()
    made._current_batch_load_jobs = {}
    context = ReqContext(req_id="its own")
    made.manager.on_new_request(context)
    assert made.manager.prepare_store([key(1), key(2)], context) is not None
    spill = state.attach(made, spill_of(made, {number: key(number) for number in range(1, 6)}))
    ((number, _),) = offloading.around_store_jobs(dict, made, (), {}).items()
    assert (spill.count.planned, spill.counts.spilled["suspend"]) == (5, 3)
    report(made, number, 2)
    made._current_batch_load_jobs = {7: "how"}
    made._jobs[7] = TransferJobStatus("loads", 2, {key(1), key(3)}, is_store=False)
    assert offloading.around_store_jobs(dict, made, (), {}) == {}
    assert (spill.counts.restored, set(spill.counts.away)) == (1, {key(4), key(5)})


def test_offloading_waits_for_room_and_gives_up_without_hope():
    made = planner()
    first = spill_of(made, {number: key(number) for number in range(1, 11)})
    ((number, _),) = offloading.store(made, first).items()
    second = spill_of(made, {number: key(number) for number in range(20, 30)})
    assert offloading.store(made, second) == {}
    assert second.waits, "the first store will make room"
    report(made, number, 2)
    assert len(offloading.store(made, second)) == 1
    assert not second.waits

    from vllm.v1.kv_offload.base import ReqContext

    made = planner()
    first = spill_of(made, {number: key(number) for number in range(1, 11)})
    ((number, _),) = offloading.store(made, first).items()
    report(made, number, 2)
    context = ReqContext(req_id="loads")
    made.manager.on_new_request(context)
    made.manager.prepare_load([key(number) for number in range(1, 11)], context)
    second = spill_of(made, {number: key(number) for number in range(20, 30)})
    assert offloading.store(made, second) == {}
    assert not second.waits
    assert second.kept() == 0


def test_offloading_takes_what_fits_beside_blocks_in_use():
    from vllm.v1.kv_offload.base import ReqContext

    made = planner()
    first = spill_of(made, {number: key(number) for number in range(1, 11)})
    ((number, _),) = offloading.store(made, first).items()
    report(made, number, 2)
    context = ReqContext(req_id="loads")
    made.manager.on_new_request(context)
    made.manager.prepare_load([key(number) for number in range(1, 7)], context)
    second = spill_of(made, {number: key(number) for number in range(20, 30)})
    stored: list[int] = []
    while second.waits:
        for number, job in offloading.store(made, second).items():
            stored += list(job.src_spec.block_ids)
            report(made, number, 2)
    assert stored[:2] == [29, 28], "the last used blocks go first"
    assert second.done
    assert second.kept() > 0
    assert offloading.OffloadingTier(made).holds(key(1)), "what is being loaded was evicted"


def test_offloading_leaves_out_what_has_gone_meanwhile():
    made = planner()
    spill = spill_of(made, {number: key(number) for number in range(1, 5)})
    del spill.pool._block_id_to_key[2]
    spill.pool._block_id_to_key[3] = key(33)
    ((_, job),) = offloading.store(made, spill).items()
    assert list(job.src_spec.block_ids) == [4, 1]
    assert not spill.waits


def test_offloading_leaves_groups_out_that_the_connector_does_not_store():
    made = planner()
    spill = spill_of(made, {1: key(1, 7)})
    assert offloading.store(made, spill) == {}
    assert not spill.waits


def test_a_reset_of_the_tier_ends_a_store():
    made = planner()
    made._current_batch_load_jobs, made._current_batch_jobs_to_flush = {}, set()
    made._current_batch_allocated_block_ids = set()
    made._events_tracker = SimpleNamespace(reset=lambda: None)
    spill = spill_of(made, {number: key(number) for number in range(1, 5)})
    ((number, _),) = offloading.store(made, spill).items()
    made.reset_cache()
    report(made, number, 2)
    assert spill.done
    assert spill.kept() == 0
    assert made._req_status == {}


@pytest.mark.parametrize("chunk", [2, 4])
def test_chunks_are_stored_with_all_of_their_blocks(chunk):
    """Of two requests, in both groups; the second one's end fills no chunk."""
    made = planner(chunk=chunk)
    long = [bytes([number]) * 32 for number in range(1, 2 * chunk + 1)]
    short = [bytes([number]) * 32 for number in range(50, 50 + 2 * chunk - 1)]
    for name, hashes in (("long", long), ("short", short)):
        made._req_status[name] = SimpleNamespace(req=SimpleNamespace(block_hashes=hashes))
    every = [one + group.to_bytes(4, "big") for group in (0, 1) for one in (*long, *short)]
    pool = Pool(dict(enumerate(every, 1)))
    spill = Spill(offloading.OffloadingTier(made), pool)
    assert spill.tier.why_not() == ""
    offloading.note(made, spill.chunks, pool)
    made._req_status.clear()
    spill.begin(cached(pool))
    assert spill.count.partial == 2 * (chunk - 1)
    ((number, job),) = offloading.store(made, spill).items()
    assert list(job.src_spec.group_sizes) == [3 * chunk, 3 * chunk]
    blocks = list(job.src_spec.block_ids)
    of_chunks = [blocks[at : at + chunk] for at in range(0, len(blocks), chunk)]
    assert all(one == list(range(one[0], one[0] + chunk)) for one in of_chunks)
    # A chunk of the tier for each, under the key of its last block, group by group.
    keys = [every[one[-1] - 1] for one in of_chunks]
    assert list(job.dst_spec.block_ids) == [made.manager._policy.get(key).chunk_id for key in keys]
    assert made._jobs[number].keys == set(keys)
    report(made, number, 2)
    assert spill.done
    assert (spill.kept(), spill.lost()) == (6 * chunk, 0)


def test_blocks_with_several_hashes_and_tiers_of_others_are_refused():
    made = planner(chunk=2)
    made.config.kv_group_configs[1].hashes_per_chunk = 4
    assert "several hashes" in offloading.OffloadingTier(made).why_not()
    made.manager = SimpleNamespace()
    assert "SimpleNamespace" in offloading.OffloadingTier(made).why_not()


def test_what_is_behind_the_cpu_tier_is_not_asked():
    """A lookup there would promote what it finds."""
    made = planner()
    cpu = made.manager
    made.manager = SimpleNamespace(primary_tier=cpu)
    tier = offloading.OffloadingTier(made)
    assert (tier.why_not(), tier.capacity(), tier.holds(key(1))) == ("", ROOM, False)


def simple_scheduler(lazy: bool, keys: dict[int, bytes]) -> Any:
    """A SimpleCPUOffloadConnector's scheduler with a CPU tier."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    made = SimpleCPUOffloadScheduler.__new__(SimpleCPUOffloadScheduler)
    made.cpu_block_pool = BlockPool(ROOM + 1, True, 16)
    made._gpu_block_pool = Pool(keys)
    made._lazy_mode, made.enable_kv_cache_events = lazy, False
    made._store_event_to_blocks, made._abandoned_store_event_to_blocks = {}, {}
    made._store_event_to_reqs, made._reqs_to_store = {}, {}
    made._pending_finished_stores, made._in_flight_store_gpu_blocks = [], set()
    return made


def step(made: Any, spill: Spill, event: int, now: tuple[int, ...] = ()) -> dict[int, int]:
    """Plan the store of one step."""
    from vllm.v1.simple_kv_offload.manager import TransferMeta

    more = simple.store(made, spill, set(now))
    if more:
        made._store_event_to_blocks[event] = TransferMeta(list(more), list(more.values()))
    return more


@pytest.mark.parametrize("lazy", [True, False])
def test_simple_stores_what_fits_and_evicts_nothing_that_the_spill_needs(lazy):
    made = simple_scheduler(lazy, {number: key(number) for number in range(1, 13)})
    pool = made._gpu_block_pool
    spill = Spill(simple.SimpleTier(made), pool)
    spill.begin(cached(pool))
    stored = step(made, spill, 0)
    assert set(stored) == set(range(3, 13))
    assert all(pool.blocks[block].ref_cnt == 1 for block in stored)
    assert made._in_flight_store_gpu_blocks == (set() if lazy else set(stored))
    assert not spill.done
    made._process_store_event(0)
    assert spill.done
    assert spill.kept() == ROOM
    assert all(pool.blocks[block].ref_cnt == 0 for block in stored)
    assert made._in_flight_store_gpu_blocks == set()

    again = {number: key(number) for number in (*range(3, 8), *range(20, 25))}
    made._gpu_block_pool = spill.pool = Pool(again)
    spill.begin(cached(spill.pool))
    assert set(step(made, spill, 1)) == set(range(20, 25))
    made._process_store_event(1)
    assert spill.kept() == 10


@pytest.mark.parametrize("alone", [False, True])
def test_lazy_mode_stores_nothing_beside_a_suspension(alone):
    """In the place of what the suspension has stored; and a reset fails while it does."""
    from kvpatch import state

    made = simple_scheduler(True, {number: key(number) for number in range(1, 5)})
    spill = state.attach(made, Spill(simple.SimpleTier(made), made._gpu_block_pool))
    spill.alone = alone
    calls = []

    def lazy(output: Any) -> Any:
        calls.append(output)
        return [7], [8], [], None

    found = simple.around_store_specs(lazy, made, ("step",), {})
    assert found == (([], [], [], None) if alone else ([7], [8], [], None))
    assert calls == ([] if alone else ["step"])
    made._lazy_mode = False
    assert simple.around_store_specs(lazy, made, ("step",), {}) == ([7], [8], [], None)


def test_simple_stores_nothing_twice():
    made = simple_scheduler(False, {number: key(number) for number in range(1, 5)})
    pool = made._gpu_block_pool
    spill = Spill(simple.SimpleTier(made), pool)
    spill.begin(cached(pool))
    pool.touch([pool.blocks[1]])  # the connector's own store of this step
    assert set(step(made, spill, 0, now=(1,))) == {2, 3, 4}
    assert (spill.count.planned, spill.counts.spilled["suspend"]) == (4, 3)
    assert set(spill.counts.away) == {key(number) for number in (2, 3, 4)}


def test_simple_waits_for_room_and_gives_up_without_hope():
    made = simple_scheduler(True, {number: key(number) for number in range(1, 11)})
    pool = made._gpu_block_pool
    first = Spill(simple.SimpleTier(made), pool)
    first.begin(cached(pool))
    step(made, first, 0)
    made._gpu_block_pool = Pool({number: key(number) for number in range(20, 25)})
    second = Spill(simple.SimpleTier(made), made._gpu_block_pool)
    second.begin(cached(made._gpu_block_pool))
    assert step(made, second, 1) == {}
    assert second.waits
    made._gpu_block_pool = pool
    made._process_store_event(0)
    held = [block for block in made.cpu_block_pool.blocks if not block.is_null]
    made.cpu_block_pool.touch(held)
    made._gpu_block_pool = second.pool
    assert step(made, second, 1) == {}
    assert not second.waits
