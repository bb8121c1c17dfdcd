"""What SimpleCPUOffloadConnector's memory must be, by the sentence that refuses it."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from fakes import module, namespace

from kvpatch.patches.simple_offload import cpu_pool, registration
from kvpatch.refusal import Refusal


def test_a_cpu_pool_on_kvcacheds_memory():
    elastic = namespace(block_pool__kv_cache_manager=object())
    assert refused(cpu_pool.around_cpu_coordinator, lambda: elastic, None, (), {}) == (
        "the connector's CPU blocks are in kvcached's pool, because allocating and freeing CPU "
        "blocks would map and unmap pages of the GPU; report this with the log above, or set "
        "KVPATCH=0. [KVP409]"
    )


@pytest.mark.parametrize("fails", [False, True])
def test_only_the_coordinator_of_cpu_blocks_is_left_native(fails):
    native = SimpleNamespace(block_pool=SimpleNamespace())
    setups = []

    def build():
        cpu_pool.around_setup(lambda: setups.append("cpu"), None, (), {})
        return 1 / 0 if fails else native

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        assert cpu_pool.around_cpu_coordinator(build, None, (), {}) is native
    cpu_pool.around_setup(lambda: setups.append("gpu"), None, (), {})
    assert setups == ["gpu"]


@pytest.fixture
def plan_of(monkeypatch):
    """Let the scheduler plan for a number of CPU blocks."""

    def plan(blocks):
        planned = SimpleNamespace(num_blocks=blocks)
        scheduler = SimpleNamespace(_derive_cpu_config=lambda config, capacity: planned)
        name = "vllm.v1.simple_kv_offload.manager"
        module(monkeypatch, name, SimpleCPUOffloadScheduler=scheduler)

    return plan


def refused(action, *given):
    """The sentence that refuses a call of a wrapper."""
    with pytest.raises(Refusal) as error:
        action(*given)
    return str(error.value).removeprefix("kvpatch refuses to start vLLM: ")


def test_other_cpu_blocks_in_the_worker_than_in_the_scheduler(plan_of):
    plan_of(200)
    worker = SimpleNamespace(kv_cache_config=None, cpu_capacity_bytes=1)
    registration.check_tier(worker, 200)
    assert refused(registration.check_tier, worker, 100) == (
        "the CPU tier has 100 blocks in the worker and 200 in the scheduler, because blocks would "
        "be copied past the end of the tier, or never; report this with your command line, or set "
        "KVPATCH=0. [KVP411]"
    )


def test_other_memory_than_the_regions(plan_of, monkeypatch):
    plan_of(1)
    module(monkeypatch, "torch", from_dlpack=lambda region: region)
    region = SimpleNamespace(data_ptr=lambda: 64, shape=(8, 16))
    found = SimpleNamespace(tensors=[region], block_bytes=16)
    monkeypatch.setattr(registration, "find_regions", lambda *arguments: found)
    config = SimpleNamespace(kv_cache_groups=[], num_blocks=8)
    worker = SimpleNamespace(kv_cache_config=config, cpu_capacity_bytes=16, num_cpu_blocks=1)

    def register(kv_caches):
        worker.gpu_kv_caches = kv_caches

    registration.around_register(register, worker, ({},), {})

    def register_elsewhere(kv_caches):
        worker.gpu_kv_caches = {"a": SimpleNamespace(data_ptr=lambda: 0, shape=(8, 16))}

    assert refused(registration.around_register, register_elsewhere, worker, ({},), {}) == (
        "the connector registered other memory than kvcached's regions, because it would copy "
        "other blocks' bytes; report this with your command line, or set KVPATCH=0. [KVP410]"
    )


@dataclass
class Placed:
    """vLLM's ``KVCacheTensor`` from 0.29 on: where the layers of one kind lie."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class Plan:
    kv_cache_tensors: list[Placed]
    num_blocks: int = 8
    kv_cache_groups: tuple = ()


APART = Plan([Placed(256, ["a", "b"], 128, 16), Placed(256, ["c"], 128, 16, offset=128)])
TOGETHER = Plan([Placed(256, ["a", "b"], 16, 32)])


def test_every_layer_is_placed_in_its_own_pool():
    assert registration.layer_by_layer(APART) == Plan(
        [Placed(128, [layer], 128, 16) for layer in ("a", "b", "c")]
    )
    assert registration.layer_by_layer(TOGETHER) is TOGETHER


@pytest.mark.parametrize(
    ("plan", "rows", "outside"),
    [
        (APART, [16, 16], False),
        (TOGETHER, [32], False),
        (APART, [16], False),
        (APART, [16, 16], True),
    ],
)
def test_regions_that_vllm_derives_from_the_plan(plan_of, monkeypatch, plan, rows, outside):
    plan_of(1)
    monkeypatch.setattr(registration, "on_kvcached", lambda region: not outside)
    worker = SimpleNamespace(kv_cache_config=plan, cpu_capacity_bytes=32, num_cpu_blocks=1)

    def register(kv_caches):
        worker.seen = worker.kv_cache_config
        worker.gpu_kv_caches = {str(i): SimpleNamespace(shape=(8, n)) for i, n in enumerate(rows)}

    if outside or sum(rows) != 32:
        with pytest.raises(Refusal, match="registered other memory than kvcached's regions"):
            registration.around_register_placed(register, worker, ({},), {})
    else:
        registration.around_register_placed(register, worker, ({},), {})
    assert worker.seen == registration.layer_by_layer(plan)
    assert worker.kv_cache_config is plan
