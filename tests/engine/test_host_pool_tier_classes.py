"""vLLM's own tier classes with the CPU tier in a host pool and a disk behind it, without an engine.

What a disk reads from or writes into while the pool takes it back stays until the disk has ended.
"""

import os
import threading

import numpy as np
import pytest

from harness.engines import pool_classes
from harness.engines.pool_classes import InPool
from harness.engines.tier_classes import ROW, Tiers, arguments, rows_of
from kvpatch.environ import HOST_POOL, TIER_PATIENCE
from kvpatch.patch import Transaction
from kvpatch.patches import secondary_tiers
from kvpatch.patches.host_pool import engine, presence
from kvpatch.patches.secondary_tiers import block_files, fingerprint
from kvpatch.pool import ledger
from kvpatch.pool.keeper import Keeper

PER = 4  # chunks of an extent
EXTENT = PER * ROW


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """The rows of the pool and of the tiers over vLLM's classes; revert one to show its fault."""
    patches = Transaction()
    patches.apply_all(pool_classes.rows("pin"))
    patches.apply_all(secondary_tiers.FEATURE.at(pool_classes.RELEASE))
    monkeypatch.setattr(fingerprint, "_described", "one layout")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    yield patches
    patches.revert_to(0)


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    """A pool of 64 extents that nobody else has; no thread runs."""
    monkeypatch.setenv(HOST_POOL.name, f"{64 * EXTENT}@test{os.getpid()}{os.urandom(4).hex()}")
    monkeypatch.setenv(TIER_PATIENCE.name, "0.5")
    monkeypatch.setattr(engine, "EXTENT", EXTENT)
    monkeypatch.setattr(engine, "_SMALLEST", EXTENT)
    monkeypatch.setattr(Keeper, "start", lambda self: None)
    folder = presence.home()
    yield folder
    for path in folder.iterdir():  # of an engine that kept its memory
        path.unlink()
    folder.rmdir()


class PooledTiers(InPool, Tiers):
    """A CPU tier in the pool with a disk behind it, stepped as the scheduler steps them."""

    def __init__(self, folder, blocks):
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        self.base = base
        self._requests = 0
        given = arguments(folder, blocks=blocks)
        part = pool_classes.part(given[0].engine_id, blocks * ROW)
        self.regions = [pool_classes.region(given[0].engine_id, blocks, ROW)]
        self.manager = TieringOffloadingSpec(*given).get_manager()
        self.primary = self.manager.primary_tier
        self.tier = self.manager.secondary_tiers[0]
        self.join(part, self.manager, self.primary)

    def step(self):
        self.pooled.promotions = 0
        super().step()
        self.turn()

    def store(self, *numbers, ended=False):
        """Store blocks, block n full of bytes n, and wait for memory as a request does."""
        self.begin(*numbers)()

    def begin(self, *numbers):
        """Begin to store blocks; return what completes it."""
        context = self.request()
        keys = [self.key(number) for number in numbers]
        output = None
        for _ in range(10):
            output = self.manager.prepare_store(keys, context)
            if output is not None:
                break
            self.turn()
        assert output is not None, "the store waits for ever"
        for key, chunk in zip(output.keys_to_store, rows_of(output.store_spec), strict=True):
            np.asarray(self.primary.get_kv_memoryview())[int(chunk)] = key[31]

        def complete():
            self.manager.complete_store(output.keys_to_store, context)
            self.manager.on_request_finished(context)

        return complete

    def rest(self):
        """Let the disk do all that it was asked to."""
        self.tier.drain_jobs()
        self.step()
        self.step()  # in one that looked before, nothing is asked again

    def close(self):
        try:
            self.manager.shutdown()
        finally:
            self.regions[0].cleanup()
            self.pooled.close()


@pytest.fixture
def tiers(tmp_path):
    made = []

    def make(blocks=24):
        made.append(PooledTiers(tmp_path / "disk", blocks))
        return made[-1]

    yield make
    for one in made:
        if one.pooled._process is not None:
            one.close()


