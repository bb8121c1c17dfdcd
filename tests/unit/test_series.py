"""The series of an API server before its first request, and held seconds: no engine."""

import os
import time
from functools import partial
from threading import enumerate as enumerate_threads
from types import SimpleNamespace

import pytest
from fakes import transfer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpatch import state
from kvpatch.environ import HOST_POOL, KVCACHED_CONTIGUOUS
from kvpatch.patch import Outcome
from kvpatch.patches.fence.fence import Fence
from kvpatch.patches.metrics import hooks, snapshot
from kvpatch.telemetry import follower, reader, series
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry.prometheus import PREFIX, Classes, Metrics

FACTS = ["0.1.0", "0.28.0+cpu", "0.1.6", "contiguous"]


pytestmark = pytest.mark.usefixtures("place")


class Server:
    """An API server of one engine with Prometheus' own metrics."""

    def __init__(self, connector="OffloadingConnector", disks=(), configured=None, features=None):
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
            {"fence": "applied"} | (features or {}),
            configured or series.Configured((connector,) if connector else (), tuple(disks)),
        )

    def value(self, name, **labels):
        return self.registry.get_sample_value(PREFIX + name, self.labels | labels)

    def values(self, name, label, values, **labels):
        """The series of a name, by the values of a label."""
        return [self.value(name, **{label: one}, **labels) for one in values]

    def hear(self, holds=(), sender=None, **changes):
        """Observe a message of an engine that is described so."""
        self.metrics.observe((sender or series.Sender()).message(described(**changes), holds), 0)


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


def test_what_is_counted_is_zero_from_the_start(monkeypatch):
    server = Server()
    connector = "OffloadingConnector"
    outcomes, of = ("stored", "loaded", "dropped", "skipped"), {"connector": connector}
    assert server.values("offload_bytes_total", "outcome", outcomes[:2], **of) == [0] * 2
    assert server.values("offload_operations_total", "outcome", outcomes, **of) == [0] * 4
    assert server.value("fence_released_pages_total") == 0
    assert server.values("fence_held_pages_total", "rule", series.RULES) == [0, 0]
    assert server.value("fence_hold_seconds_count") == 0
    every = {one.name for one in (*series.COUNTERS, *series.HISTOGRAMS)}
    of_disks = {"disk_bytes", "disk_errors"}
    # Only a worker in the engine's process says what it verified, in debug mode.
    every -= {"verified_blocks"}
    plain = series.Configured((connector,))
    of_suspensions = {"suspended_seconds", "spilled_blocks", "restored_blocks"}
    of_some = of_disks | of_suspensions | {"host_pool_evicted_blocks"}
    assert set(series.at_start(plain)) == every - of_some
    monkeypatch.setenv(HOST_POOL.name, "1GiB")
    assert set(series.at_start(series.Configured((connector,), tuple(DISKS), True))) == every


DISKS = [("OffloadingConnector", "fs")]


def test_connectors_inside_a_multi_connector_have_series_of_their_own():
    names = ("OffloadingConnector", "SimpleCPUOffloadConnector")
    server = Server("MultiConnector", configured=series.Configured(names))
    every, stored = (*names, "MultiConnector"), {"outcome": "stored"}
    assert server.values("offload_bytes_total", "connector", every, **stored) == [0, 0, None]
    parts = {
        name: {"bytes": {"stored": 8 * many}, "operations": {"dropped": many}}
        for many, name in enumerate(names, 1)
    }
    server.hear(connector="MultiConnector", parts=parts)
    assert server.values("offload_bytes_total", "connector", every, **stored) == [8, 16, None]
    dropped = server.values("offload_operations_total", "connector", names, outcome="dropped")
    assert dropped == [1, 2]


def test_refused_calls_are_counted_from_zero():
    server = Server("")
    calls = ("suspend", "resume", "limit", "collective_rpc")
    assert server.values("refused_calls_total", "call", calls) == [0] * 4
    server.hear(refused={"limit": 2})
    assert server.value("refused_calls_total", call="limit") == 2


