"""OffloadingConnector before 0.26, presented in the terms of later releases."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from fakes import OffloadingConnector

from kvpatch import state
from kvpatch.patches.offloading import fixes, legacy, registration
from kvpatch.patches.offloading.registration import Rows
from kvpatch.refusal import Refusal, RefusedCall
from kvpatch.telemetry.counters import Totals
from kvpatch.versions import Installed

KV_CACHES = {"layer.0": object()}


@pytest.fixture
def registered(monkeypatch):
    """What was given to the registration of later releases."""
    given = []

    def register(wrapped, worker, *rest):
        given.append((worker, *rest))
        state.attach(worker, Rows([(0x1000, 4096)]))

    monkeypatch.setattr(registration, "register_regions", register)
    return given


@pytest.mark.parametrize(
    ("register", "init"),
    [
        (legacy.register_with_spec, "_init_worker"),
        (legacy.register_with_handlers, "_register_handlers"),
    ],
)
def test_the_plan_comes_from_the_spec(registered, register, init):
    plan, started = object(), []
    spec = SimpleNamespace(
        kv_cache_config=plan, cpu_page_size_per_worker=3 * 4096, block_size_factor=3
    )
    worker = SimpleNamespace(spec=spec, **{init: started.append})
    register(lambda: pytest.fail("vLLM's own ran"), worker, (KV_CACHES,), {})
    ((later, args, kwargs),) = registered
    assert (args, kwargs) == ((KV_CACHES,), {})
    assert later.kv_cache_config is plan
    # The CPU tier counts in chunks of blocks; a region's bytes are a block's.
    assert later.spec.config.worker_kv_bytes_per_block == 4096
    assert state.find(worker, Rows) == Rows([(0x1000, 4096)])  # for what names the files of a tier
    later._init_worker("regions")
    assert started == ["regions"]


@pytest.mark.parametrize("size", [4, (4,)])
def test_up_to_0_18_each_region_is_a_layer_of_its_own_backend(monkeypatch, size):
    torch = pytest.importorskip("torch")
    region = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64).view(torch.int8)

    def checked(worker, kv_caches):
        assert kv_caches is KV_CACHES
        assert worker.kv_cache_config is plan
        assert worker.spec.config.worker_kv_bytes_per_block == 64
        return SimpleNamespace(tensors=[region, region])

    monkeypatch.setattr(registration, "checked_regions", checked)
    plan = SimpleNamespace(num_blocks=3, kv_cache_tensors=[SimpleNamespace(size=96)] * 2)
    spec = SimpleNamespace(kv_cache_config=plan, gpu_block_size=size)
    given = []
    worker = SimpleNamespace(spec=spec, _register_handlers=lambda *both: given.append(both))
    legacy.register_with_backends(lambda: None, worker, (KV_CACHES,), {})
    ((regions, backends),) = given
    assert regions.keys() == backends.keys() and len(regions) == 2
    for name, tensor in regions.items():
        # As vLLM reads it: blocks first, the tokens of a block behind them, whole blocks.
        assert backends[name].get_kv_cache_shape(1234, 16, 8, 256).index(1234) == 0
        assert backends[name].get_kv_cache_shape(1234, 16, 8, 256).index(16) == 1
        assert tensor.shape == (3, 4, 16)
        assert tensor.data_ptr() == region.data_ptr()
        assert tensor.element_size() * tensor.stride(0) == 64


@pytest.mark.parametrize(
    ("status", "computed", "held", "storable"),
    [
        ("FINISHED_STOPPED", 640, 12, 5),
        ("FINISHED_STOPPED", 640, 3, 1),  # of two blocks each
        ("FINISHED_ABORTED", 0, 0, 0),
        ("FINISHED_ABORTED", 64, 12, 2),
    ],
)
def test_of_an_aborted_request_0_26_stores_what_it_has_computed(status, computed, held, storable):
    group = SimpleNamespace(group_idx=1, tokens_per_chunk=32)
    request = SimpleNamespace(
        req=SimpleNamespace(status=SimpleNamespace(name=status), num_computed_tokens=computed),
        config=SimpleNamespace(blocks_per_chunk=2),
        group_states=[None, SimpleNamespace(block_ids=[7] * held)],
    )
    assert legacy.around_storable(lambda *both: 5, request, (group, 640), {}) == storable


@pytest.mark.parametrize(
    ("finished", "prompt", "tokens", "storable"),
    [
        (False, 640, 672, 672),
        (True, 640, 672, 671),  # a request that ends with a block
        (True, 640, 640, 640),  # without a sampled token: all of the prompt was computed
        (True, 640, 641, 640),
    ],
)
def test_the_last_sampled_token_is_not_stored(finished, prompt, tokens, storable):
    request = SimpleNamespace(
        num_prompt_tokens=prompt, num_tokens=tokens, is_finished=lambda: finished
    )
    status = SimpleNamespace(req=request)
    assert fixes.around_offloadable(lambda *both: tokens, None, (status, tokens), {}) == storable
    given = {"req_status": status, "num_computed_tokens": tokens}
    # An aborted request, and one whose generated tokens are not offloaded, have fewer already.
    assert fixes.around_offloadable(lambda **both: 320, None, (), given) == 320


def test_a_block_of_another_size_than_the_plans_is_refused():
    """The CPU tier is sized by the plan: rows would overlap."""
    spec = SimpleNamespace(config=SimpleNamespace(worker_kv_bytes_per_block=4096))
    worker = SimpleNamespace(spec=spec)
    registration.check_size(worker, 4096)
    with pytest.raises(Refusal) as refused:
        registration.check_size(worker, 8192)
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: a block has 8192 bytes in memory and 4096 in vLLM's KV "
        "cache config, because the CPU tier was sized by the config and would be overrun; report "
        "this with your command line, or set KVPATCH=0. [KVP407]"
    )


# Weights that are replaced up to 0.23


def core(connector=None):
    return SimpleNamespace(scheduler=SimpleNamespace(connector=connector))


@pytest.mark.parametrize("method", ["reload_weights", "update_weights", "finish_weight_update"])
@pytest.mark.parametrize("by_name", [False, True])
def test_weights_are_not_replaced_while_a_connector_has_blocks_of_them(method, by_name):
    args, kwargs = ((), {"method": method}) if by_name else ((method,), {})
    engine = core(object())
    totals = state.attach(engine, Totals())
    with pytest.raises(RefusedCall) as refused:
        legacy.around_call(lambda *_, **__: pytest.fail("called"), engine, args, kwargs)
    assert totals.refused == {"collective_rpc": 1}
    assert str(refused.value) == (
        f"kvpatch refuses the call: {method} is called on an engine with a KV connector, because "
        "before vLLM 0.24 a reset of the caches leaves blocks of the old weights in the CPU tier, "
        "which would be loaded as blocks of the new ones; start the engine again with the new "
        "weights, or install vLLM 0.24 or later. [KVP353]"
    )


def weights(): ...


@pytest.mark.parametrize(
    ("connector", "method"),
    [(None, "reload_weights"), (object(), "check_health"), (object(), weights)],
)
def test_other_calls_and_engines_without_a_connector_are_vllms(connector, method):
    def call(method, timeout=None):
        return [method, timeout]

    assert legacy.around_call(call, core(connector), (method,), {"timeout": 3}) == [method, 3]


def reset(planner, *args, **kwargs):
    """Reset the device's cache while two requests run; vLLM preempts them."""
    scheduler = SimpleNamespace(
        connector=OffloadingConnector(connector_scheduler=planner),
        running=[SimpleNamespace(request_id=name) for name in ("one", "two")],
    )
    legacy.around_scheduler_reset(
        lambda *args, **kwargs: scheduler.running.clear(), scheduler, args, kwargs
    )
    assert not scheduler.running


