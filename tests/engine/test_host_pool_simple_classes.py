"""vLLM's BlockPool of SimpleCPUOffloadConnector over extents, without an engine."""

import os
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpatch import claims, state
from kvpatch.environ import HOST_POOL
from kvpatch.patches.host_pool import connected, engine, presence, simple, simple_region
from kvpatch.patches.host_pool.tier import Pooled, around_schedule
from kvpatch.pool import ledger, member, stripes
from kvpatch.pool.extents import Extents
from kvpatch.pool.keeper import Keeper
from kvpatch.pool.member import View
from kvpatch.pool.ranks import Failed, Ranks
from kvpatch.refusal import Refusal
from kvpatch.upstream.vllm_api import region_path

BLOCKS, BLOCK = 41, 1 << 18  # the first is the null block; bytes of one
PER = 4
EXTENT = PER * BLOCK


class Ledger:
    """The part of an engine that has a pool for itself, and a limit that a test sets."""

    def __init__(self, limit):
        self.limit, self.committed, self.floor, self.counted = limit, 0, 0, True

    def take(self, size):
        if self.committed + size > self.limit:
            return False
        self.committed += size
        return True

    def give(self, size):
        self.committed -= size

    def look(self, resident, coldest, reuse):
        return View(self.limit, self.committed, [], 0)