def test_what_was_given_back_is_counted_from_zero_where_an_engine_can_be_suspended():
    connector = "OffloadingConnector"
    server = Server(configured=series.Configured((connector,)), features={"suspend": "applied"})
    sender, reasons = series.Sender(), ("suspend", "limit", "idle")

    def values(of=server):
        names = ("suspended_seconds_total", "restored_blocks_total")
        return [*of.values("spilled_blocks_total", "reason", reasons), *map(of.value, names)]

    assert values() == [0] * 5
    for seconds, many in ((1.5, 1), (4.0, 2)):
        spilled = {"suspend": 3 * many, "limit": many, "idle": 0}
        suspended = {"seconds": seconds, "spilled": spilled, "restored": 2 * many}
        sender.more = partial(dict, suspended=suspended)
        server.hear(sender=sender)
    assert values() == [6, 2, 0, 4.0, 4]
    other = Server()
    other.hear(suspended=None)
    assert values(other) == [None] * 5


@pytest.mark.parametrize(
    ("first", "lent", "borrowed"), [(20, 32, 0), (16, 0, 0), (10, 0, 48), (None, None, None)]
)
def test_what_is_below_the_first_limit_is_lent_and_what_is_above_borrowed(first, lent, borrowed):
    """The limit is 16 pages of 8 bytes."""
    known = {} if first is None else {"first_limit_bytes": first * 8}
    server = Server()
    server.hear(**known)
    found = [server.value(f"device_{name}_bytes") for name in ("lent", "borrowed")]
    assert found == [lent, borrowed]


def test_only_debug_mode_has_verified_blocks():
    server = Server()
    server.hear(verified=None)
    assert server.value("verified_blocks_total", outcome="loaded") is None
    checked = {"stored": 3, "loaded": 2, "unverified": 0}
    server.hear(verified=checked)
    assert server.values("verified_blocks_total", "outcome", checked) == [3, 2, 0]


def test_what_one_tier_does_not_have_is_looked_up_in_the_next():
    server, sender = Server(disks=DISKS), series.Sender()

    def found():
        tiers = ("device", "cpu", "disk")
        return [server.values(f"{name}_tokens_total", "tier", tiers) for name in ("lookup", "hit")]

    assert found() == [[0, 0, 0]] * 2
    assert server.value("lost_hit_tokens_total") == 0
    disks = [{"connector": "OffloadingConnector", "tier": "fs", "errors": {}, "bytes": {}}]
    queries = {"device": 100, "tier": 60}
    later = {"device": 40, "tier": 30, "disk": 10}
    for hits, lost in (({"device": 40, "tier": 20}, 0), (later, 7)):
        now = {"hits": hits, "queries": queries, "lost_tokens": lost, "disks": disks}
        server.hear(sender=sender, **now)
    assert found() == [[100, 60, 40], [40, 20, 10]]
    assert server.value("lost_hit_tokens_total") == 7


def test_tiers_that_are_not_there_are_not_looked_up_in():
    counted = {"hits": {"device": 1}, "queries": {"device": 2}}
    assert series.counters(described(connector="", **counted))["hit_tokens"] == [(["device"], 1)]
    found = series.counters(described(**counted))["lookup_tokens"]
    assert found == [(["device"], 2), (["cpu"], 0)]
    assert "hit_tokens" not in series.counters(described(hits=None, queries=None))


def test_errors_of_a_disk_are_zero_from_the_start():
    server = Server(disks=DISKS * 2)  # of two tiers of one type
    of = {"connector": "OffloadingConnector", "tier": "fs"}
    kinds = ("store", "load", "damaged", "lookup", "late")
    assert server.values("disk_errors_total", "error", kinds, **of) == [0] * 5
    assert server.values("disk_bytes_total", "outcome", ("stored", "loaded"), **of) == [0, 0]
    assert Server().value("disk_errors_total", error="load", **of) is None


def test_two_disks_of_one_type_are_one_series():
    server, sender = Server(), series.Sender()
    one = {"connector": "OffloadingConnector", "tier": "fs"}
    disks = [
        one | {"errors": {"load": number}, "bytes": {"stored": 8 * number, "loaded": 0}}
        for number in (1, 2)
    ]
    server.hear(sender=sender, disks=disks)
    assert server.value("disk_errors_total", error="load", **one) == 3
    disks[1]["errors"] = {"load": 5}
    server.hear(sender=sender, disks=disks)
    assert server.value("disk_errors_total", error="load", **one) == 6
    assert server.value("disk_bytes_total", outcome="stored", **one) == 24