def named(planner, preempted):
    """Return whom a step names to the connector and to the workers."""
    output = SimpleNamespace(preempted_req_ids=preempted)
    seen = legacy.name_preempted(lambda output: output.preempted_req_ids, planner, (output,), {})
    assert seen is output.preempted_req_ids, "the workers of 0.16 to 0.18 read the step's"
    return seen


@pytest.mark.parametrize(
    ("args", "kwargs"), [((True,), {}), ((True, True), {}), ((), {"reset_running_requests": True})]
)
@pytest.mark.parametrize("preempted", [None, set(), {"three"}])
def test_the_next_step_names_who_was_preempted_by_a_reset(args, kwargs, preempted):
    planner = SimpleNamespace()
    reset(planner, *args, **kwargs)
    assert named(planner, preempted) == {"one", "two"} | (preempted or set())
    assert named(planner, preempted) == preempted, "once"


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((False, True), {})])
def test_a_reset_that_preempts_nobody_names_nobody(args, kwargs):
    planner = SimpleNamespace()
    reset(planner, *args, **kwargs)
    assert named(planner, None) is None


def test_a_reset_without_such_a_connector_is_vllms():
    scheduler = SimpleNamespace(connector=None, running=[])
    assert legacy.around_scheduler_reset(lambda reset: "done", scheduler, (True,), {}) == "done"


