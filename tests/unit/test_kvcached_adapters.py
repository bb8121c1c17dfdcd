"""kvcached on later releases: what each wrapper changes, and that it changes nothing else."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from fakes import module

from kvpatch.patches import kvcached_version
from kvpatch.patches.kvcached_adapters import adapters, runner_v1
from kvpatch.refusal import Refusal


@pytest.mark.parametrize(
    ("wrapper", "told"),
    [(kvcached_version.as_on_0_30, "0.30.0"), (kvcached_version.as_on_0_28, "0.28.0")],
)
def test_kvcached_is_told_a_release_for_one_decision(wrapper, told):
    patch = SimpleNamespace(detected_version="0.32.0+cpu")
    assert wrapper(lambda module: (module, patch.detected_version), patch, ("it",), {}) == (
        "it",
        told,
    )
    assert patch.detected_version == "0.32.0+cpu"
    with pytest.raises(ZeroDivisionError):
        wrapper(lambda: 1 / 0, patch, (), {})
    assert patch.detected_version == "0.32.0+cpu"


def test_only_the_adapter_of_runner_v2_is_registered_for_later_releases():
    names = ("model_runner_v2", "kv_layout_v2", "gpu_model_runner", "mamba_partial_tail")
    pairs = [(SimpleNamespace(patch_name=name), f"<{name}") for name in names]
    taken = []
    kvcached_version.register_for_later_releases(taken.extend, None, (pairs,), {})
    assert [(patch.patch_name, own) for patch, own in taken] == [
        ("model_runner_v2", ">=0.29.0"),
        ("kv_layout_v2", ">=0.29.0"),
        ("gpu_model_runner", "<gpu_model_runner"),
        ("mamba_partial_tail", "<mamba_partial_tail"),
    ]


def test_the_pools_attributes_are_carried_over_where_vllm_has_them():
    coordinator = SimpleNamespace(block_pool=SimpleNamespace(medium="cpu:1", free_block_queue=[]))

    def replace_pool():
        coordinator.block_pool = SimpleNamespace()

    adapters.carry_pool_attributes(replace_pool, coordinator, (), {})
    assert vars(coordinator.block_pool) == {"medium": "cpu:1"}


def test_weights_held_elsewhere_are_taken_off_the_budget():
    def kvcached(init_snapshot, cache_config):
        return init_snapshot * cache_config

    assert adapters.request_memory(kvcached, None, (100, 9), {}) == 900
    assert adapters.request_memory(kvcached, None, (100, 9, 0), {}) == 900
    assert adapters.request_memory(kvcached, None, (100, 9, 300), {}) == 600
    assert adapters.request_memory(kvcached, None, (100, 9), {"external_weight_memory": 1}) == 899
    with pytest.raises(ValueError, match="weights of 900 bytes"):
        adapters.request_memory(kvcached, None, (100, 9, 900), {})


def test_the_profile_runs_in_what_vllm_puts_around_it(monkeypatch):
    said = []

    @contextmanager
    def inside(what):
        said.append(f"enter {what}")
        yield
        said.append(f"leave {what}")

    config = module(monkeypatch, "vllm.config")
    config.set_current_vllm_config = lambda given: inside(f"config {given}")

    class Runner:
        def profile_run(self, randomize_inputs=False):
            said.append(f"profile {randomize_inputs}")

    worker = SimpleNamespace(
        model_runner=Runner(),
        randomize_dummy_inputs=True,
        vllm_config="ours",
        _scoped_allocator_max_split=lambda max_split_size_mb: inside(f"split {max_split_size_mb}"),
    )

    def determine():
        worker.model_runner.profile_run()
        said.append("measure")
        return 7

    assert adapters.profile_as_vllm(determine, worker, (), {}) == 7
    assert said == [
        "enter split 20",
        "enter config ours",
        "profile True",
        "leave config ours",
        "leave split 20",
        "measure",
    ]
    assert "profile_run" not in vars(worker.model_runner)


@pytest.mark.parametrize(
    ("args", "kwargs", "lasts"),
    [
        (("config",), {}, True),
        (("config", False), {}, True),
        (("config", True), {}, False),
        (("config",), {"is_profiling": True}, False),
    ],
)
def test_only_a_lasting_kv_cache_comes_from_kvcached(monkeypatch, args, kwargs, lasts):
    adapter = module(monkeypatch, "kvcached.integration.vllm.model_runner_v2")
    adapter.allocate_kv_cache = lambda *args: ("kvcached", *args)

    def initialize(*args, **kwargs):
        return runner_v1.allocate(lambda *args: ("vllm", *args), None, ("config", "cpu"), {})

    runner = SimpleNamespace(shared_kv_cache_layers={})
    made = runner_v1.mark_lasting_allocation(initialize, runner, args, kwargs)
    assert made == ("kvcached" if lasts else "vllm", "config", "cpu")
    assert runner_v1.allocate(lambda: "vllm", None, (), {}) == "vllm"


def test_runner_v1_refuses_shared_kv_caches_that_last():
    runner = SimpleNamespace(shared_kv_cache_layers={"b": "a"})
    with pytest.raises(Refusal, match="layers of this model share their KV cache"):
        runner_v1.mark_lasting_allocation(lambda *args: None, runner, ("config",), {})
    assert runner_v1.mark_lasting_allocation(lambda *a: "made", runner, ("c", True), {}) == "made"