def test_the_bytes_of_every_tier_add_up_to_its_size():
    server = Server()
    tiers = [
        {"connector": name, "tier": "cpu", "used_bytes": used, "total_bytes": 100}
        for name, used in (("OffloadingConnector", 30), ("SimpleCPUOffloadConnector", 0))
    ]
    server.hear(tiers=tiers)
    for one, sizes in zip(tiers, ([30, 70], [0, 100]), strict=True):
        of = {"connector": one["connector"], "tier": "cpu"}
        assert server.values("tier_bytes", "state", ("used", "free"), **of) == sizes


def test_an_engine_without_a_connector_has_no_series_of_one():
    server = Server("")
    assert server.value("fence_released_pages_total") is None
    # Whether a tier would have found something is worth to know before there is one.
    lookups = {"lookup_tokens", "hit_tokens", "lost_hit_tokens"}
    assert set(series.at_start(series.Configured())) == lookups | {"refused_calls"}
    assert server.values("lookup_tokens_total", "tier", ("device", "cpu")) == [0, None]
    assert server.value("lost_hit_tokens_total") == 0


def test_the_states_of_a_gauge_add_up(monkeypatch):
    monkeypatch.setattr(series.time, "time", lambda: 1000.7)
    server = Server()
    names = dict(zip(series.INFO.labels, [*FACTS, "OffloadingConnector"], strict=True))
    assert server.value("info", **names) == 1
    assert server.value("feature", feature="fence", state="applied") == 1
    server.hear()
    assert server.values("device_bytes", "state", ("mapped", "reserved", "zero")) == [40, 16, 8]
    assert server.value("device_limit_bytes") == 128
    assert server.value("fence_held_bytes") == 8
    assert server.values("tier_blocks", "state", ("used", "free")) == [10, 90]
    assert server.value("elastic") == 1
    assert server.value("last_step_timestamp_seconds") == 998


def test_units_and_names_are_prometheus():
    units = ["bytes", "seconds", "blocks", "pages", "operations", "errors", "tokens", "calls"]
    units += ["requests"]
    for one in (*series.COUNTERS, *series.GAUGES, *series.HISTOGRAMS):
        assert one.name.rpartition("_")[2] in units or one.name in ("elastic", "suspended")
        assert not one.name.endswith("_total")  # which the client adds to counters
        assert one.help.endswith(".")
    assert b"# TYPE vllm:kvpatch_fence_hold_seconds histogram" in generate_latest(Server().registry)


def test_holds_are_observed_in_the_histogram():
    server = Server()
    server.metrics.observe({"at": 1.0, "counters": {}, "gauges": {}}, 0)  # before histograms
    assert server.value("fence_hold_seconds_count") == 0
    server.hear([0.0005, 2.0])
    assert server.value("fence_hold_seconds_count") == 2
    assert server.value("fence_hold_seconds_sum") == 2.0005
    assert server.values("fence_hold_seconds_bucket", "le", ("0.001", "3.0")) == [1, 2]


def test_a_hold_lasts_from_the_step_that_held_to_the_step_that_released():
    holds = series.Holds()
    for now, held in ((100.0, {1, 2}), (100.25, {2, 3}), (100.5, {3}), (101.0, set())):
        holds.look(held, now)
    assert holds.take() == [0.25, 0.5, 0.75]
    assert holds.take() == []
    # A page that a reset gave back did not wait for the next request.
    holds.look({1}, 100.0)
    holds.look(set(), 3700.0)
    assert holds.take() == [1.0]


def test_pages_are_compared_only_when_others_are_held():
    class Held(set):
        looks = 0

        def __iter__(self):
            self.looks += 1
            return super().__iter__()

    holds, held = series.Holds(), Held({1})
    for now in (100.0, 100.5, 101.5):
        holds.look(held, now, 1)
    assert held.looks == 1
    holds.look(set(), 102.0, 2)
    assert holds.take() == [2.0]


def test_the_holds_of_an_engine_reach_its_message(monkeypatch):
    fence = Fence(lambda number: (number * 4, number * 4 + 4), 1)
    engine, stats = SimpleNamespace(), SimpleNamespace(kv_connector_stats=None)
    totals = state.attach(engine, hooks.Totals("OffloadingConnector"))
    engine.scheduler = SimpleNamespace(has_unfinished_requests=lambda: False)
    monkeypatch.setattr(hooks, "fence_of", lambda core: fence)
    monkeypatch.setattr(snapshot, "engine", lambda core, totals: described())
    clock = iter([100.0, 100.5])
    monkeypatch.setattr("kvpatch.telemetry.counters.time.monotonic", lambda: next(clock, 101.0))
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


