"""The series of an API server before its first request, and held seconds: no engine."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpatch import state
from kvpatch.environ import HOST_POOL, KVCACHED_CONTIGUOUS, STATUS_DIR
from kvpatch.patch import Outcome
from kvpatch.patches.fence.fence import Fence
from kvpatch.patches.metrics import hooks, snapshot
from kvpatch.telemetry import series
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry.prometheus import PREFIX, Classes, Metrics

FACTS = ["0.1.0", "0.28.0+cpu", "0.1.6", "contiguous"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv(STATUS_DIR.name, str(tmp_path))


class Server:
    """An API server of one engine with Prometheus' own metrics."""

    def __init__(self, connector="OffloadingConnector"):
        self.registry = CollectorRegistry()

        def of(kind):
            def made(**given):
                given.pop("multiprocess_mode", None)
                return kind(registry=self.registry, **given)

            return made

        self.classes = Classes(of(Counter), of(Gauge), of(Histogram))
        self.labels = {"model_name": "llama", "engine": "0"}
        self.metrics = Metrics(
            self.classes,
            list(self.labels),
            {0: ["llama", "0"]},
            [*FACTS, connector],
            {"fence": "applied"},
        )

    def value(self, name, **labels):
        return self.registry.get_sample_value(PREFIX + name, self.labels | labels)


def described(**changes):
    return {
        "since_step": 2.0,
        "device": {"page_bytes": 8, "mapped_pages": 5, "reserved_pages": 2, "total_pages": 16},
        "zero_page_bytes": 8,
        "elastic": True,
        "fence": {
            "holding": 1,
            "released": 4,
            "held_for_plan": 3,
            "held_for_transfer": 2,
            "longest_hold": 1,
        },
        "tier": {"used_blocks": 10, "total_blocks": 100},
        "connector": "OffloadingConnector",
        "bytes": {"stored": 3, "loaded": 1},
        "operations": {"stored": 1, "loaded": 1, "dropped": 0, "skipped": 0},
    } | changes


