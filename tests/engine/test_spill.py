"""A spill through vLLM's own planners and CPU tiers, without an engine or kvpatch's patches."""

from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import pytest

from kvpatch import state
from kvpatch.patches.suspend import offloading, simple
from kvpatch.patches.suspend.spill import Spill, cached

ROOM = 10


def key(number, group=0):
    return bytes([number]) * 32 + group.to_bytes(4, "big")


class Pool:
    """kvcached's pool, with vLLM's blocks."""

    def __init__(self, keys):
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        self.blocks = [KVCacheBlock(number) for number in range(64)]
        self.cached_block_hashes_by_block = {}
        self._cached_blocks = {}
        self._block_id_to_key = {}
        self._evictable_blocks = OrderedDict()
        for number, its in keys.items():
            self.blocks[number].set_block_hash(its)
            self._cached_blocks.setdefault(its, {})[number] = self.blocks[number]
            self._block_id_to_key[number] = its
            self._evictable_blocks[number] = self.blocks[number]

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1
            self._evictable_blocks.pop(block.block_id, None)

    def free_blocks(self, blocks, prepend=False):
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._evictable_blocks[block.block_id] = block


def numbered(*blocks):
    """A key for each of these blocks of the device, which is its number's."""
    return {number: key(number) for number in blocks}


class Offloading:
    """An OffloadingConnector's scheduler with a CPU tier, of two groups."""

    def __init__(self, threshold=1, policy="lru", chunk=1):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics, scheduler
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        of = scheduler.OffloadingConnectorScheduler
        self.real = made = of.__new__(of)
        made.manager = CPUOffloadingManager(ROOM, store_threshold=threshold, cache_policy=policy)
        groups = [SimpleNamespace(group_idx=group, hashes_per_chunk=chunk) for group in (0, 1)]
        made.config = SimpleNamespace(
            blocks_per_chunk=chunk, num_workers=2, kv_group_configs=groups
        )
        made._job_counter = made._stale_job_threshold = 0
        made._jobs, made._req_status, made._block_id_to_pending_jobs = {}, {}, {}
        made._chunks_being_loaded = set()
        made._current_batch_load_jobs, made._current_batch_jobs_to_flush = {}, set()
        made._current_batch_allocated_block_ids = set()
        made._connector_stats = metrics.OffloadingConnectorStats()
        made._events_tracker = SimpleNamespace(reset=lambda: None)

    @property
    def tier(self):
        return offloading.OffloadingTier(self.real)

    def spill(self, keys):
        spill = Spill(self.tier, Pool(keys))
        spill.begin(cached(spill.pool))
        return spill

    def plan(self, spill):
        """Plan the store of a step; return its blocks, in order."""
        if not (jobs := offloading.store(self.real, spill)):
            return []
        (self.planned,) = jobs.items()
        return list(self.planned[1].src_spec.block_ids)

    def end(self, workers=2):
        """Let workers report that what was planned last has ended."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common

        for _ in range(workers):
            meta = common.OffloadingWorkerMetadata()
            meta.mark_completed(self.planned[0])
            self.real.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))

    def use(self, *numbers):
        """Begin to load blocks, which stay in the tier."""
        self.real.manager.prepare_load([key(number) for number in numbers], self.request())

    def request(self):
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(req_id="a request of the connector")
        self.real.manager.on_new_request(context)
        return context


class Simple:
    """A SimpleCPUOffloadConnector's scheduler with a CPU tier."""

    def __init__(self, lazy):
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Scheduler

        self.real = made = Scheduler.__new__(Scheduler)
        made.cpu_block_pool = BlockPool(ROOM + 1, True, 16)
        made._lazy_mode, made.enable_kv_cache_events = lazy, False
        made._store_event_to_blocks, made._abandoned_store_event_to_blocks = {}, {}
        made._store_event_to_reqs, made._reqs_to_store = {}, {}
        made._pending_finished_stores, made._in_flight_store_gpu_blocks = [], set()

    def spill(self, keys):
        self.real._gpu_block_pool = Pool(keys)
        spill = Spill(simple.SimpleTier(self.real), self.real._gpu_block_pool)
        spill.begin(cached(spill.pool))
        return spill

    def plan(self, spill, now=()):
        """Plan the store of a step, beside the connector's own; return its blocks."""
        from vllm.v1.simple_kv_offload.manager import TransferMeta

        self.real._gpu_block_pool = spill.pool
        if more := simple.store(self.real, spill, set(now)):
            event = TransferMeta(list(more), list(more.values()))
            self.real._store_event_to_blocks[0] = event
            self.pool = spill.pool
        return list(more)

    def end(self):
        self.real._gpu_block_pool = self.pool
        self.real._process_store_event(0)

    def use(self, *numbers):
        pool = self.real.cpu_block_pool
        pool.touch([pool.cached_block_hash_to_block.get_one_block(key(one)) for one in numbers])


