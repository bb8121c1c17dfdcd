"""Completion of SimpleCPUOffloadConnector's copies, their counts, and the memory they touch."""

from types import SimpleNamespace

import pytest
from fakes import module
from test_simple_refusals import APART, TOGETHER, Placed, Plan, plan_of  # noqa: F401

from kvpatch import state
from kvpatch.patches.simple_offload import lifetime, metrics, registration
from kvpatch.patches.simple_offload.eviction import Lazy
from kvpatch.refusal import Refusal
from kvpatch.telemetry.counters import Totals
from kvpatch.upstream.connectors import SIMPLE


def scheduler(stores=False, above=None, **fields):
    made = SimpleNamespace(**{"_reqs_to_load": {}, "has_pending_stores": lambda: stores, **fields})
    if above is not None:
        state.attach(made, Lazy(SimpleNamespace(above_cap=above)))
    return made


@pytest.mark.parametrize(
    ("one", "waits"),
    [
        (scheduler(), False),
        (scheduler(stores=True), True),
        (scheduler(_reqs_to_load={"a": 1}), True),
        (scheduler(_abandoned_reqs_to_load={"a": 1}), True),
        (scheduler(_abandoned_reqs_to_load={}), False),
        (scheduler(above=0), False),
        (scheduler(above=2), True),
    ],
)
def test_an_idle_engine_steps_while_a_copy_or_a_trim_is_to_come(one, waits):
    assert lifetime.waits_for_copies(one) is waits
    connector = SimpleNamespace(scheduler_manager=one)
    assert lifetime.around_pending_work(lambda: False, connector, (), {}) is waits
    assert lifetime.around_pending_work(lambda: True, connector, (), {}) is True


def test_the_side_of_the_workers_asks_for_no_steps():
    connector = SimpleNamespace(scheduler_manager=None)
    assert lifetime.around_pending_work(lambda: False, connector, (), {}) is False


def test_at_the_end_queued_copies_are_launched_then_awaited_then_vllm_goes_on():
    order = []
    backend = SimpleNamespace(shutdown=lambda: order.append("launched"))
    worker = SimpleNamespace(_backend=backend, _flush_and_sync_all=lambda: order.append("awaited"))
    connector = SimpleNamespace(worker_handler=worker)

    def shutdown():
        order.append("vllm")
        return "done"

    assert lifetime.around_shutdown(shutdown, connector, (), {}) == "done"
    assert order == ["launched", "awaited", "vllm"]


@pytest.mark.parametrize("worker", [None, SimpleNamespace(_backend=None)])
def test_without_copies_there_is_nothing_to_wait_for(worker):
    connector = SimpleNamespace(worker_handler=worker)
    assert lifetime.around_shutdown(lambda: "done", connector, (), {}) == "done"


def counted(tensors, ranks=1):
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_tensors=tensors, num_blocks=4),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks)),
    )


@pytest.mark.parametrize(
    ("tensors", "ranks", "size"),
    [
        ([SimpleNamespace(size=64), SimpleNamespace(size=128)], 1, 48),
        ([SimpleNamespace(size=64), SimpleNamespace(size=128)], 3, 144),
        ([SimpleNamespace(size=64, block_stride=16), SimpleNamespace(size=96)], 1, 16),
        ([SimpleNamespace(size=64), SimpleNamespace(size=96, block_stride=16)], 1, 16),
        ([SimpleNamespace(size=64, block_stride=0)] * 2, 1, 32),
    ],
)
def test_a_block_is_counted_over_all_layers_and_ranks(tensors, ranks, size):
    assert metrics.block_bytes(counted(tensors, ranks)) == size


def test_a_steps_store_and_load_are_counted(monkeypatch):
    one, moved = counted([SimpleNamespace(size=64)]), []
    meta = SimpleNamespace(store_gpu_blocks=[1, 2, 3], load_gpu_blocks=[7])
    assert metrics.around_plan(lambda output: meta, one, ("step",), {}) is meta
    totals = state.attach(one, Totals())
    monkeypatch.setattr(Totals, "moved", lambda self, *what: moved.append((self, *what)))
    assert metrics.around_plan(lambda output: meta, one, ("step",), {}) is meta
    assert moved == [(totals, "stored", 1, 48, SIMPLE), (totals, "loaded", 1, 16, SIMPLE)]
    meta.store_gpu_blocks = []
    metrics.around_plan(lambda output: meta, one, ("step",), {})
    assert moved[2:] == [(totals, "loaded", 1, 16, SIMPLE)]
    with totals.fuse:
        raise ValueError("an error of counting")
    assert metrics.around_plan(lambda output: meta, one, ("step",), {}) is meta
    assert len(moved) == 3


class Region(SimpleNamespace):
    def data_ptr(self):
        return self.address


@pytest.fixture
def found(monkeypatch):
    """Two regions of eight blocks; ``torch`` changes nothing."""
    module(monkeypatch, "torch", from_dlpack=lambda region: region)
    regions = [Region(address=64, shape=(8, 16)), Region(address=640, shape=(8, 32))]
    asked = []

    def find(caches, groups, blocks):
        asked.append((caches, groups, blocks))
        return SimpleNamespace(tensors=regions, block_bytes=48)

    monkeypatch.setattr(registration, "find_regions", find)
    return SimpleNamespace(regions=regions, asked=asked)


