"""What starts on an NPU, and what the rows of the feature do without one."""

import enum
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from fakes import facts, module, namespace, transfer

from kvpatch.patch import Patch, Transaction
from kvpatch.patches.ascend import allocation, device, order, presence, ran
from kvpatch.patches.ascend.presence import CANN, EMULATOR
from kvpatch.patches.ascend.rules import RULES
from kvpatch.refusal import Refusal
from kvpatch.status import record


@pytest.mark.parametrize(
    ("ascend", "vllm", "built", "code"),
    [
        ("0.23.0", "0.23.0", CANN, "KVP603"),
        ("0.23.0", "0.23.0+empty", CANN, "KVP603"),
        ("0.23.0", "0.23.0", 0, "KVP602"),
        ("0.23.0", "0.24.0", EMULATOR, "KVP601"),
        ("0.23.0.post1", "0.23.0", EMULATOR, "KVP601"),
        ("0.18.0", "0.18.0", EMULATOR, "KVP601"),
        ("0.23.0", None, CANN, "KVP601"),
        (None, None, CANN, "KVP601"),
    ],
)
def test_what_is_refused_on_an_npu(ascend, vllm, built, code):
    assert presence.refused(ascend, vllm, built).code == code
    # The probe lifts its own refusal only.
    passed = presence.refused(ascend, vllm, built, "2026-11-24")
    assert (passed and passed.code) == (None if code == "KVP603" else code)


def test_a_release_whose_sources_were_compared_says_what_it_lacks():
    said = presence.refused("0.23.0.post1", "0.23.0", EMULATOR).why
    assert said.endswith("the same in this one's sources, and no engine has run with it")
    assert presence.refused("0.18.0", "0.18.0", EMULATOR).why.endswith(" only")


ON_AN_NPU = (
    "kvpatch: the device is an NPU, on which the probe was right on 2026-11-24; no engine of "
    "kvpatch's tests has run on one"
)


@pytest.mark.parametrize(
    ("built", "passed", "said"), [(EMULATOR, "", []), (CANN, "2026-11-24", [ON_AN_NPU])]
)
def test_an_engine_starts_on_the_emulated_npu_or_where_the_probe_passed(
    monkeypatch, warned, built, passed, said
):
    settled = []
    npu_with(monkeypatch, built, passed)
    monkeypatch.setattr(presence, "settle", lambda: settled.append(True))
    assert presence.wanted() is True
    assert settled == [True]
    assert warned.messages == said


def test_vllm_ascend_makes_its_patches_before_its_worker_is_imported(monkeypatch):
    order = []
    adapt_patch = lambda is_global_patch: order.append(f"global {is_global_patch}")  # noqa: E731
    module(monkeypatch, "vllm_ascend.utils", adapt_patch=adapt_patch)
    monkeypatch.setattr("importlib.import_module", order.append)
    presence.settle()
    assert order == ["global True", "vllm_ascend.worker.worker"]


def platform(monkeypatch, kind):
    module(monkeypatch, "vllm.platforms", current_platform=SimpleNamespace(device_type=kind))


def npu_with(monkeypatch, built, passed=""):
    """An NPU whose vllm-ascend was built so, and on which the probe passed on a day."""
    platform(monkeypatch, "npu")
    monkeypatch.setattr(presence, "_version", lambda name: "0.23.0")
    monkeypatch.setattr(presence, "_built", lambda: built)
    monkeypatch.setattr(presence, "_passed", lambda: passed)


def test_another_device_is_not_asked_about(monkeypatch):
    platform(monkeypatch, "cuda")
    monkeypatch.setattr(presence, "refused", lambda *_: pytest.fail("asked"))
    assert presence.wanted() is False


def test_an_npu_is_refused_in_one_sentence(monkeypatch):
    npu_with(monkeypatch, CANN)
    with pytest.raises(Refusal) as error:
        presence.wanted()
    assert str(error.value) == (
        "kvpatch refuses to start vLLM: the device is an NPU, because engines are validated on an "
        "emulated one only, and the probe has not been right on this machine; run python -m "
        "kvpatch.ascend probe, or set KVPATCH=0. [KVP603]"
    )