def test_what_is_counted_is_zero_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the info gauge existed before the first request: absent() fired at each roll-out."""
    server = Server()
    connector = "OffloadingConnector"
    for outcome in ("stored", "loaded"):
        assert server.value("offload_bytes_total", connector=connector, outcome=outcome) == 0
    for outcome in ("stored", "loaded", "dropped", "skipped"):
        assert server.value("offload_operations_total", connector=connector, outcome=outcome) == 0
    assert server.value("fence_released_pages_total") == 0
    assert [server.value("fence_held_pages_total", rule=rule) for rule in series.RULES] == [0, 0]
    assert server.value("fence_hold_seconds_count") == 0
    every = {one.name for one in (*series.COUNTERS, *series.HISTOGRAMS)}
    assert set(series.at_start(connector)) == every - {"host_pool_evicted_blocks"}
    monkeypatch.setenv(HOST_POOL.name, "1GiB")
    assert set(series.at_start(connector)) == every


def test_an_engine_without_a_connector_has_no_series_of_one():
    assert Server("").value("fence_released_pages_total") is None
    assert series.at_start("") == {}


def test_a_label_has_one_value_and_one_meaning():
    """vllm="vllm 0.28.0+cpu" had the name in its value; features="a=applied,b=..." all of them."""
    server = Server()
    names = dict(zip(series.INFO.labels, [*FACTS, "OffloadingConnector"], strict=True))
    assert server.value("info", **names) == 1
    assert server.value("feature", feature="fence", state="applied") == 1


def test_the_states_of_a_gauge_add_up():
    """Held was a part of mapped, and total a limit, so that a sum over states meant nothing."""
    server = Server()
    server.metrics.observe(series.Sender().message(described()), 0)
    states = ("mapped", "reserved", "zero")
    assert [server.value("device_bytes", state=one) for one in states] == [40, 16, 8]
    assert server.value("device_limit_bytes") == 128
    assert server.value("fence_held_bytes") == 8
    assert [server.value("tier_blocks", state=one) for one in ("used", "free")] == [10, 90]
    assert server.value("elastic") == 1


def test_the_last_step_is_a_time(monkeypatch):
    monkeypatch.setattr(series.time, "time", lambda: 1000.7)
    server = Server()
    server.metrics.observe(series.Sender().message(described()), 0)
    assert server.value("last_step_timestamp_seconds") == 998


def test_units_and_names_are_prometheus():
    units = ("_bytes", "_seconds", "_blocks", "_pages", "_operations")
    for one in (*series.COUNTERS, *series.GAUGES, *series.HISTOGRAMS):
        assert one.name.endswith(units) or one.name == "elastic"
        assert not one.name.endswith("_total")  # which the client adds to counters
        assert one.help.endswith(".")
    assert b"# TYPE vllm:kvpatch_fence_hold_seconds histogram" in generate_latest(Server().registry)


# Held seconds


def test_holds_are_observed_in_the_histogram():
    server = Server()
    server.metrics.observe(series.Sender().message(described(), [0.0005, 2.0]), 0)
    assert server.value("fence_hold_seconds_count") == 2
    assert server.value("fence_hold_seconds_sum") == 2.0005
    assert server.value("fence_hold_seconds_bucket", le="0.001") == 1
    assert server.value("fence_hold_seconds_bucket", le="3.0") == 2


def test_a_message_of_an_engine_before_histograms_is_recorded():
    server = Server()
    server.metrics.observe({"at": 1.0, "counters": {}, "gauges": {}}, 0)
    assert server.value("fence_hold_seconds_count") == 0


def test_a_hold_lasts_from_the_step_that_held_to_the_step_that_released():
    holds = series.Holds()
    for now, held in ((100.0, {1, 2}), (100.25, {2, 3}), (100.5, {3}), (101.0, set())):
        holds.look(held, now)
    assert holds.take() == [0.25, 0.5, 0.75]
    assert holds.take() == []


def test_a_page_that_a_reset_gave_back_did_not_wait_for_the_next_request():
    holds = series.Holds()
    holds.look({1}, 100.0)
    holds.look(set(), 3700.0)
    assert holds.take() == [1.0]


def test_the_holds_of_an_engine_reach_its_message(monkeypatch):
    fence = Fence(lambda number: (number * 4, number * 4 + 4), 1)
    engine, stats = SimpleNamespace(), SimpleNamespace(kv_connector_stats=None)
    totals = state.attach(engine, hooks.Totals("OffloadingConnector"))
    engine.scheduler = SimpleNamespace(running=[], waiting=[])
    monkeypatch.setattr(hooks, "fence_of", lambda core: fence)
    monkeypatch.setattr(snapshot, "engine", lambda core, totals: described())
    clock = iter([100.0, 100.5])
    monkeypatch.setattr("kvpatch.telemetry.counters.time.monotonic", lambda: next(clock))
    outputs = {0: SimpleNamespace(scheduler_stats=stats)}
    fence.split([(1, [5])], can_plan=True)
    assert set(fence.held) == {5}
    hooks.after_step(lambda: ({}, True), engine, (), {})
    fence.plan([], 1)
    assert fence.split([(1, [5])], can_plan=True) == ([5], [])
    hooks.after_step(lambda: (outputs, True), engine, (), {})
    assert totals.fuse.off == ""
    message = stats.kv_connector_stats[series.KEY]
    assert message["histograms"] == {"fence_hold_seconds": [([], [0.5])]}


# Before the first request


@pytest.mark.parametrize("engines", [1, 2])
def test_gauges_are_there_before_the_first_request(monkeypatch, engines):
    """Memory that is reserved at idle was invisible. Of two engines it is not told whose it is."""
    writer = page.Writer(os.getpid(), "0.1.0")
    server = {"pid": os.getppid(), "started": 1}
    writer.write({"beats": True, "server": server, "engine": described()})
    found = Server()
    monkeypatch.setattr(hooks.record, "features", {"fence": Outcome.APPLIED})
    monkeypatch.setenv(KVCACHED_CONTIGUOUS.name, "true")
    prom = SimpleNamespace()
    fresh = CollectorRegistry()
    for name, kind in (("counter", Counter), ("gauge", Gauge), ("histogram", Histogram)):

        def made(kind=kind, multiprocess_mode="", **given):
            return kind(registry=fresh, **given)

        setattr(prom, f"_{name}_cls", made)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="OffloadingConnector"))
    labels = {number: ["llama", str(number)] for number in range(engines)}
    hooks.around_prometheus(lambda *given: None, prom, (config, list(found.labels), labels), {})
    value = fresh.get_sample_value(f"{PREFIX}device_limit_bytes", found.labels)
    assert value == (128 if engines == 1 else None)
    assert fresh.get_sample_value(f"{PREFIX}fence_released_pages_total", found.labels) == 0


@pytest.mark.parametrize(("contiguous", "layers"), [("true", 6), ("false", 1)])
def test_the_zero_page_is_of_the_layout(monkeypatch, contiguous, layers):
    monkeypatch.setenv(KVCACHED_CONTIGUOUS.name, contiguous)
    manager = SimpleNamespace(page_size=2 << 20, num_layers=3, num_kv_buffers=2)
    monkeypatch.setattr(snapshot.kvcached_api, "manager_of", lambda core: manager)
    assert snapshot.zero_page_bytes(None) == layers * (2 << 20)