class Memory:
    """What is committed; its bytes are gone when it is given back."""

    def __init__(self):
        self.bytes = {}  # what each block of a committed extent has

    def commit(self, offset, size):
        for chunk in range(offset // BLOCK, (offset + size) // BLOCK):
            assert chunk not in self.bytes
            self.bytes[chunk] = None

    def punch(self, offset, size):
        for chunk in range(offset // BLOCK, (offset + size) // BLOCK):
            del self.bytes[chunk]


class Tier:
    """The connector's pool over extents, with a keeper whose turns a test takes."""

    def __init__(self, limit=5 * EXTENT):
        from vllm.v1.core.block_pool import BlockPool

        self.now = 1000.0
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
        self.extents = Extents(BLOCKS - simple.NULL, BLOCK, EXTENT, lambda: self.now)
        self.memory, self.ledger = Memory(), Ledger(limit)
        workers = SimpleNamespace(register=lambda *_: None, deregister=lambda *_: None)
        evict, clock = lambda index: self.queue.evict(index), lambda: self.now
        world = self.extents, self.memory, self.ledger, workers
        self.keeper = Keeper(*world, threading.RLock(), evict, clock)
        self.planner = SimpleNamespace(cpu_block_pool=self.pool)
        self.queue = simple.put(self.planner, self.keeper)
        self.pool.enable_kv_cache_events = True
        self.keys = 0

    def turn(self, times=1):
        for _ in range(times):
            self.now += 0.1
            self.keeper.turn()
            self.keeper.evicts = False  # the next step of the scheduler

    def new(self, count):
        """Blocks that a store writes to."""
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            assert block.block_id - simple.NULL in self.memory.bytes
        return blocks

    def store(self, blocks):
        """Complete a store: the blocks are cached, and nobody uses them."""
        keys = []
        for block in blocks:
            self.keys += 1
            key = b"%08d" % self.keys + struct.pack(">I", 0)
            self.memory.bytes[block.block_id - simple.NULL] = key
            self.pool._insert_block_hash(key, block, num_tokens=16)
            keys.append(key)
        self.pool.free_blocks(blocks)
        return keys

    def find(self, key):
        return self.pool.cached_block_hash_to_block.get_one_block(key)

    def reset(self):
        return simple.around_reset(self.pool.reset_prefix_cache, self.planner, (), {})

    def check(self):
        """Every block is in use, cached, free in an extent, or without memory; one of these."""
        used = cached = 0
        for block in self.pool.blocks[simple.NULL :]:
            chunk = block.block_id - simple.NULL
            extent = self.extents.open.get(chunk // PER)
            waits = block.block_id in self.queue._cached
            if block.ref_cnt or waits:
                assert extent is not None, "a block in use has no memory"
                assert chunk in extent.held
                assert waits == (block.ref_cnt == 0)
                assert chunk in self.memory.bytes
            else:
                assert block.block_hash is None
                assert extent is None or chunk in extent.free
            used += block.ref_cnt > 0
            cached += waits
        assert self.extents.used == used + cached
        assert {chunk // PER for chunk in self.memory.bytes} == set(self.extents.open)
        self.queue.counting = True
        assert self.pool.get_num_free_blocks() == BLOCKS - 1 - used
        self.queue.counting = False


@pytest.fixture
def tier():
    """A tier that has memory for an extent, and may grow."""
    made = Tier()
    made.turn()
    return made


def test_blocks_are_handed_out_when_there_is_memory():
    tier = Tier()
    assert tier.pool.get_num_free_blocks() == 0
    tier.turn()
    assert tier.pool.get_num_free_blocks() == PER
    blocks = tier.new(PER)
    assert [block.block_id for block in blocks] == [1, 2, 3, 4]
    assert tier.pool.get_num_free_blocks() == 0
    tier.turn()
    assert tier.pool.get_num_free_blocks() >= PER
    tier.check()


def test_what_is_free_is_offered_alone_while_it_can_grow(tier):
    tier.store(tier.new(2))
    assert tier.pool.get_num_free_blocks() == PER - 2
    tier.ledger.limit = EXTENT
    tier.keeper.turn()
    assert tier.pool.get_num_free_blocks() == PER


def test_while_it_can_grow_only_a_store_that_waited_long_enough_evicts(tier):
    keys = tier.store(tier.new(PER))
    assert tier.pool.get_num_free_blocks() == 0
    assert all(tier.find(key) is not None for key in keys)
    for _ in range(30):  # somebody asks in every step, and no memory comes
        tier.now += 0.1
        if tier.pool.get_num_free_blocks():
            break
    assert tier.pool.get_num_free_blocks() == PER
    (block,) = tier.new(1)
    assert block.block_id == 1
    assert tier.find(keys[0]) is None
    assert len(tier.pool.take_events()) == 1
    tier.check()


def test_a_full_pool_evicts_in_vllms_order():
    tier = Tier(limit=2 * EXTENT)
    keys = []
    while len(keys) < 2 * PER:
        tier.turn()
        keys += tier.store(tier.new(min(PER, tier.pool.get_num_free_blocks())))
    tier.turn()
    first = tier.find(keys[0])
    tier.pool.touch([first])  # used again: it goes last
    tier.pool.free_blocks([first])
    assert tier.pool.get_num_free_blocks() == 2 * PER
    taken = tier.new(3)
    assert [block.block_id for block in taken] == [2, 3, 4]
    assert tier.find(keys[0]) is first
    assert [tier.find(key) for key in keys[1:4]] == [None] * 3
    tier.check()


@pytest.mark.parametrize("begin", [around_schedule, simple.around_locked])
@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [
        ({"_room": False}, lambda tier: setattr(tier.keeper, "_room", True)),  # by the thread
        ({"broken": "it failed"}, lambda tier: setattr(tier.keeper, "broken", "")),
        ({"_room": False}, lambda tier: setattr(tier, "now", tier.now + 1)),  # nobody has looked
    ],
)
def test_a_step_can_take_all_that_it_was_offered_although_the_tier_grows(
    tier, before, meanwhile, begin
):
    scheduler = SimpleNamespace()
    state.attach(scheduler, Pooled(tier.extents, tier.keeper, tier.keeper.lock, 1))
    tier.store(tier.new(2))
    vars(tier.keeper).update(before)
    assert tier.pool.get_num_free_blocks() == PER
    meanwhile(tier)
    tier.store([*tier.new(3), *tier.new(1)])
    assert begin(tier.pool.get_num_free_blocks, scheduler, (), {}) == 0, "the next one waits"
    tier.check()


def test_more_than_there_is_is_nobodys(tier):
    with pytest.raises(MemoryError, match="5 CPU blocks"):
        tier.queue.popleft_n(5)
    tier.check()
    assert tier.extents.free == PER


def test_a_lower_limit_evicts_what_nobody_uses():
    tier = Tier()
    keys = []
    for _ in range(4):
        tier.turn(2)
        keys += tier.store(tier.new(PER))
    held = tier.find(keys[0])
    tier.pool.touch([held])
    tier.ledger.limit = EXTENT
    tier.turn(3)
    tier.check()
    assert tier.find(keys[0]) is held, "a block in use was evicted"
    assert held.block_id - simple.NULL in tier.memory.bytes
    tier.pool.free_blocks([held])
    tier.turn(3)
    assert tier.ledger.committed <= EXTENT
    tier.check()


def test_a_block_whose_extent_has_to_go_is_not_handed_out(tier):
    tier.store(tier.new(PER))
    tier.turn()
    tier.ledger.limit = 0
    with tier.keeper.lock:
        tier.extents.drain(0)
        with pytest.raises(MemoryError):  # also where nobody has looked how many there are
            tier.queue.popleft_n(tier.extents.free + 1)
        assert tier.pool.get_num_free_blocks() == tier.extents.free
        assert not tier.queue._cached
    tier.turn(2)
    tier.check()


def test_a_reset_gives_all_of_it_back():
    tier = Tier()
    for _ in range(4):
        tier.turn(2)
        tier.store(tier.new(PER))
    assert tier.reset()
    assert tier.extents.used == 0
    tier.turn(2)
    assert tier.ledger.committed <= EXTENT
    tier.check()


def test_a_tier_in_use_is_not_reset(tier):
    (block,) = tier.new(1)
    assert not tier.reset()
    assert block.block_id - simple.NULL in tier.extents.open[0].held
    tier.check()


def test_blocks_without_memory_are_not_shown_as_used():
    tier = Tier()
    count = lambda: BLOCKS - tier.pool.get_num_free_blocks()  # noqa: E731, as vLLM's gauge
    assert simple.around_count(count, tier.planner, (), {}) == 1
    tier.turn()
    tier.new(3)
    assert simple.around_count(count, tier.planner, (), {}) == 4
    assert not tier.queue.counting


def test_a_block_stored_twice_is_free_again(tier):
    """vLLM lets the second one go without a hash."""
    blocks = tier.new(2)
    tier.pool.free_blocks(blocks)
    assert tier.extents.used == 0
    tier.check()


def test_nothing_is_evicted_while_vllm_looks():
    tier = Tier()
    scheduler = SimpleNamespace()
    state.attach(scheduler, Pooled(tier.extents, tier.keeper, tier.keeper.lock, 1))

    def taken_by_another():
        with ThreadPoolExecutor() as pool:
            return pool.submit(tier.keeper.lock.acquire, False).result()

    assert not simple.around_locked(taken_by_another, scheduler, (), {})
    assert simple.around_locked(taken_by_another, SimpleNamespace(), (), {})


class Play(RuleBasedStateMachine):
    """Stores, hits, copies held, limits and resets in any order."""

    def __init__(self):
        super().__init__()
        self.tier = Tier()
        self.under_way = []
        self.held = []
        self.keys = []

    @rule(wanted=st.integers(1, 9))
    def begin_a_store(self, wanted):
        count = min(wanted, self.tier.pool.get_num_free_blocks())
        if count:
            self.under_way.append(self.tier.new(count))

    @precondition(lambda self: self.under_way)
    @rule(lost=st.booleans())
    def end_a_store(self, lost):
        blocks = self.under_way.pop(0)
        if lost:
            self.tier.pool.free_blocks(blocks)
        else:
            self.keys += self.tier.store(blocks)

    @precondition(lambda self: self.keys)
    @rule(number=st.integers(0, 1 << 16))
    def begin_a_load(self, number):
        key = self.keys[number % len(self.keys)]
        block = self.tier.find(key)
        if block is not None:
            assert self.tier.memory.bytes[block.block_id - simple.NULL] == key
            self.tier.pool.touch([block])
            self.held.append((key, block))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 1 << 16))
    def end_a_load(self, number):
        key, block = self.held.pop(number % len(self.held))
        assert self.tier.memory.bytes[block.block_id - simple.NULL] == key
        self.tier.pool.free_blocks([block])

    @rule()
    def look(self):
        self.tier.turn()

    @rule(extents=st.integers(0, 10))
    def move_the_limit(self, extents):
        self.tier.ledger.limit = extents * EXTENT

    @rule()
    def reset(self):
        assert self.tier.reset() == (not self.under_way and not self.held)

    @invariant()
    def all_is_well(self):
        self.tier.check()

    def teardown(self):
        for blocks in self.under_way:
            self.tier.pool.free_blocks(blocks)
        for _, block in self.held:
            self.tier.pool.free_blocks([block])
        self.tier.ledger.limit = 0
        self.tier.turn(6)
        assert self.tier.ledger.committed == 0
        assert not self.tier.memory.bytes


TestPlay = Play.TestCase
TestPlay.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


# The workers' side


@pytest.fixture
def home(monkeypatch):
    folder = Path(f"/dev/shm/kvpatch-test-simple-{os.getpid()}-{os.urandom(4).hex()}")
    monkeypatch.setattr(simple_region.presence, "home", lambda: folder)
    monkeypatch.setattr(simple_region, "region_path", lambda name: folder / f"{name}.mmap")
    folder.mkdir(mode=0o700)
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


class Device:
    """What is registered with a device, as CUDA would take it: each range once."""

    def __init__(self):
        self.ranges = {}
        self.room = 1 << 30

    def pin(self, tensor):
        if len(self.ranges) >= self.room:
            raise RuntimeError("cudaHostRegister failed")
        assert tensor.data_ptr() not in self.ranges
        self.ranges[tensor.data_ptr()] = tensor.nbytes

    def cudaHostUnregister(self, address):  # noqa: N802
        return 0 if self.ranges.pop(address, None) else 1


@pytest.fixture
def device(monkeypatch):
    from vllm.v1.simple_kv_offload import cuda_mem_ops

    made = Device()
    cuda = SimpleNamespace(cuda=SimpleNamespace(cudart=lambda: made))
    monkeypatch.setattr(cuda_mem_ops, "torch", cuda)
    return made


class Workers:
    """Workers that have mapped a tier, and their engine's memory."""

    def __init__(self, home, device, ranks):
        record = ledger.record_of(home, "one")
        record.touch(0o600)
        (home / "one.mmap").touch(0o600)
        self.listening = Ranks(ledger.socket_of(record))
        caches = {"a": torch.zeros((9, 4096), dtype=torch.int8), "b": torch.zeros((9, 2, 4096))}
        self.handlers = [self.handler(rank, ranks) for rank in range(ranks)]
        self.every = [simple_region.Shared(one, device.pin) for one in self.handlers]
        self.tensors = [one.map(caches, BLOCKS) for one in self.every]
        told = [one.about for one in self.listening.accept(ranks)]
        file = os.open(home / "one.mmap", os.O_RDWR)
        self.memory, self.extents = lay_out(file, 1 << 20, told)

    def handler(self, rank, ranks):
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="one"),
            parallel_config=SimpleNamespace(rank=rank, world_size=ranks),
        )
        return SimpleNamespace(vllm_config=config)

    def end(self):
        self.tensors.clear()
        self.listening.close()
        self.memory.close()
        while self.every:
            self.every.pop().close()