@pytest.mark.parametrize(
    ("given", "known"), [("npu:3", "cuda:3"), ("npu", "cuda"), ("cuda:1", "theirs cuda:1")]
)
def test_kvcached_knows_an_npu_by_the_name_of_cuda(given, known):
    assert device.npu_as_cuda(lambda name: f"theirs {name}", None, (given,), {}) == known
    assert device.npu_as_cuda(lambda device: f"theirs {device}", None, (), {"device": given}) == (
        known
    )


def test_kvcached_reads_the_npus_memory_as_cudas():
    npu = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 2,
        mem_get_info=lambda index: (1, {2: 64, None: 32}[index]),
    )
    torch = device.torch_with_npu(SimpleNamespace(npu=npu, int8="kept"))
    assert torch.cuda.is_available()
    assert torch.cuda.current_device() == 2
    assert torch.cuda.get_device_properties("cuda:2").total_memory == 64
    assert torch.cuda.get_device_properties("cuda").total_memory == 32
    assert torch.int8 == "kept"


def npu(monkeypatch):
    """Return the devices that ``torch.npu`` is told to wait for; () for the current one."""
    waited = []
    npu = SimpleNamespace(synchronize=lambda *device: waited.append(device))
    module(monkeypatch, "torch", npu=npu)
    return waited


def test_the_listener_selects_no_cuda_device():
    assert device.no_cuda_device(lambda name: pytest.fail(name), None, ("npu:1",), {}) is None


def test_the_whole_npu_is_waited_for_before_an_unmap(monkeypatch):
    waited = npu(monkeypatch)
    device.synchronize_npu(lambda: pytest.fail("kvcached's own"), None, (), {})
    assert waited == [()]


def test_the_barrier_waits_for_the_workers_npu_and_is_pickled_by_name(monkeypatch):
    waited = npu(monkeypatch)
    barrier = device.replace_release_barrier(lambda worker: pytest.fail("kvcached's own"))
    assert pickle.loads(pickle.dumps(barrier)) is barrier
    assert barrier(SimpleNamespace(device="npu:1")) is True
    assert waited == [("npu:1",)]


class Backend:
    """What ``NPUDmaCopyBackend.launch_copy`` was called with."""

    def __init__(self, monkeypatch):
        self.recorded = []
        recorded = self.recorded

        class Event:
            def record(self, stream):
                recorded.append((self, stream))

        npu = SimpleNamespace(Event=Event, current_stream=lambda: "computation")
        module(monkeypatch, "torch", npu=npu)

    def launch_copy(
        self, src_blocks, dst_blocks, is_store, event_idx, events_list, wait_event=None
    ):
        self.waited = wait_event


@pytest.mark.parametrize("more", [{}, {"wait_event": None}])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_store_waits_for_the_computation(monkeypatch, by_name, more):
    backend = Backend(monkeypatch)
    given = {"src_blocks": [1], "dst_blocks": [2], "is_store": True, "event_idx": 0}
    given |= {"events_list": [], **more}
    args, kwargs = ((), given) if by_name else (tuple(given.values()), {})
    order.around_launch(backend.launch_copy, backend, args, kwargs)
    ((event, stream),) = backend.recorded
    assert backend.waited is event
    assert stream == "computation"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (([1], [2], False, 0, []), {}),
        (([1], [2], True, 0, [], "vLLM's"), {}),
        (([1], [2], True, 0, []), {"wait_event": "vLLM's"}),
    ],
    ids=["a load", "vLLM's own event", "vLLM's own event by name"],
)
def test_what_needs_no_event_gets_none(monkeypatch, args, kwargs):
    backend = Backend(monkeypatch)
    order.around_launch(backend.launch_copy, backend, args, kwargs)
    assert backend.recorded == []
    assert backend.waited == ("vLLM's" if args[2] else None)


class Enumerated(enum.Enum):
    """One of vLLM's enumerations."""

    NONE = 0


