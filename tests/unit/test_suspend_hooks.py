"""Which engines can be suspended, and how a question and a step reach a suspension."""

import queue
import re
from types import SimpleNamespace

import pytest
from fakes import module, raising, transfer
from suspend_world import Pause, Scheduler

from kvpatch import admitted, state
from kvpatch.environ import HOST_POOL, duration
from kvpatch.patches.offloading import together
from kvpatch.patches.suspend import hooks, offloading, rules, server, simple
from kvpatch.patches.suspend.giving import Giving
from kvpatch.patches.suspend.hold import Hold
from kvpatch.patches.suspend.server import Question
from kvpatch.patches.suspend.spill import Spill
from kvpatch.patches.suspend.suspension import Cannot, Suspension
from kvpatch.patches.suspend.watch import Look
from kvpatch.status import record
from kvpatch.versions import Facts, Installed


class OffloadingConnector(SimpleNamespace):
    """vLLM's, by its name."""


class SimpleCPUOffloadConnector(SimpleNamespace):
    """vLLM's, by its name."""


class MultiConnector(SimpleNamespace):
    """vLLM's, by its name."""


@pytest.fixture
def vllm(monkeypatch):
    """Let this process have a release of vLLM."""

    def have(release):
        facts = Facts(
            Installed.release("vllm", release), Installed.release("kvcached", "0.1.6"), {}
        )
        monkeypatch.setattr(record, "facts", facts)
        monkeypatch.setattr(offloading.OffloadingTier, "__init__", lambda self, planner: None)
        monkeypatch.setattr(offloading.OffloadingTier, "why_not", lambda self: "")
        return facts

    monkeypatch.setattr(together, "turned_on", lambda config, facts: [])
    have("0.32.0")
    return have


def engine_with(worlds, connector):
    world = worlds()
    world.scheduler.connector = connector
    world.vllm_config = config_with(None if connector is None else type(connector).__name__)
    return world


def why_not(world):
    try:
        hooks.make(world).plan()
    except Cannot as cannot:
        return str(cannot)
    return ""


@pytest.mark.parametrize(
    "connector",
    [
        OffloadingConnector(connector_scheduler=SimpleNamespace()),
        SimpleCPUOffloadConnector(scheduler_manager=SimpleNamespace(cpu_block_pool=None)),
    ],
    ids=["offloading", "simple"],
)
def test_an_engine_with_one_of_the_two_connectors_can_be_suspended(
    worlds, vllm, connector, monkeypatch
):
    for tier in (offloading.OffloadingTier, simple.SimpleTier):
        monkeypatch.setattr(tier, "capacity", lambda self: 10)
    world = engine_with(worlds, connector)
    assert why_not(world) == ""
    owner = getattr(connector, "connector_scheduler", None) or connector.scheduler_manager
    spill = state.find(owner, Spill)
    giving = state.find(world, Giving)
    assert spill is not None
    assert giving is not None
    assert giving is state.find(world.manager, Giving)


def test_every_other_engine_has_a_sentence(worlds, vllm):
    assert why_not(engine_with(worlds, None)).startswith("it has no KV connector")
    multi = engine_with(worlds, MultiConnector())
    assert why_not(multi) == "suspending is not validated with MultiConnector"
    assert state.find(multi, Giving) is None
    vllm("0.27.1")
    offloaded = engine_with(worlds, OffloadingConnector(connector_scheduler=SimpleNamespace()))
    why = f"suspending is validated {admitted.with_connectors('idle')} only"
    assert why_not(offloaded) == why
    with pytest.raises(Cannot, match=re.escape(why)):
        state.of(offloaded, Suspension).suspend(False, False, None)


def test_what_did_not_run_with_a_suspension_has_a_sentence(worlds, vllm, monkeypatch):
    monkeypatch.setattr(together, "turned_on", lambda config, facts: ["sleep", "pooling"])
    offloaded = engine_with(worlds, OffloadingConnector(connector_scheduler=SimpleNamespace()))
    assert why_not(offloaded) == "suspending is not validated with a pooling model"


def test_simple_in_the_host_pool_keeps_nothing_for_sure(worlds, vllm, monkeypatch):
    """Other engines evict from it; of OffloadingConnector what was stored is a floor."""
    monkeypatch.setattr(
        record, "facts", record.facts._replace(environment={HOST_POOL.name: "1GiB"})
    )
    pooled = SimpleCPUOffloadConnector(scheduler_manager=SimpleNamespace(cpu_block_pool=None))
    world = engine_with(worlds, pooled)
    assert why_not(world) == (
        "the CPU tier of SimpleCPUOffloadConnector is in the host pool (KVPATCH_HOST_POOL), where "
        "others may evict what it kept"
    )
    assert state.find(world, Giving) is None


def test_a_tier_that_cannot_says_why(worlds, vllm, monkeypatch):
    monkeypatch.setattr(offloading.OffloadingTier, "why_not", lambda self: "it is full of stars")
    planner = SimpleNamespace()
    world = engine_with(worlds, OffloadingConnector(connector_scheduler=planner))
    assert why_not(world) == "it is full of stars"
    assert state.find(planner, Spill) is None