def lay_out(file, extent, told):
    pool = SimpleNamespace(num_gpu_blocks=BLOCKS)
    return connected.SimpleTier(SimpleNamespace(cpu_block_pool=pool)).lay_out(file, extent, told)


@pytest.fixture
def workers(home, device):
    started = []

    def start(ranks=1):
        started.append(Workers(home, device, ranks))
        return started[-1]

    yield start
    for one in started:
        one.end()
    assert device.ranges == {}, "it is registered still"


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_have_a_view_of_each_region(workers, ranks):
    made = workers(ranks)
    extents = made.extents
    assert extents.chunk_bytes == ranks * (4096 + 2 * 4 * 4096)
    for index in range(extents.count):
        made.memory.commit(*extents.place(index))
    for number, found in enumerate(made.tensors):
        assert found["a"].shape == (BLOCKS, 4096)
        assert found["b"].shape == (BLOCKS, 2, 4096)
        assert found["b"].dtype == torch.float32
        for block in range(1, BLOCKS):
            found["a"][block] = block
            found["b"][block] = number * 1000 + block
    assert made.memory.committed == extents.chunks * extents.chunk_bytes
    for number, found in enumerate(made.tensors):
        for block in range(1, BLOCKS):
            assert bool((found["a"][block] == block).all())
            assert bool((found["b"][block] == number * 1000 + block).all())