CONNECTORS = pytest.mark.parametrize(
    "made",
    [
        *(partial(Offloading, policy=policy) for policy in ("lru", "arc")),
        *(partial(Simple, lazy) for lazy in (True, False)),
    ],
    ids=["lru", "arc", "lazy", "eager"],
)


@CONNECTORS
def test_nothing_is_evicted_that_the_spill_needs(made):
    made = made()
    first = made.spill(numbered(*range(1, 11)))
    made.plan(first)
    made.end()
    # The five that were stored as the least important ones are on the device again.
    second = made.spill(numbered(*range(1, 6), *range(20, 25)))
    assert second.count.missing == 5
    assert sorted(made.plan(second)) == [20, 21, 22, 23, 24]
    made.end()
    assert second.done
    assert second.kept() == 10


@CONNECTORS
@pytest.mark.parametrize("hope", [True, False])
def test_it_waits_for_room_and_gives_up_without_hope(made, hope):
    made = made()
    first = made.spill(numbered(*range(1, 11)))
    made.plan(first)
    second = made.spill(numbered(*range(20, 30)))
    assert made.plan(second) == []
    assert second.waits, "the first store will make room"
    made.end()
    if not hope:
        made.use(*range(1, 11))
    assert len(made.plan(second)) == 10 * hope
    assert not second.waits
    if not hope:
        assert second.kept() == 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("threshold", [1, 3])
def test_offloading_stores_what_fits_and_forgets_the_store(policy, threshold):
    made = Offloading(threshold, policy)
    real, spill = made.real, made.spill({one: key(one, one % 2) for one in range(1, 13)})
    assert spill.tier.why_not() == ""
    # Group by group, and the last used blocks of each.
    assert made.plan(spill) == [12, 10, 8, 6, 4, 11, 9, 7, 5, 3]
    job = made.planned[1]
    assert list(job.src_spec.group_sizes) == [5, 5]
    assert len(set(job.dst_spec.block_ids)) == ROOM
    assert real._block_id_to_pending_jobs.keys() == set(range(3, 13))
    assert not spill.waits
    assert not spill.done
    made.end(workers=1)
    assert not spill.done, "one of two workers has stored it"
    made.end(workers=1)
    assert spill.done
    assert spill.kept() == ROOM
    assert (real._jobs, real._req_status, real._block_id_to_pending_jobs) == ({}, {}, {})
    counts = real.manager.counts
    assert counts is None if threshold == 1 else not counts, "the threshold is forgotten"


def test_offloading_counts_its_own_stores_and_loads_of_the_step():
    """The connector stores two of the blocks at the same time."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus

    made = Offloading()
    assert made.real.manager.prepare_store([key(1), key(2)], made.request()) is not None
    spill = state.attach(made.real, made.spill(numbered(*range(1, 6))))
    (made.planned,) = offloading.around_store_jobs(dict, made.real, (), {}).items()
    assert (spill.count.planned, spill.counts.spilled["suspend"]) == (5, 3)
    made.end()
    made.real._current_batch_load_jobs = {7: "how"}
    made.real._jobs[7] = TransferJobStatus("loads", 2, {key(1), key(3)}, is_store=False)
    assert offloading.around_store_jobs(dict, made.real, (), {}) == {}
    assert (spill.counts.restored, set(spill.counts.away)) == (1, {key(4), key(5)})


def test_offloading_takes_what_fits_beside_blocks_in_use():
    made = Offloading()
    made.plan(made.spill(numbered(*range(1, 11))))
    made.end()
    made.use(*range(1, 7))
    second = made.spill(numbered(*range(20, 30)))
    stored = []
    while second.waits:
        if blocks := made.plan(second):
            stored += blocks
            made.end()
    assert stored[:2] == [29, 28], "the last used blocks go first"
    assert second.done
    assert second.kept() > 0
    assert made.tier.holds(key(1)), "what is being loaded was evicted"


def test_offloading_leaves_out_what_has_gone_meanwhile():
    made = Offloading()
    spill = made.spill(numbered(1, 2, 3, 4))
    del spill.pool._block_id_to_key[2]
    spill.pool._block_id_to_key[3] = key(33)
    assert made.plan(spill) == [4, 1]
    assert not spill.waits


def test_offloading_leaves_groups_out_that_the_connector_does_not_store():
    made = Offloading()
    spill = made.spill({1: key(1, 7)})
    assert made.plan(spill) == []
    assert not spill.waits


def test_a_reset_of_the_tier_ends_a_store():
    made = Offloading()
    spill = made.spill(numbered(1, 2, 3, 4))
    made.plan(spill)
    made.real.reset_cache()
    made.end()
    assert spill.done
    assert spill.kept() == 0
    assert made.real._req_status == {}


@pytest.mark.parametrize("chunk", [2, 4])
def test_chunks_are_stored_with_all_of_their_blocks(chunk):
    """Of two requests, in both groups; the second one's end fills no chunk."""
    made = Offloading(chunk=chunk)
    long = [bytes([number]) * 32 for number in range(1, 2 * chunk + 1)]
    short = [bytes([number]) * 32 for number in range(50, 50 + 2 * chunk - 1)]
    for name, hashes in (("long", long), ("short", short)):
        made.real._req_status[name] = SimpleNamespace(req=SimpleNamespace(block_hashes=hashes))
    every = [one + group.to_bytes(4, "big") for group in (0, 1) for one in (*long, *short)]
    pool = Pool(dict(enumerate(every, 1)))
    spill = Spill(made.tier, pool)
    assert spill.tier.why_not() == ""
    offloading.note(made.real, spill.chunks, pool)
    made.real._req_status.clear()
    spill.begin(cached(pool))
    assert spill.count.partial == 2 * (chunk - 1)
    blocks = made.plan(spill)
    number, job = made.planned
    assert list(job.src_spec.group_sizes) == [3 * chunk, 3 * chunk]
    of_chunks = [blocks[at : at + chunk] for at in range(0, len(blocks), chunk)]
    assert all(one == list(range(one[0], one[0] + chunk)) for one in of_chunks)
    # A chunk of the tier for each, under the key of its last block, group by group.
    keys = [every[one[-1] - 1] for one in of_chunks]
    assert list(job.dst_spec.block_ids) == [
        made.real.manager._policy.get(key).chunk_id for key in keys
    ]
    assert made.real._jobs[number].keys == set(keys)
    made.end()
    assert spill.done
    assert (spill.kept(), spill.lost()) == (6 * chunk, 0)