def engines_page(number=0, engine=None, **changes):
    """Publish an engine that this process has started."""
    device = described()["device"] | changes
    content = {"beats": True, "server": {"pid": os.getpid(), "started": 1}}
    writer = page.Writer(PIDS[number], "0.1.0")
    writer.write(content | {"engine": engine or described(device=device, index=number)})
    return writer


@pytest.fixture(autouse=True)
def living(monkeypatch):
    """Every page is of a process that runs."""
    monkeypatch.setattr(page, "life", lambda found: page.Life.RUNS)
    monkeypatch.setattr(reader, "_is_here", lambda name: True)


PIDS = (2000000001, 2000000002)


@pytest.fixture
def starts(monkeypatch):
    """Return what starts an API server of some engines, with vLLM's row for it."""
    monkeypatch.setattr(hooks.record, "features", {"fence": Outcome.APPLIED})
    monkeypatch.setenv(KVCACHED_CONTIGUOUS.name, "true")

    def start(engines, **extra):
        prom, fresh = SimpleNamespace(), CollectorRegistry()
        for name, kind in (("counter", Counter), ("gauge", Gauge), ("histogram", Histogram)):

            def made(kind=kind, multiprocess_mode="", **given):
                return kind(registry=fresh, **given)

            setattr(prom, f"_{name}_cls", made)
        tiers = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}]}
        connector = transfer("OffloadingConnector", **extra or tiers)
        config = SimpleNamespace(kv_transfer_config=connector)
        labels = {number: ["llama", str(number)] for number in range(engines)}
        names = ["model_name", "engine"]
        hooks.around_prometheus(lambda *given: None, prom, (config, names, labels), {})

        def value(name, engine=0, **labels):
            own = {"model_name": "llama", "engine": str(engine)} | labels
            return fresh.get_sample_value(PREFIX + name, own)

        return state.of(prom, Metrics), value

    return start


@pytest.mark.parametrize("engines", [1, 2])
def test_gauges_are_there_before_the_first_request(starts, engines):
    for number in range(engines):
        engines_page(number, total_pages=16 * (number + 1))
    _, value = starts(engines)
    limits = [value("device_limit_bytes", number) for number in range(engines)]
    assert limits == [128, 256][:engines]
    assert value("fence_released_pages_total") == 0
    of = {"connector": "OffloadingConnector", "tier": "fs"}
    assert value("disk_errors_total", error="late", **of) == 0


def test_a_server_begins_with_what_its_configuration_allows(starts, monkeypatch):
    monkeypatch.setattr(hooks.record, "features", {"suspend": Outcome.APPLIED})
    _, value = starts(1, cpu_bytes_to_use=1)
    assert value("suspended_seconds_total") == 0
    _, value = starts(1)  # with a secondary tier
    assert value("suspended_seconds_total") is None


def test_gauges_follow_an_engine_that_makes_no_step(starts):
    writer = engines_page(reserved_pages=0)
    metrics, value = starts(1)
    assert value("device_bytes", state="reserved") == 0
    del writer
    engines_page(reserved_pages=5)
    follower.look(metrics)
    assert value("device_bytes", state="reserved") == 40


@pytest.fixture
def read(monkeypatch):
    """The processes whose pages are read."""
    pids, original = [], page.read
    monkeypatch.setattr(page, "read", lambda path: pids.append(int(path.stem)) or original(path))
    return pids


@pytest.mark.parametrize(
    ("server", "namespace"),
    [(1, None), (os.getpid(), 1)],
    ids=["another server's", "of another pid namespace"],
)
def test_a_page_that_is_not_of_its_engines_is_read_again_once_it_is_replaced(
    starts, read, monkeypatch, server, namespace
):
    lives = {1: page.Life.FOREIGN}
    life = lambda found: lives.get(found.content["namespace"], page.Life.RUNS)  # noqa: E731
    monkeypatch.setattr(page, "life", life)
    engines_page(0)
    for pid in range(PIDS[1], PIDS[1] + 20):
        other = page.Writer(pid, "0.1.0")
        other._namespace = namespace or other._namespace
        own = {"beats": True, "server": {"pid": server, "started": 1}}
        other.write(own | {"engine": described(index=1)})
    read.clear()
    metrics, value = starts(2)
    assert len(read) == 21
    read.clear()
    follower.look(metrics)
    assert read == [PIDS[0]]
    (page.own_folder() / f"{PIDS[1]}.page").unlink()
    engines_page(1)  # with the pid of one that has ended
    read.clear()
    follower.look(metrics)
    assert read == list(PIDS)
    assert value("device_limit_bytes", 1) == 128
    assert len(metrics.others) == 19