def spec(kind):
    return type(kind, (), {})()


def worker(kind="FullAttentionSpec", capacity=480, blocks=10):
    groups = [
        SimpleNamespace(kv_cache_spec=spec("FullAttentionSpec"), layer_names=["a"]),
        SimpleNamespace(kv_cache_spec=spec(kind), layer_names=["b"]),
    ]
    plan = SimpleNamespace(kv_cache_groups=groups, num_blocks=8)
    return SimpleNamespace(kv_cache_config=plan, cpu_capacity_bytes=capacity, num_cpu_blocks=blocks)


def register(one, memory=None):
    """Let vLLM register what it is given, or other memory."""

    def itself(caches):
        one.gpu_kv_caches = memory or caches

    registration.around_register(itself, one, ("caches",), {})


def test_every_region_is_registered_by_itself(plan_of, found):  # noqa: F811
    plan_of(10)
    one = worker()
    register(one)
    assert one.gpu_kv_caches == {"region0": found.regions[0], "region1": found.regions[1]}
    assert found.asked == [("caches", [["a"], ["b"]], 8)]
    plan_of(1)
    register(worker(capacity=47, blocks=1))  # a tier smaller than a block has one


@pytest.mark.parametrize(
    ("one", "code"),
    [
        (worker(kind="OtherSpec"), "KVP406"),
        (worker(capacity=481 + 48), "KVP411"),
        (worker(blocks=11), "KVP411"),
    ],
    ids=["another kind", "a tier of other blocks", "registered with other blocks"],
)
def test_a_registration_that_does_not_fit(plan_of, found, one, code):  # noqa: F811
    plan_of(10)
    with pytest.raises(Refusal, match=code):
        register(one)
    assert hasattr(one, "gpu_kv_caches") is (one.num_cpu_blocks == 11)


@pytest.mark.parametrize(
    "registered",
    [
        [(64, (8, 16))],
        [(640, (8, 32)), (64, (8, 16))],
        [(64, (8, 16)), (640, (8, 16))],
        [(64, (8, 16)), (641, (8, 32))],
    ],
    ids=["one left out", "another order", "another shape", "another address"],
)
def test_what_vllm_registers_is_what_was_found(plan_of, found, registered):  # noqa: F811
    plan_of(10)
    memory = {str(address): Region(address=address, shape=shape) for address, shape in registered}
    with pytest.raises(Refusal, match="KVP410"):
        register(worker(), memory)


@pytest.mark.parametrize("outside", [0, 1])
def test_one_region_outside_is_enough_to_refuse(plan_of, monkeypatch, outside):  # noqa: F811
    plan_of(1)
    monkeypatch.setattr(registration, "on_kvcached", lambda region: region.inside)
    one = SimpleNamespace(kv_cache_config=APART, cpu_capacity_bytes=32, num_cpu_blocks=1)
    one.gpu_kv_caches = {n: SimpleNamespace(shape=(8, 16), inside=n != outside) for n in range(2)}
    with pytest.raises(Refusal, match="KVP410"):
        registration.around_register_placed(lambda caches: None, one, ({},), {})


def test_a_placed_plan_is_checked_for_its_kinds_and_its_tier(plan_of, monkeypatch):  # noqa: F811
    plan_of(1)
    monkeypatch.setattr(registration, "on_kvcached", lambda region: True)
    groups = (SimpleNamespace(kv_cache_spec=spec("OtherSpec")),)
    one = SimpleNamespace(
        kv_cache_config=Plan(APART.kv_cache_tensors, kv_cache_groups=groups),
        cpu_capacity_bytes=32,
        num_cpu_blocks=2,
    )
    one.gpu_kv_caches = {"a": SimpleNamespace(shape=(8, 32))}
    with pytest.raises(Refusal, match="KVP406"):
        registration.around_register_placed(pytest.fail, one, ({},), {})
    one.kv_cache_config = APART
    with pytest.raises(Refusal, match="KVP411"):
        registration.around_register_placed(lambda caches: None, one, ({},), {})


def test_a_registration_that_fails_leaves_the_plan_as_it_was(monkeypatch):
    one = SimpleNamespace(kv_cache_config=APART)
    with pytest.raises(ZeroDivisionError):
        registration.around_register_placed(lambda caches: 1 / 0, one, ({},), {})
    assert one.kv_cache_config is APART


def test_one_kind_that_lies_together_is_enough_for_one_allocation():
    mixed = Plan([*TOGETHER.kv_cache_tensors, *APART.kv_cache_tensors])
    assert registration.layer_by_layer(mixed) is mixed
    mixed = Plan([*APART.kv_cache_tensors, *TOGETHER.kv_cache_tensors])
    assert registration.layer_by_layer(mixed) is mixed
    nearly = Plan([Placed(100, ["a"], 8 * 16 - 1, 16)])
    assert registration.layer_by_layer(nearly) is nearly
    exactly = Plan([Placed(128, ["a"], 128, 16, offset=7)])
    assert registration.layer_by_layer(exactly).kv_cache_tensors == [Placed(128, ["a"], 128, 16)]