def test_a_connector_that_shuts_down_deregisters_all(workers, device):
    made = workers()
    made.listening.register(*made.extents.place(0))
    connector = SimpleNamespace(worker_handler=made.handlers[0])
    state.attach(connector.worker_handler, made.every.pop())
    simple_region.around_shutdown(lambda: None, connector, (), {})
    assert device.ranges == {}
    assert state.find(connector.worker_handler, simple_region.Shared) is None
    simple_region.around_shutdown(lambda: None, connector, (), {})  # again is no fault


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_extent_is_registered_region_by_region(workers, device, ranks):
    made = workers(ranks)
    place = made.extents.place(1)
    made.listening.register(*place)
    assert len(device.ranges) == 2 * ranks
    assert sum(device.ranges.values()) == place[1]
    made.listening.deregister(*place)
    assert device.ranges == {}
    made.listening.register(*place)  # until they end


def test_a_device_that_registers_one_region_only_has_none(workers, device):
    made = workers()
    device.room = 1
    with pytest.raises(Failed):
        made.listening.register(*made.extents.place(0))
    assert device.ranges == {}
    device.room = 2
    made.listening.register(*made.extents.place(0))
    assert len(device.ranges) == 2


@pytest.mark.parametrize(
    ("others", "what"),
    [
        ([stripes.pack((8192,))], "different regions"),
        ([b"nonsense of 9b"], "different regions"),
        ([], "different numbers of blocks"),
    ],
)
def test_workers_that_do_not_agree_are_seen(tmp_path, others, what):
    with (tmp_path / "tier").open("wb") as file, pytest.raises(Failed, match=what):
        lay_out(file.fileno(), EXTENT, [stripes.pack((4096,)), *others])