def test_a_page_that_is_not_written_yet_is_read_again(starts, read):
    writer = page.Writer(PIDS[0], "0.1.0")
    read.clear()
    metrics, value = starts(1)
    assert read == [PIDS[0]]
    assert metrics.others == {}
    server = {"pid": os.getpid(), "started": 1}
    writer.write({"beats": True, "server": server, "engine": described(index=0)})
    follower.look(metrics)
    assert value("device_limit_bytes") == 128


def test_gauges_are_followed_by_a_thread_that_ends_with_them(starts, monkeypatch):
    monkeypatch.setattr(follower, "INTERVAL", 0.01)
    engines_page(reserved_pages=0)
    metrics, value = starts(1)
    engines_page(reserved_pages=5)
    assert within_seconds(lambda: value("device_bytes", state="reserved") == 40)
    metrics.fuse.off = "an error"
    assert within_seconds(lambda: "kvpatch-gauges" not in [one.name for one in enumerate_threads()])


def within_seconds(holds, seconds=10):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_a_page_does_not_undo_a_later_message(starts):
    engines_page(reserved_pages=5)
    metrics, value = starts(1)
    message = series.Sender().message(described())
    metrics.observe(message, 0)
    follower.look(metrics)  # what was written before the message was made
    assert value("device_bytes", state="reserved") == 16
    metrics.observe(message | {"at": message["at"] - 100, "counters": {}}, 0)
    follower.look(metrics)
    assert value("device_bytes", state="reserved") == 16


def test_pages_and_messages_go_on_when_the_clock_steps_back(starts, monkeypatch):
    """The stamp of a page before it must not be later than those of messages and pages after it."""
    metrics, value = starts(1)
    sender = series.Sender()
    for step, reserved in ((0.0, 5), (-1000.0, 6), (-1000.0, 7)):
        clock = SimpleNamespace(
            time=lambda step=step: 10_000.0 + time.monotonic() + step,
            monotonic=time.monotonic,
            sleep=time.sleep,
        )
        monkeypatch.setattr(series, "time", clock)
        monkeypatch.setattr(follower, "time", clock)
        if reserved == 6:
            device = described()["device"] | {"reserved_pages": reserved}
            metrics.observe(sender.message(described(device=device)), 0)
        else:
            engines_page(reserved_pages=reserved)
            follower.look(metrics)
        assert value("device_bytes", state="reserved") == reserved * 8


def test_a_page_that_does_not_say_which_engine_it_is_of_is_that_of_the_only_one(starts):
    engines_page(engine=described())
    assert starts(1)[1]("device_limit_bytes") == 128
    assert starts(2)[1]("device_limit_bytes") is None


def test_two_pages_of_one_number_are_nobodys(starts):
    engines_page(1, described(index=0))
    engines_page(0)
    assert starts(2)[1]("device_limit_bytes") is None


def test_the_last_step_of_a_page_is_as_of_the_page(starts, monkeypatch):
    monkeypatch.setattr(follower.time, "time", lambda: 1000.0 + time.monotonic())
    written = page.read(engines_page().path).content["written"]
    _, value = starts(1)
    assert value("last_step_timestamp_seconds") == int(1000.0 + written - 2.0)


def test_a_page_that_cannot_be_shown_leaves_the_series_on(starts):
    engines_page(engine={"index": 0})
    metrics, value = starts(1)
    follower.follow(metrics)
    assert metrics.fuse.off == ""
    assert value("fence_released_pages_total") == 0


@pytest.mark.parametrize(("contiguous", "layers"), [("true", 6), ("false", 1)])
def test_the_zero_page_is_of_the_layout(monkeypatch, contiguous, layers):
    monkeypatch.setenv(KVCACHED_CONTIGUOUS.name, contiguous)
    manager = SimpleNamespace(page_size=2 << 20, num_layers=3, num_kv_buffers=2)
    monkeypatch.setattr(snapshot.kvcached_api, "manager_of", lambda core: manager)
    assert snapshot.zero_page_bytes(None) == layers * (2 << 20)