def configured(**changes):
    """What vLLM and vllm-ascend make of the engine test's arguments; paths with ``__``."""
    made = namespace(
        model_config__architecture="LlamaForCausalLM",
        model_config__dtype="torch.float32",
        model_config__enable_prompt_embeds=False,
        model_config__enable_sleep_mode=False,
        model_config__enforce_eager=True,
        model_config__model_impl="auto",
        model_config__multimodal_config=None,
        model_config__override_attention_dtype=None,
        model_config__quantization=None,
        model_config__runner_type="generate",
        cache_config__block_size=128,
        cache_config__cache_dtype="auto",
        cache_config__enable_prefix_caching=True,
        cache_config__kv_cache_memory_bytes=64 << 20,
        cache_config__kv_sharing_fast_prefill=False,
        cache_config__mamba_cache_mode="none",
        cache_config__num_gpu_blocks_override=None,
        cache_config__prefix_caching_hash_algo="sha256",
        parallel_config__data_parallel_size=1,
        parallel_config__decode_context_parallel_size=1,
        parallel_config__distributed_executor_backend="uni",
        parallel_config__enable_dbo=False,
        parallel_config__enable_elastic_ep=False,
        parallel_config__enable_eplb=False,
        parallel_config__enable_expert_parallel=False,
        parallel_config__nnodes=1,
        parallel_config__pipeline_parallel_size=1,
        parallel_config__prefill_context_parallel_size=1,
        parallel_config__tensor_parallel_size=1,
        parallel_config__worker_cls="vllm_ascend.worker.worker.NPUWorker",
        parallel_config__worker_extension_cls="",
        scheduler_config__async_scheduling=True,
        scheduler_config__disable_hybrid_kv_cache_manager=False,
        scheduler_config__enable_chunked_prefill=True,
        scheduler_config__policy="fcfs",
        scheduler_config__scheduler_cls=None,
        compilation_config__mode=0,
        compilation_config__cudagraph_mode=Enumerated.NONE,
        attention_config__backend=None,
        offload_config__prefetch__offload_group_size=0,
        offload_config__uva__cpu_offload_gb=0.0,
        kv_transfer_config=transfer(
            "SimpleCPUOffloadConnector", cpu_bytes_to_use=64 << 20, lazy_offload=False
        ),
        kv_transfer_config__kv_role="kv_both",
        kv_transfer_config__kv_load_failure_policy="fail",
        additional_config={"ascend_compilation_config": {}, "ascend_fusion_config": {}},
        ec_transfer_config=None,
        kv_events_config=None,
        lora_config=None,
        quant_config=None,
        speculative_config=None,
        use_v2_model_runner=False,
        weight_transfer_config=None,
    )
    return namespace(made, **changes)


def here(device="npu", contiguous=False, **environment):
    return facts("0.23.0", device, contiguous, environment)


def refused_with(given, **changes):
    config = configured(**changes)
    return [rule.code for rule in RULES if rule.applies(config, given)]


def test_what_ran_on_an_npu_starts_there():
    assert list(ran.differences(configured(), here())) == []
    assert refused_with(here()) == []
    quiet = here(KVCACHED_CONTIGUOUS_LAYOUT="false", KVPATCH_LOG="debug")
    # The run of kvpatch verify has its audit.
    assert refused_with(here(KVPATCH_DEBUG="1", KVPATCH_VERIFY="/run")) == []
    for extra in ({}, {"lazy_offload": True}):
        assert refused_with(quiet, kv_transfer_config__kv_connector_extra_config=extra) == []
    assert refused_with(quiet, kv_events_config=SimpleNamespace(enable_kv_cache_events=False)) == []


def test_every_setting_that_matters_is_compared_with_what_ran():
    assert ran.settings(configured(), here()).keys() == ran.RAN.keys()