@pytest.mark.parametrize(("skips", "answer"), [(True, (0, False)), (False, (32, True))])
def test_a_request_that_computes_every_token_loads_none(skips, answer):
    request = SimpleNamespace(skip_reading_prefix_cache=skips)
    seen = []

    def match(request, computed):
        seen.append(request)  # it gets its state there
        return 32, True

    assert legacy.around_match(match, object(), (request, 0), {}) == answer
    assert seen == [request]


@pytest.mark.parametrize(
    ("computed", "kept"),
    [(12, ["a", "b", "c"]), (11, ["a", "b"]), (10, ["a"]), (0, []), (15, ["a", "b", "c"])],
)
def test_a_session_forgets_the_hashes_of_what_it_drops(computed, kept):
    session = SimpleNamespace(
        num_tokens=12, num_computed_tokens=computed, block_hashes=["a", "b", "c"]
    )
    fixes.before_session(
        lambda session, update: session.block_hashes.append("new"), None, (session, object()), {}
    )
    assert session.block_hashes == [*kept, "new"]


def plan_of(*kinds):
    specs = [type(kind, (), {})() for kind in kinds]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize(
    ("release", "kinds", "refused"),
    [
        ("0.16.0", ["SlidingWindowSpec"], True),
        ("0.20.2", ["SlidingWindowSpec", "SlidingWindowSpec"], True),
        ("0.21.0", ["SlidingWindowSpec"], False),
        ("0.19.1", ["FullAttentionSpec"], False),
        ("0.19.1", ["FullAttentionSpec", "SlidingWindowSpec"], False),
    ],
)
def test_windows_alone_are_refused_before_the_connector_knows_them(
    monkeypatch, release, kinds, refused
):
    facts = SimpleNamespace(vllm=Installed.release("vllm", release))
    monkeypatch.setattr(legacy.record, "facts", facts)
    with pytest.raises(Refusal, match="KVP423") if refused else nullcontext():
        legacy.check_windows(plan_of(*kinds))


class KVBlock:
    def __init__(self, block_id, block_hash=None):
        self.block_id, self.block_hash, self.is_null = block_id, block_hash, block_id == 0