class Held:
    """Calls to the disk that wait until they are let go."""

    def __init__(self):
        self.began, self.go_on = threading.Event(), threading.Event()

    def before(self, call):
        def held(*args):
            self.began.set()
            assert self.go_on.wait(60)
            return call(*args)

        return held


@pytest.fixture
def held():
    made = Held()
    yield made
    made.go_on.set()


def test_what_comes_back_from_a_disk_waits_for_memory(tiers):
    """Of 12 blocks all come back, though memory for 4 is there when they are asked for."""
    one = tiers()
    numbers = tuple(range(1, 13))
    one.store(*numbers)
    one.rest()
    one.turn(2)
    assert one.kernel() >= 3 * EXTENT
    one.forget()
    one.turn(2)
    assert one.kernel() == EXTENT
    assert one.find(*numbers) == list(numbers)
    assert one.keeper.evicted == 0


def test_a_pool_that_is_full_is_waited_for_no_longer_than_it_may_grow(tiers, pool):
    one = tiers()
    one.store(1, 2, 3, 4, 5, 6, 7, 8)
    one.rest()
    one.forget()
    assert ledger.set_limit(pool, EXTENT)
    one.turn(3)
    assert one.kernel() == EXTENT
    found = one.find(1, 2, 3, 4, 5, 6, 7, 8)
    assert found is not None
    assert found == [1, 2, 3, 4, 5, 6, 7, 8][: len(found)]
    assert one.kernel() <= EXTENT


def stays_until_it_has(one, pool, held):
    """Blocks 1 and 2, which the disk has in its hands, are there until it has ended."""
    assert ledger.set_limit(pool, 1)
    one.turn(3)
    assert one.kernel() == EXTENT
    assert one.extents.free == 0
    held.go_on.set()
    one.rest()
    one.turn(2)
    assert one.kernel() == 0
    assert ledger.set_limit(pool, 64 * EXTENT)
    one.turn()
    assert one.find(1, 2) == [1, 2]


def test_what_a_disk_stores_from_stays_until_it_has(tiers, pool, held, monkeypatch):
    monkeypatch.setattr(block_files, "seal", held.before(block_files.seal))
    one = tiers()
    one.store(1, 2)
    assert held.began.wait(60)
    stays_until_it_has(one, pool, held)


def test_what_a_disk_promotes_into_stays_until_it_has(tiers, pool, held, monkeypatch):
    one = tiers()
    one.store(1, 2)
    one.rest()
    one.forget()
    one.turn(2)
    monkeypatch.setattr(block_files, "_read", held.before(block_files._read))
    assert one.find(1, 2, within=0.0) is None
    context = one.request()
    while not held.began.is_set():
        assert one.answered(context, (1, 2)) is None
        one.step()
    stays_until_it_has(one, pool, held)


def test_a_store_that_completes_where_memory_has_to_go_reaches_the_disk(tiers, pool):
    """The disk reads it as soon as it has completed: it may not be evicted before."""
    one = tiers()
    complete = one.begin(1, 2)
    assert ledger.set_limit(pool, 1)
    one.turn()
    assert one.extents.draining() == [0]
    complete()
    one.rest()
    one.turn(2)
    assert one.kernel() == 0
    assert one.file(1).exists()
    assert one.file(2).exists()


def test_a_disk_that_hangs_through_a_shutdown_writes_no_zeros(tiers, pool, held, monkeypatch):
    """A block that was given back would be zeros, with a checksum that is right for them."""
    monkeypatch.setattr(block_files, "seal", held.before(block_files.seal))
    one = tiers()
    one.store(5)
    assert held.began.wait(60)
    one.close()
    shown = ledger.show(pool)
    assert shown is not None
    assert shown[1][0].owner.committed == EXTENT  # until the process has ended
    held.go_on.set()
    for thread in one.tier._pool._threads:
        thread.join(60)
    assert set(one.file(5).read_bytes()[:ROW]) == {5}


def test_a_disk_that_has_ended_lets_all_memory_go(tiers, pool):
    one = tiers()
    one.store(5)
    one.close()
    assert ledger.show(pool) is None
    assert list(pool.iterdir()) == []