@pytest.mark.parametrize("path", ran.PATHS)
def test_a_setting_that_did_not_run_on_an_npu_does_not_start_there(path):
    part, _, rest = path.partition(".")
    change = {path.replace(".", "__"): "another"}
    if getattr(configured(), part) is None:  # a part that the engine did not have
        change = {part: SimpleNamespace(**{rest: "another"}) if rest else "another"}
    assert refused_with(here(), **change) == ["KVP606"]
    assert refused_with(here("cuda"), **change) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_transfer_config": None},
        {"kv_transfer_config__kv_connector": "MultiConnector"},
        {"kv_transfer_config__kv_connector": "MooncakeConnector"},
        {"kv_transfer_config__kv_connector_extra_config": {"kv_offload_backend": "mine"}},
        {"model_config__dtype": "torch.bfloat16"},
        {"cache_config__block_size": 64},
        {"cache_config__kv_cache_memory_bytes": None},
        {"parallel_config__worker_cls": "vllm_ascend._310p.worker_310p.NPUWorker310"},
        {"additional_config": {"enable_flashcomm1": True}},
        {"model_config": SimpleNamespace()},
    ],
)
def test_other_ways_of_running_on_an_npu_do_not_start(changes):
    assert refused_with(here(), **changes) == ["KVP606"]
    assert refused_with(here("cuda"), **changes) == []


@pytest.mark.parametrize(
    "set_there",
    [
        {"KVPATCH_HOST_POOL": "1GiB"},
        {"KVPATCH_IDLE": "30s"},
        {"KVPATCH_FIRST_LIMIT": "25%"},
        {"KVPATCH_DEBUG": "1"},
        {"KVCACHED_PAGE_SIZE_MB": "4"},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        {"VLLM_ASCEND_ENABLE_NZ": "2"},
        {"contiguous": True},
    ],
)
def test_an_environment_that_did_not_run_there_is_refused(set_there):
    assert refused_with(here(**set_there)) == ["KVP606"]
    assert refused_with(here("cuda", **set_there)) == []


def test_the_connector_whose_spec_does_not_import_has_a_reason_of_its_own():
    changes = {"kv_transfer_config__kv_connector": "OffloadingConnector"}
    assert refused_with(here(), **changes) == ["KVP604"]
    assert refused_with(here(), **changes, model_config__dtype="torch.half") == ["KVP604"]


class FullAttentionSpec:
    pass


class SlidingWindowSpec:
    pass


class Runner:
    """``NPUModelRunner`` with kvcached's methods of vLLM's runner."""

    def _allocate_kv_cache_from_kvcached(self, config):
        return "kvcached's pools"

    def _reshape_kv_cache_tensors_from_kvcached(self, config, pools):
        assert pools == "kvcached's pools"
        return {"layer": Cache(SimpleNamespace(half="K"), SimpleNamespace(half="V"))}


class Cache(tuple):
    """A tensor of K and V, with the view of its blocks."""

    def __new__(cls, *halves):
        made = super().__new__(cls, halves)
        made[0]._kvcached_block_copy_view = "the view"
        return made


def plan(*kinds):
    groups = [SimpleNamespace(kv_cache_spec=kind()) for kind in kinds]
    return SimpleNamespace(kv_cache_groups=groups)


def test_the_kv_cache_is_allocated_by_kvcached():
    runner, given = Runner(), plan(FullAttentionSpec)
    pools = allocation.from_kvcached(pytest.fail, runner, (given,), {})
    assert pools == "kvcached's pools"
    assert runner.hybrid_with_attn_and_mamba is False
    key, value = allocation.as_pairs(pytest.fail, runner, (given, pools), {})["layer"]
    assert (key.half, value.half) == ("K", "V")
    assert key._kvcached_block_copy_view == "the view"


@pytest.mark.parametrize(
    "kinds", [(SlidingWindowSpec,), (FullAttentionSpec, FullAttentionSpec), ()]
)
def test_another_kv_cache_is_refused_on_an_npu(kinds):
    with pytest.raises(Refusal, match="KVP605"):
        allocation.from_kvcached(pytest.fail, Runner(), (), {"kv_cache_config": plan(*kinds)})


@pytest.mark.parametrize("first", ["the view", None])
def test_a_kv_cache_that_is_not_kvcacheds_is_seen(monkeypatch, first):
    monkeypatch.setattr(record, "say", lambda: None)
    monkeypatch.setattr(record, "roles", [])
    monkeypatch.setattr(record, "elastic", None)
    monkeypatch.setattr(record, "applied", [])
    with pytest.raises(Refusal, match="KVP402") if first is None else nullcontext():
        tensors(runner(), first)
        assert record.elastic is True


