"""vLLM's own classes of a CPU tier in a host pool, without an engine: blocks, bytes, memory."""

import itertools
import os
import random
import signal
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from harness.engines import pool_classes
from harness.engines.pool_classes import InPool
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR, HOST_POOL, HOST_POOL_FLOOR
from kvpatch.hostdevice import ledger as device_ledger
from kvpatch.patch import Transaction
from kvpatch.patches import host_copies
from kvpatch.patches.elastic_memory.regions import Regions
from kvpatch.patches.host_pool import engine, presence
from kvpatch.patches.offloading.registration import canonical
from kvpatch.pool import ledger, member
from kvpatch.pool.keeper import Keeper
from kvpatch.refusal import Refusal
from kvpatch.upstream.vllm_api import chunks_of

ROW = 1 << 18  # bytes of a chunk, all ranks
MIB = 1 << 20
ROW_PER_EXTENT = MIB // ROW


@pytest.fixture(autouse=True)
def rows():
    """The rows of the pool and of the host device's copies over vLLM's classes."""
    patches = Transaction()
    patches.apply_all(
        row
        for row in host_copies.FEATURE.at(pool_classes.RELEASE)
        if not row.id.startswith("host_copies.simple")
    )
    patches.apply_all(pool_classes.rows())
    yield
    patches.revert_to(0)


@pytest.fixture(autouse=True)
def pool(monkeypatch, tmp_path):
    """A pool of 64 MiB that nobody else has, whose extents are of 1 MiB; no thread runs."""
    monkeypatch.setenv(HOST_DEVICE.name, "64MiB")
    monkeypatch.setenv(HOST_DEVICE_DIR.name, str(tmp_path))
    monkeypatch.setenv(HOST_POOL.name, f"64MiB@test{os.getpid()}{os.urandom(4).hex()}")
    monkeypatch.setattr(Keeper, "start", lambda self: None)
    folder = presence.home()
    yield folder
    assert not folder.exists() or list(folder.iterdir()) == []
    if folder.exists():
        folder.rmdir()