def test_blocks_with_several_hashes_and_tiers_of_others_are_refused():
    made = Offloading(chunk=2)
    made.real.config.kv_group_configs[1].hashes_per_chunk = 4
    assert "several hashes" in made.tier.why_not()
    made.real.manager = SimpleNamespace()
    assert "SimpleNamespace" in made.tier.why_not()


def test_what_is_behind_the_cpu_tier_is_not_asked():
    """A lookup there would promote what it finds."""
    made = Offloading()
    made.real.manager = SimpleNamespace(primary_tier=made.real.manager)
    tier = made.tier
    assert (tier.why_not(), tier.capacity(), tier.holds(key(1))) == ("", ROOM, False)


@pytest.mark.parametrize("lazy", [True, False])
def test_simple_stores_what_fits_and_evicts_nothing_that_the_spill_needs(lazy):
    made = Simple(lazy)
    spill = made.spill(numbered(*range(1, 13)))
    stored = made.plan(spill)
    assert set(stored) == set(range(3, 13))
    assert all(spill.pool.blocks[block].ref_cnt == 1 for block in stored)
    assert made.real._in_flight_store_gpu_blocks == (set() if lazy else set(stored))
    assert not spill.done
    made.end()
    assert spill.done
    assert spill.kept() == ROOM
    assert all(spill.pool.blocks[block].ref_cnt == 0 for block in stored)
    assert made.real._in_flight_store_gpu_blocks == set()
    # A second suspension: what the first has stored of it is the tier's oldest.
    spill.pool = Pool(numbered(*range(3, 8), *range(20, 25)))
    spill.begin(cached(spill.pool))
    assert set(made.plan(spill)) == set(range(20, 25))
    made.end()
    assert spill.kept() == 10


@pytest.mark.parametrize("alone", [False, True])
def test_lazy_mode_stores_nothing_beside_a_suspension(alone):
    """In the place of what the suspension has stored; and a reset fails while it does."""
    made = Simple(lazy=True)
    made.real._gpu_block_pool = Pool(numbered(1, 2, 3, 4))
    spill = Spill(simple.SimpleTier(made.real), made.real._gpu_block_pool)
    state.attach(made.real, spill).alone = alone
    calls = []

    def lazy(output):
        calls.append(output)
        return [7], [8], [], None

    found = simple.around_store_specs(lazy, made.real, ("step",), {})
    assert found == (([], [], [], None) if alone else ([7], [8], [], None))
    assert calls == ([] if alone else ["step"])
    made.real._lazy_mode = False
    assert simple.around_store_specs(lazy, made.real, ("step",), {}) == ([7], [8], [], None)


def test_simple_stores_nothing_twice():
    made = Simple(lazy=False)
    spill = made.spill(numbered(1, 2, 3, 4))
    spill.pool.touch([spill.pool.blocks[1]])  # the connector's own store of this step
    assert set(made.plan(spill, now=(1,))) == {2, 3, 4}
    assert (spill.count.planned, spill.counts.spilled["suspend"]) == (4, 3)
    assert set(spill.counts.away) == {key(number) for number in (2, 3, 4)}