def tensors(runner, first="the view"):
    """Let a runner make its KV cache, whose first part is kvcached's."""
    made = {"layer": (SimpleNamespace(_kvcached_block_copy_view=first), SimpleNamespace())}
    around = allocation.around_kv_cache_tensors
    assert around(lambda config: made, runner, ("plan",), {}) is made


def runner(scheduler=object):
    """A runner of an engine with a scheduler."""
    of_scheduler = SimpleNamespace(get_scheduler_cls=lambda: scheduler)
    return SimpleNamespace(vllm_config=SimpleNamespace(scheduler_config=of_scheduler))


SCHEDULER = "vllm.v1.core.sched.scheduler"


def loud(wrapped, instance, args, kwargs):
    return f"ours over {wrapped(*args, **kwargs)}"


class Scheduler:
    def schedule(self):
        return "vLLM's"

    def has_requests(self):
        return "vLLM's"


@pytest.fixture
def vllm(monkeypatch):
    """vLLM's scheduler with two rows of ours on it, of which one has a third above it."""
    monkeypatch.setattr(record, "say", lambda: None)
    scheduler = type("Scheduler", (Scheduler,), dict(vars(Scheduler)))
    made = module(monkeypatch, SCHEDULER, Scheduler=scheduler)
    transaction = Transaction()
    transaction.apply_all(
        Patch(
            name, f"{SCHEDULER}:Scheduler.{name.partition(' ')[0]}", "why", "", "", wrapper, (), "0"
        )
        for wrapper in [f"{__name__}:loud"]
        for name in ("schedule", "has_requests", "schedule twice")
    )
    monkeypatch.setattr(record, "applied", transaction.applied)
    return made


def start(scheduler):
    """Let a worker make its KV cache."""
    tensors(runner(scheduler))


def test_what_vllm_ascend_replaces_after_us_is_refused(vllm):
    """As its ``EngineCore.__init__`` of profiled chunks, made when an engine is configured."""
    vllm.Scheduler.schedule = lambda self: "vllm-ascend's"
    target = f"the target of schedule twice, {SCHEDULER}:Scheduler.schedule, was replaced after it"
    with pytest.raises(Refusal, match=rf"{target} was patched, .*\[KVP204\]"):
        start(vllm.Scheduler)


def test_a_class_that_vllm_ascend_replaces_after_us_is_refused(vllm):
    """As its ``Scheduler``, which it made before us: a subclass may hide one patch or none."""
    start(vllm.Scheduler)
    start(type("AsyncScheduler", (vllm.Scheduler,), {}))
    vllm.Scheduler = type("BalanceScheduler", (vllm.Scheduler,), {})
    start(vllm.Scheduler)
    hiding = type("Hiding", (vllm.Scheduler,), {"has_requests": lambda self: False})
    vllm.Scheduler = hiding
    with pytest.raises(Refusal, match=r"the target of has_requests, .*\[KVP204\]"):
        start(hiding)


def test_an_engine_whose_scheduler_is_not_the_patched_one_or_is_gone_is_refused(vllm):
    """``AsyncScheduler`` of a module that was imported before its base class was replaced."""
    with pytest.raises(Refusal, match="KVP204"):
        start(type("AsyncScheduler", (Scheduler,), {}))
    scheduler = vllm.Scheduler
    del vllm.Scheduler
    with pytest.raises(Refusal, match="KVP204"):
        start(scheduler)


@pytest.mark.parametrize("fails", [False, True])
def test_kvcacheds_listener_ends_with_the_worker(monkeypatch, fails):
    ended = []
    ipc = module(monkeypatch, "kvcached.tp_ipc_util")
    ipc.stop_worker_listener_threads = lambda: ended.append("listener")

    def shutdown():
        ended.append("worker")
        if fails:
            raise OSError

    with pytest.raises(OSError) if fails else nullcontext():
        allocation.after_shutdown(shutdown, None, (), {})
    assert ended == ["worker", "listener"]