def test_an_engine_in_the_callers_process_does_not_listen(worlds):
    world = worlds()
    hooks.around_engine_start(lambda: None, world, (), {})
    assert state.find(world, Suspension) is None


def test_questions_are_taken_and_vllms_own_requests_passed_on(worlds):
    world = worlds(gives=True)
    state.attach(world, world.suspension)
    state.attach(world, world.giving)
    passed = []

    def handle(request_type, request):
        passed.append(request)

    question, look = Question({"verb": "suspend", "plan": True}), Look(rests=False)
    for request in (question, look, b"", None):
        server.around_client_request(handle, world, (b"wake", request), {})
    assert passed == [b"", None]
    assert question.said["resident"] == 0
    assert look.taken.is_set()
    server.around_client_request(handle, world, (), {"request_type": 1, "request": "add"})
    assert passed[-1] == "add"


def test_a_step_goes_on_with_both(worlds, monkeypatch):
    world = worlds(gives=True)
    assert hooks.after_engine_step(lambda: True, world, (), {}) is True
    order = []
    monkeypatch.setattr(world.suspension, "advance", lambda: order.append("suspension"))
    monkeypatch.setattr(world.giving, "advance", lambda: order.append("giving"))
    state.attach(world, world.suspension)
    state.attach(world, world.giving)
    assert hooks.after_engine_step(lambda: False, world, (), {}) is False
    assert order == ["giving", "suspension"], "what the limit did is told by the suspension"


def test_an_engine_is_stepped_while_somebody_needs_it():
    scheduler = Scheduler()
    assert not hooks.around_has_requests(lambda: False, scheduler, (), {})
    hold = state.attach(scheduler, Hold())
    assert not hooks.around_has_requests(lambda: False, scheduler, (), {})
    hold.step_for("limit", True)
    hold.step_for("suspension", True)
    hold.step_for("limit", False)
    assert hooks.around_has_requests(lambda: False, scheduler, (), {})
    hold.step_for("suspension", False)
    hold.step_for("suspension", False)
    assert not hooks.around_has_requests(lambda: False, scheduler, (), {})
    assert hooks.around_has_requests(lambda: True, scheduler, (), {})


def test_a_pause_of_vllm_alone_is_passed_on():
    scheduler, told = Scheduler(), []
    hooks.around_pause_state(told.append, scheduler, (Pause.PAUSED_NEW,), {})
    assert told == [Pause.PAUSED_NEW]


def test_at_its_end_it_listens_no_longer(worlds):
    class Listening:
        closed = False

        def close(self):
            self.closed = True

    world = worlds()
    both = {hooks.Server: Listening(), hooks.Watch: Listening()}
    world.kvpatch = both
    assert hooks.before_engine_shutdown(lambda: "ended", world, (), {}) == "ended"
    assert all(one.closed for one in both.values())
    assert hooks.before_engine_shutdown(lambda: "ended", worlds(), (), {}) == "ended"


def test_an_engine_that_cannot_listen_starts_nevertheless(worlds, vllm, monkeypatch, caplog):

    monkeypatch.setattr(hooks, "Server", raising(OSError("no room")))
    module(monkeypatch, "kvcached.utils", DEFAULT_IPC_NAME="chat")
    world = engine_with(worlds, None)
    world.input_queue = queue.Queue()
    hooks.around_engine_start(lambda: None, world, (), {})
    assert state.find(world, Suspension) is not None


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("30 s", 30), ("30", 30), ("0.5min", 30), ("2h", 7200)]
)
def test_times_without_requests(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["0", "0s", "-1s", "30x", "soon", ""])
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match="not a duration"):
        duration(text)


def config_with(connector, **extra):
    told = None if connector is None else transfer(connector, **extra)
    return SimpleNamespace(kv_transfer_config=told, cache_config=SimpleNamespace(block_size=32))


def refused(config, release="0.32.0", idle="30s"):
    vllm, kvcached = Installed.release("vllm", release), Installed.release("kvcached", "0.1.6")
    facts = Facts(vllm, kvcached, {"KVPATCH_IDLE": idle})
    return [rule.code for rule in rules.RULES if rule.refusal(config, facts)]


def test_idle_is_refused_where_nothing_could_be_stored():
    tiers = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}]}
    inside = {"connectors": [{"kv_connector": "OffloadingConnector"}]}
    assert refused(config_with("OffloadingConnector")) == []
    assert refused(config_with("SimpleCPUOffloadConnector")) == []
    assert refused(config_with(None)) == ["KVP371"]
    assert refused(config_with("LMCacheConnectorV1")) == ["KVP371"]
    assert "KVP371" not in refused(config_with("OffloadingConnector", **tiers))
    assert refused(config_with("MultiConnector", **inside)) == ["KVP371"]
    assert refused(config_with("OffloadingConnector"), "0.27.1") == ["KVP370"]
    for release in ("0.27.1", "0.32.0"):
        assert refused(config_with(None), release, idle="") == []