class Engine(InPool):
    """An engine with a tier, whose scheduler and workers are the test."""

    def __init__(self, chunks=40, ranks=1, policy="lru", blocks=0):
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.cpu import gpu_worker
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.base = base
        self.engine_id = f"test-{os.urandom(8).hex()}"
        part = pool_classes.part(self.engine_id, chunks * ROW, ranks)
        self.regions = [
            pool_classes.region(self.engine_id, chunks, ROW, rank, ranks) for rank in range(ranks)
        ]
        # With blocks of a device, vLLM's workers pin the regions, and copy between the two.
        self.devices = [
            torch.zeros((blocks, ROW // ranks), dtype=torch.int8)
            for _ in range(ranks * bool(blocks))
        ]
        self.workers = [
            gpu_worker.CPUOffloadingWorker(canonical(Regions([device], [[0]])), 1, chunks, one)
            for device, one in zip(self.devices, self.regions, strict=False)
        ]
        self.views = []
        if not blocks:
            for one in self.regions:
                gpu_worker.pin_mmap_region(one)
            self.views = [one.create_next_worker_view(ROW // ranks) for one in self.regions]
        self.manager = CPUOffloadingManager(
            **pool_classes.by_unit(chunks), cache_policy=policy, enable_events=True
        )
        self.join(part, self.manager, self.manager)
        self.jobs = itertools.count()
        self.requests = itertools.count()

    def request(self):
        context = self.base.ReqContext(req_id=f"{next(self.requests)}")
        self.manager.on_new_request(context)
        return context

    def key(self, number):
        return self.base.make_offload_key(number.to_bytes(16, "little"), 0)

    def store(self, *numbers, complete=True):
        """Store blocks whose bytes are told by their numbers; None if the store waits."""
        context = self.request()
        output = self.manager.prepare_store([self.key(one) for one in numbers], context)
        if output is None:
            return None
        job = next(self.jobs)
        self.extents.begin(job, output.store_spec.block_ids, 1)
        stored = [int.from_bytes(bytes(key)[:16], "little") for key in output.keys_to_store]
        for number, chunk in zip(stored, output.store_spec.block_ids, strict=True):
            for view in self.views:
                view[int(chunk)] = number % 127

        def end():
            self.manager.complete_store(output.keys_to_store, context)
            self.extents.report(job, 1)
            return list(map(int, output.store_spec.block_ids))

        return end() if complete else end

    def fill(self, count):
        """Store this many blocks, an extent at a time."""
        for number in range(0, count, ROW_PER_EXTENT):
            self.put(*range(number, number + ROW_PER_EXTENT))

    def put(self, *numbers):
        """Store blocks, and wait for memory as a request does."""
        for _ in range(10):
            chunks = self.store(*numbers)
            if chunks is not None:
                return list(chunks)
            self.turn()
        raise AssertionError("the store waits for ever")

    def hit(self, number):
        return self.manager.lookup(self.key(number), self.request()) in (
            self.base.LookupResult.HIT,
            True,
        )

    def load(self, *numbers):
        """Begin to load blocks, whose bytes must be right; return what ends the load."""
        context = self.request()
        keys = [self.key(one) for one in numbers]
        spec = self.manager.prepare_load(keys, context)
        job = next(self.jobs)
        self.extents.begin(job, spec.block_ids, 1)

        def end():
            for number, chunk in zip(numbers, spec.block_ids, strict=True):
                for view in self.views:
                    assert bool((view[int(chunk)] == number % 127).all()), "wrong bytes"
            self.manager.complete_load(keys, context)
            self.extents.report(job, 1)

        return end

    def copy(self, blocks, spec, load):
        """Let every worker copy between its blocks and chunks; return the job."""
        job = next(self.jobs)
        self.extents.begin(job, spec.block_ids, len(self.workers))
        on_device = self.base.GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        for worker in self.workers:
            if load:
                assert worker.submit_load(job, spec, on_device)
            else:
                assert worker.submit_store(job, on_device, spec)
        return job

    def wait(self, job):
        """Wait for copies, and report their end."""
        for worker in self.workers:
            worker.wait({job})
            for result in worker.get_finished():
                assert result.success
                self.extents.report(result.job_id, 1)

    def check(self):
        """The kernel, the ledger, the device and the extents agree."""
        super().check()
        for one in self.regions:
            base = one._base.data_ptr()
            expected = {
                base + self.extents.place(index)[0]: self.extents.place(index)[1]
                for index in self.extents.open
            }
            ours = {
                at: size
                for at, size in registered().items()
                if base <= at < base + one.total_size_bytes
            }
            assert ours == expected

    def close(self):
        self.views.clear()
        for worker in self.workers:
            worker.shutdown()  # cleans its region up
        if not self.workers:
            for one in self.regions:
                one.cleanup()
        self.pooled.close()


def registered():
    """The ranges that are registered with the host device."""
    from kvpatch.hostdevice.copies import HostRegistration

    return HostRegistration.ranges


@pytest.fixture
def started():
    """Start engines, which end with the test."""
    engines = []

    def start(**options):
        engines.append(Engine(**options))
        return engines[-1]

    yield start
    for one in engines:
        one.close()
    assert registered() == {}


POLICIES = pytest.mark.parametrize("policy", ["lru", "arc"])


def test_a_tier_begins_with_nothing_and_without_a_name(started, pool):
    one = started(chunks=1 << 16)  # 16 GiB
    assert one.kernel() == 0
    assert registered() == {}
    shown = ledger.show(pool)
    assert shown is not None
    assert shown[1][0].owner.ceiling == (1 << 16) * ROW
    assert not Path(one.regions[0].mmap_path).exists()
    assert {path.name for path in pool.iterdir()} == {
        ledger.LIMIT,
        ledger.record_of(pool, one.engine_id).name,
    }
    one.turn(2)
    assert one.kernel() == MIB


def test_an_engine_that_starts_says_at_once_what_it_may_take(pool):
    """Another one that starts meanwhile must leave it that."""
    part = pool_classes.part(f"test-{os.urandom(8).hex()}", 3 * MIB)
    shown = ledger.show(pool)
    assert shown is not None
    assert ledger.taken(shown[1]) == (0, 3 * MIB)
    part.close()


@pytest.mark.parametrize("ranks", [1, 2])
@POLICIES
def test_what_is_stored_is_loaded_and_evicted_by_vllms_policy(started, policy, ranks):
    one = started(chunks=12, ranks=ranks, policy=policy)
    one.turn()
    assert one.store(1, 2, 3) == [0, 1, 2]
    assert one.store(4, 5, 6, 7) is None  # waits for an extent
    one.turn()
    assert one.store(4, 5, 6, 7) == [3, 4, 5, 6]
    one.load(1, 4)()
    one.turn(3)
    assert one.put(8, 9, 10, 11, 12) == [7, 8, 9, 10, 11]
    assert one.kernel() == 3 * MIB  # the whole tier
    assert len(one.store(13, 14)) == 2
    assert len([number for number in range(1, 15) if one.hit(number)]) == 12


@pytest.mark.parametrize("ranks", [1, 2])
def test_vllms_workers_copy_into_extents_and_out_of_them(started, ranks):
    """Also into extents that were given back and committed again, and while a reset comes."""
    one = started(chunks=24, ranks=ranks, blocks=8)
    blocks = list(range(8))
    held = one.kernel()
    assert held == 0
    for turn in range(4):
        for rank, device in enumerate(one.devices):
            for block in blocks:
                device[block] = (turn * 16 + block * 2 + rank) % 127
        kept = [device.clone() for device in one.devices]
        keys = [one.key(100 * turn + block) for block in blocks]
        context = one.request()
        output = one.manager.prepare_store(keys, context)
        while output is None:
            one.turn()
            output = one.manager.prepare_store(keys, context)
        if turn == 2:  # the copies of a round that a reset forgets are in flight
            with device_ledger.hold_copies():
                job = one.copy(blocks, output.store_spec, load=False)
                one.manager.reset_cache()
                one.turn(3)
                assert one.kernel() >= 2 * MIB
            one.wait(job)
            one.turn(3)
            assert one.kernel() == MIB
            continue
        one.wait(one.copy(blocks, output.store_spec, load=False))
        one.manager.complete_store(keys, context)
        for device in one.devices:
            device.zero_()
        one.wait(one.copy(blocks, one.manager.prepare_load(keys, context), load=True))
        one.manager.complete_load(keys, context)
        for device, expected in zip(one.devices, kept, strict=True):
            assert bool((device == expected).all())
        one.turn(2)
        if turn == 0:
            one.manager.reset_cache()
            one.turn(3)
            assert one.kernel() == MIB


def test_after_a_reset_the_memory_is_back_but_for_one_extent(started):
    one = started()
    one.fill(32)
    assert one.kernel() >= 8 * MIB
    end = one.load(1, 2)
    one.manager.reset_cache()
    one.turn(2)
    assert one.kernel() == MIB
    assert 0 in one.extents.open, "a load is reading it"
    one.extents.report(next(one.jobs) - 1, 1)
    del end
    assert not one.hit(1)
    one.turn()
    assert one.kernel() == MIB


def test_the_coldest_blocks_go_for_another_engine_and_routers_hear_of_it(started):
    one = started()
    one.fill(16)
    list(one.manager.take_events())
    one.load(0)()  # the first extent is the hottest
    one.keeper.member.answer()
    peer = ledger.show(presence.home())
    assert peer is not None
    other = member.join(ledger.record_of(presence.home(), "other"), 64 * MIB, peer[1][0].owner)
    (seen,) = [found for found in other.look(0, 0.0).peers if found.path == one.keeper.member.path]
    other.ask(seen, MIB)
    one.turn()
    other.ask(seen, MIB)
    one.turn(3)
    other.leave()
    gone = [number for number in range(16) if not one.hit(number)]
    assert gone
    assert len(gone) % 4 == 0
    assert 0 not in gone
    events = [event for event in one.manager.take_events() if event.removed]
    assert sorted(key for event in events for key in event.keys) == sorted(map(one.key, gone))
    assert one.keeper.evicted == len(gone)
    stats = one.manager.get_stats()
    assert stats is not None


def test_blocks_in_transfers_stay_until_they_end(started, pool):
    one = started()
    one.turn()
    assert one.store(1, 2) == [0, 1]
    end_store, end_load = one.store(3, complete=False), one.load(1)
    assert ledger.set_limit(pool, 1)
    one.turn(2)
    assert one.kernel() == MIB
    assert [one.hit(number) for number in (1, 2, 3)] == [True, False, False]
    assert one.store(4) is None  # no room, and nothing that may be evicted
    one.keeper._wake.clear()
    end_load()
    assert one.keeper._wake.is_set()
    assert one.store(4) is None  # what was loaded is evicted, and its memory is not handed out
    assert not one.hit(1)
    end_store()
    one.turn()
    assert one.kernel() == 0
    assert ledger.set_limit(pool, 64 * MIB)
    one.turn(2)


@POLICIES
def test_a_step_before_what_has_to_go_is_evicted(started, pool, policy):
    """The scheduler has the lock between two extents: their chunks are not handed out again."""
    one = started(chunks=16, policy=policy)
    one.fill(16)
    evict, stored = one.keeper._evict, []

    def step_first(index):
        one.keeper._evict = evict
        stored.append(one.store(100, 101))
        return int(evict(index))

    one.keeper._evict = step_first
    assert ledger.set_limit(pool, 2 * MIB)
    one.turn()
    assert len(stored[0]) == 2
    assert one.hit(100)
    assert one.hit(101)
    assert one.kernel() == 2 * MIB


def test_a_reset_keeps_the_keeper_out(started):
    """It goes through the policy's blocks, of which the keeper may not take one meanwhile."""
    one = started()
    one.put(1, 2)

    def reset():
        with ThreadPoolExecutor() as keeper:
            free = keeper.submit(one.pooled.lock.acquire, False).result()
        one.manager.reset_cache()
        return not free

    assert engine.after_reset(reset, one.core, (), {})


@POLICIES
@pytest.mark.parametrize("seed", range(3))
def test_a_long_life(started, pool, policy, seed):
    """Blocks that are found have their bytes, and memory is what is counted, whatever happens."""
    source = random.Random(seed)
    one = started(chunks=30, policy=policy)
    ends = []
    loaded = 0
    for _ in range(400):
        what = source.random()
        numbers = [source.randrange(36) for _ in range(source.randrange(1, 5))]
        if what < 0.4:
            end = one.store(*dict.fromkeys(numbers), complete=False)
            if end is not None:
                ends.append(end)
        elif what < 0.6:
            found = [number for number in dict.fromkeys(numbers) if one.hit(number)]
            if found:
                ends.append(one.load(*found))
                loaded += len(found)
        elif what < 0.8 and ends:
            ends.pop(source.randrange(len(ends)))()
        elif what < 0.97:
            one.turn()
        elif what < 0.975:
            while ends:
                ends.pop()()
            one.manager.reset_cache()
        else:
            ledger.set_limit(pool, source.choice([3, 5, 64, 64]) * MIB)
        assert one.extents.used == chunks_of(one.manager, "_num_allocated_{}")
    while ends:
        ends.pop()()
    assert loaded > 10
    ledger.set_limit(pool, 1)
    one.turn(3)
    assert one.kernel() == 0
    ledger.set_limit(pool, 64 * MIB)


def test_a_second_engine_with_another_size_is_refused(started, monkeypatch):
    started()
    monkeypatch.setenv(HOST_POOL.name, HOST_POOL.read().replace("64MiB", "32MiB"))
    with pytest.raises(Refusal, match="KVP345"):
        started()


def test_a_second_engine_whose_floor_the_pool_has_no_room_for_is_refused(started, monkeypatch):
    monkeypatch.setenv(HOST_POOL_FLOOR.name, "24MiB")
    started()
    started(chunks=1 << 16)
    shown = ledger.show(presence.home())
    assert shown is not None
    # No more than the tier of each.
    assert {one.owner.floor for one in shown[1]} == {40 * ROW, 24 * MIB}
    monkeypatch.setenv(HOST_POOL_FLOOR.name, "40MiB")
    with pytest.raises(Refusal, match=r"floors of .* so that not all of them .*KVP350"):
        started(chunks=1 << 16)


@pytest.mark.parametrize("size", [ROW // 2, ROW * 2])
def test_an_extent_that_is_larger_than_the_pool_is_refused(size, started, monkeypatch):
    """Nothing would ever be stored, whether or not a chunk fits."""
    monkeypatch.setenv(HOST_POOL.name, HOST_POOL.read().replace("64MiB", str(size)))
    try:
        with pytest.raises(Refusal, match="KVP346"):
            started()
    finally:
        for path in (*presence.home().iterdir(), *Path("/dev/shm").glob("vllm_offload_test-*")):
            path.unlink()


def test_a_worker_in_a_process_of_its_own_has_the_same_extents(pool):
    """And when it is killed, nothing is handed out that it has not registered."""
    from vllm.v1.kv_offload.cpu import gpu_worker
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    engine_id, chunks = f"test-{os.urandom(8).hex()}", 16
    part = pool_classes.part(engine_id, chunks * ROW, ranks=2)

    def view_of(rank):
        one = pool_classes.region(engine_id, chunks, ROW, rank, ranks=2)
        gpu_worker.pin_mmap_region(one)
        return one, one.create_next_worker_view(ROW // 2)

    theirs, ours = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _, view = view_of(1)
            os.write(ours[1], b"+")
            while os.read(theirs[0], 1) == b"w":
                view[0].numpy()[:] = 11  # torch's own threads are not forked
                os.write(ours[1], bytes([len(registered())]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(ours[1])
    first, view = view_of(0)
    assert os.read(ours[0], 1) == b"+"
    manager = CPUOffloadingManager(chunks)
    tier = InPool()
    tier.join(part, manager, manager)
    pooled = tier.pooled
    pooled.keeper.turn()
    assert pooled.extents.allocate(["a block"]) == [0]
    view[0] = 7
    os.write(theirs[1], b"w")
    assert os.read(ours[0], 1) == bytes([1])
    assert os.pread(first.fd, ROW, 0) == bytes([7]) * (ROW // 2) + bytes([11]) * (ROW // 2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert pooled.keeper.need(chunks)
    pooled.keeper.turn()
    assert "worker" in pooled.keeper.broken
    assert pooled.extents.free == ROW_PER_EXTENT - 1
    first.cleanup()
    pooled.close()
    assert registered() == {}