# The engine's side


class SimpleCPUOffloadConnector(SimpleNamespace):
    """vLLM's, by its name."""


class Starting:
    """An engine that starts, in a pool of its own."""

    def __init__(self, monkeypatch):
        self.engine_id = f"test-{os.urandom(8).hex()}"
        self.path = region_path(self.engine_id)
        self.parallel_config = SimpleNamespace(rank=0, world_size=1)
        self.model_config = SimpleNamespace(served_model_name="a model")
        self.kv_transfer_config = SimpleNamespace(
            engine_id=self.engine_id,
            kv_connector="SimpleCPUOffloadConnector",
            kv_connector_module_path=None,
            kv_connector_extra_config={"cpu_bytes_to_use": BLOCKS * BLOCK},
        )
        self.enter = lambda pool: monkeypatch.setenv(
            HOST_POOL.name, f"64MiB@{self.engine_id[5:]}{pool}"
        )
        self.enter("")

    def part(self):
        return engine.Part(self)


@pytest.fixture
def starting(monkeypatch):
    made = Starting(monkeypatch)
    yield made
    presence.home().rmdir()
    assert not made.path.exists()


def test_an_engine_that_was_killed_while_it_started_starts_again(starting):
    pid = os.fork()
    if pid == 0:
        try:
            _part = starting.part()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    starting.part().close()


def test_the_file_of_a_starting_engine_is_not_another_pools(starting):
    first = starting.part()
    starting.enter("another")
    with pytest.raises(Refusal, match=r"another engine of this process .*would share .*KVP413"):
        starting.part()
    assert starting.path.exists()
    starting.enter("")
    first.close()


def test_a_file_that_nobody_claims_stays_and_its_engine_id_is_refused(starting):
    starting.path.touch(0o600)
    for mode, said in ((0o600, "already exists, .* remove the file .*KVP413"), (0o644, "KVP416")):
        starting.path.chmod(mode)
        with pytest.raises(Refusal, match=said):
            starting.part()
    starting.path.unlink()
    starting.part().close()


def test_the_name_is_free_after_a_refusal(starting, monkeypatch):
    def lingers(*given):
        raise member.Lingers("it lingers")

    with monkeypatch.context() as patched, pytest.raises(Refusal, match="KVP347") as _kept:
        patched.setattr(member, "join", lingers)
        starting.part()
    starting.part().close()


def test_the_name_is_free_when_an_engine_has_started(starting):
    part = starting.part()
    worker = simple_region.Shared(SimpleNamespace(vllm_config=starting), None)
    worker.map({"a": torch.zeros((9, BLOCK), dtype=torch.int8)}, BLOCKS)
    connector = SimpleCPUOffloadConnector(scheduler_manager=Tier().planner)
    core = Starting.__new__(Starting)
    core.scheduler = SimpleNamespace(connector=connector)
    part.begin(core)
    assert not starting.path.exists()
    claims.take("tier", starting.engine_id).release()
    worker.close()
    state.find(core, Pooled).close()