@pytest.mark.parametrize("since_23", [True, False])
@pytest.mark.parametrize(("external", "flushed"), [(32, {1, 2, 3}), (0, set())])
def test_blocks_that_another_connector_loads_into_are_waited_for(external, flushed, since_23):
    planner = SimpleNamespace(
        _block_id_to_pending_jobs={0: {9}, 4: {1, 2}, 5: {3}, 6: {4}, 7: {5}},
        _current_batch_jobs_to_flush=set(),
    )
    if since_23:
        planner._current_batch_allocated_block_ids = {8}
    multi = SimpleNamespace(_connectors=[OffloadingConnector(connector_scheduler=planner)])
    blocks = ([KVBlock(0), KVBlock(4), KVBlock(6, "hit")], [KVBlock(5)])
    told = fixes.around_other_loads(
        lambda *args: "told", multi, (object(), SimpleNamespace(blocks=blocks), external), {}
    )
    assert told == "told"
    assert planner._current_batch_jobs_to_flush == flushed
    if since_23:
        assert planner._current_batch_allocated_block_ids == ({4, 5, 8} if external else {8})


class Made:
    """The streams of a platform, or of torch.cuda."""

    def __init__(self):
        self.Stream = lambda: Stream("new")

    def current_stream(self):
        return "compute"


class Stream:
    def __init__(self, name):
        self.name, self.after = name, []

    def wait_stream(self, other):
        self.after.append(other)


class Handler:
    """vLLM's, of one direction: a copy takes the stream at the end of the pool."""

    def __init__(self, gpu_to_cpu, *pool):
        self.gpu_to_cpu, self._stream_pool = gpu_to_cpu, list(pool)

    def transfer_async(self, job):
        return self._stream_pool.pop() if self._stream_pool else Stream("its own")


@pytest.mark.parametrize("platform", [True, False])
@pytest.mark.parametrize("pool", [[], ["idle", "last"]])
@pytest.mark.parametrize("stores", [True, False])
def test_a_load_waits_for_the_computation_before_it(monkeypatch, platform, pool, stores):
    module = sys.modules[__name__]
    if platform:
        monkeypatch.setattr(module, "current_platform", Made(), raising=False)
    else:  # up to 0.22
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=Made()), raising=False)
    handler = Handler(stores, *(Stream(name) for name in pool))
    taken = legacy.around_load(handler.transfer_async, handler, (1,), {})
    if stores:  # which waits for it in vLLM's own code
        assert taken.after == []
        assert taken.name == ("last" if pool else "its own")
    else:
        assert taken.after == ["compute"]
        assert taken.name == ("last" if pool else "new")
    assert [one.name for one in handler._stream_pool] == pool[:-1]


def aborted(stored, loaded):
    """Abort a request; return the connector's scheduler and what vLLM's is answered."""
    planner = SimpleNamespace(
        _reqs_being_stored={} if stored is None else {"one": stored},
        _reqs_being_loaded={} if loaded is None else {"one": loaded},
    )
    answer = legacy.around_finished(
        lambda request, blocks: ("one" in planner._reqs_being_stored, {"a": 1}),
        planner,
        (SimpleNamespace(request_id="one"), [3]),
        {},
    )
    return planner, answer


def reported(planner, sent):
    """Return whose stores have ended, for vLLM's scheduler."""
    output = SimpleNamespace(finished_sending=sent, finished_recving={"one"})
    assert legacy.without_aborted_loads(lambda output: "done", planner, (output,), {}) == "done"
    return output.finished_sending


def test_a_load_alone_keeps_an_aborted_request():
    planner, answer = aborted(stored=set(), loaded={"block"})
    assert answer == (False, {"a": 1}), "freed when the load is reported"
    assert planner._reqs_being_stored == {}
    assert reported(planner, None) is None
    assert reported(planner, {"one", "two"}) == {"two"}
    assert reported(planner, {"one"}) == {"one"}, "another request of that name"


@pytest.mark.parametrize(
    ("stored", "loaded", "keeps"),
    [
        (None, {"block"}, False),
        ({"block"}, {"block"}, True),
        (set(), None, True),
        (None, None, False),
    ],
)
def test_other_ends_of_a_request_are_vllms(stored, loaded, keeps):
    planner, answer = aborted(stored, loaded)
    assert answer == (keeps, {"a": 1})
    assert reported(planner, {"one"}) == {"one"}
