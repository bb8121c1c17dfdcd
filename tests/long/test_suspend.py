"""A served engine is suspended and resumed: its pages are free meanwhile, its answers the same.

One engine per connector; what is asserted of it is asked one after the other, as each question
begins with what the one before it left.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from harness.engines import kill_points, plugins
from harness.engines.runs import Device, Run, prompts
from harness.engines.serving import Asked, answers, eventually, watched
from harness.kills import Served
from harness.serve import Server
from kvpatch import control
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice import ledger

COUNT = 6
TOKENS = 640  # of a prompt, in whole blocks
LONG = 40  # tokens to generate: a request that the engine stops in the middle of
LOADED = "vllm:external_prefix_cache_hits_total"
ON_THE_DEVICE = "vllm:prefix_cache_hits_total"
LENT = "vllm:kvpatch_device_lent_bytes"
SECONDS = "vllm:kvpatch_suspended_seconds_total"
SPILLED = "vllm:kvpatch_spilled_blocks_total"
RESTORED = "vllm:kvpatch_restored_blocks_total"
OFFLOADING = Run(blocks=300)
KINDS = {
    "offloading": OFFLOADING,
    "offloading, synchronous": replace(OFFLOADING, asynchronous=False),
    "offloading, runner v2": replace(OFFLOADING, runner="v2"),
    "eager": replace(OFFLOADING, simple="eager"),
    "lazy": replace(OFFLOADING, simple="lazy"),
}


def named(run: Run, name: str, **more: str) -> Run:
    """A run under a kvcached name of its own."""
    return run.within({"KVCACHED_IPC_NAME": name, **more})


@contextmanager
def started(run: Run, device: Device, folder: Path, asynchronous: bool = True) -> Iterator[Server]:
    """A server of a run."""
    plugged = [plugins.stop_when_running, *[plugins.schedule_asynchronously] * asynchronous]
    said = {"VLLM_LOGGING_LEVEL": "DEBUG"}  # how it schedules
    with watched(run.within(said), device, folder, *plugged) as server:
        assert ("Batch queue is enabled" in server.log) is asynchronous
        yield server


EVERY = pytest.mark.parametrize("suspended", KINDS, indirect=True)
# Scheduling and runner differ in how a request is stopped and goes on: the first three questions.
CONNECTORS = pytest.mark.parametrize("suspended", ["offloading", "eager", "lazy"], indirect=True)


@pytest.fixture(scope="module")
def suspended(request, device, tmp_path_factory):
    name = f"suspend-{os.getpid()}-{list(KINDS).index(request.param)}"
    run = named(KINDS[request.param], name)
    folder = tmp_path_factory.mktemp("serve")
    asynchronous = "synchronous" not in request.param
    with started(run, device, folder, asynchronous) as server:
        yield Asked(server, name, answers(server, COUNT))


@EVERY
def test_its_pages_are_free_and_it_answers_the_same_afterwards(suspended):
    engine = suspended.engine
    assert engine.said["why_not"] == ""
    plan = engine.plan()
    assert plan.resident >= COUNT * TOKENS // 32
    assert plan.lost == 0
    answer = engine.suspend(timeout=60)
    assert (answer.phase, answer.lost, answer.kept) == ("suspended", 0, answer.resident)
    page = answer.limit  # the one of block 0
    assert answer.mapped == page
    assert answer.freed > 0
    lent = engine.said["most"] // page * page - page
    assert eventually(lambda: suspended.server.metric(LENT) == lent)
    seconds = suspended.server.metric(SECONDS)
    waiting = suspended.begin(prompts(COUNT)[0])
    assert eventually(lambda: suspended.engine.said["waiting"] == 1)
    assert suspended.engine.said["mapped"] == page
    assert not waiting.done()
    before = suspended.loaded()
    assert engine.resume().phase == "runs"
    assert waiting.result(60)["tokens"] == suspended.first[0]
    suspended.again()
    assert eventually(lambda: suspended.loaded() - before == COUNT * TOKENS)
    assert eventually(lambda: suspended.server.metric(LENT) == 0)
    assert eventually(lambda: suspended.server.metric(SECONDS) > seconds)


@EVERY
def test_a_request_that_runs_is_preempted_and_goes_on(suspended):
    prompt = prompts(1, seed=11, max_tokens=LONG)[0]
    whole = suspended.server.complete(prompt)
    running = suspended.begin_and_see(prompt)
    assert suspended.engine.suspend(timeout=60).lost == 0
    assert not running.done()
    said = suspended.engine.said
    assert (said["running"], said["waiting"]) == (0, 1)
    suspended.engine.resume()
    assert running.result(120)["tokens"] == whole["tokens"]


@EVERY
def test_a_request_that_runs_may_finish_first(suspended):
    prompt = prompts(1, seed=12, max_tokens=LONG)[0]
    running = suspended.begin_and_see(prompt)
    suspended.engine.suspend(finish=True, timeout=120)
    assert len(running.result(10)["tokens"]) == LONG
    suspended.engine.resume()


@CONNECTORS
def test_a_request_that_is_aborted_while_it_waits_ends(suspended):
    suspended.engine.suspend(timeout=60)
    connection = HTTPConnection("127.0.0.1", suspended.server.port)
    body = json.dumps({"prompt": prompts(1)[0]["tokens"]})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert eventually(lambda: suspended.engine.said["waiting"] == 1)
    connection.close()
    assert eventually(lambda: suspended.engine.said["waiting"] == 0)
    assert suspended.engine.phase == "suspended"
    suspended.engine.resume()
    suspended.again()


@CONNECTORS
@pytest.mark.parametrize("by", ["kvpatch", "kvctl"])
def test_a_lower_limit_gives_pages_back_and_loses_nothing(suspended, by):
    from kvcached.cli.utils import update_kv_cache_limit

    suspended.again()
    most = suspended.engine.said["most"]
    if by == "kvpatch":
        assert suspended.engine.limit(most // 4).said["evicted_without_copy"] == 0
    else:
        update_kv_cache_limit(suspended.name, most // 4)
    assert eventually(lambda: suspended.engine.said["mapped"] <= most // 4)
    before = suspended.loaded()
    suspended.again()
    assert suspended.loaded() > before
    answer = suspended.engine.limit(most)
    assert (answer.limit, answer.said["evicted_without_copy"]) == (most, 0)
    suspended.again()


@CONNECTORS
def test_asked_by_several_at_once_and_again_and_again(suspended):
    asked = [suspended.pool.submit(suspended.engine.suspend, timeout=60) for _ in range(4)]
    assert {one.result(60).phase for one in asked} == {"suspended"}
    for _ in range(3):
        suspended.engine.resume()
        assert suspended.engine.suspend(timeout=60).phase == "suspended"
    suspended.engine.resume()
    suspended.again()


@CONNECTORS
def test_under_load_it_is_suspended_and_resumed_without_a_wrong_token(suspended):
    """A request may be anywhere: computed, generated, loaded, or preempted a moment ago."""
    stop = threading.Event()

    def load() -> list[tuple[int, Any]]:
        given = []
        while not stop.is_set():
            for index, prompt in enumerate(prompts(COUNT)):
                given.append((index, suspended.server.complete(prompt)))
        return given

    loads = [suspended.pool.submit(load) for _ in range(3)]
    for pause in (0.0, 0.01, 0.03, 0.1, 0.3, 1.0):
        suspended.engine.suspend(timeout=60)
        suspended.engine.resume()
        time.sleep(pause)  # so that requests are in different places the next time
    stop.set()
    for one in loads:
        for index, answer in one.result(300):
            assert answer["tokens"] == suspended.first[index]


@pytest.mark.parametrize(
    "changes",
    [{"ranks": 2}, {"model": "sliding"}, {"model": "latent"}],
    ids=["two ranks", "sliding", "latent"],
)
def test_in_lazy_mode_with_the_most_to_store_nothing_is_lost(device, tmp_path, changes):
    name = f"suspend-lazy-{'-'.join(map(str, changes.values()))}-{os.getpid()}"
    run = named(replace(OFFLOADING, simple="lazy", **changes), name)
    with started(run, device, tmp_path, asynchronous=run.ranks == 1) as server:
        first = answers(server, COUNT)
        answer = control.find(name).suspend(timeout=120)
        assert (answer.lost, answer.mapped) == (0, answer.limit)
        before = server.metric(LOADED)
        control.find(name).resume()
        assert answers(server, COUNT) == first
        assert eventually(lambda: server.metric(LOADED) - before == COUNT * TOKENS)
        spilled = server.metric(SPILLED, reason="suspend")
        assert server.metric(SPILLED) == spilled <= answer.said["planned"]
        assert eventually(lambda: server.metric(RESTORED) > 0)
        assert server.metric(RESTORED) <= spilled
        if run.ranks > 1:  # every rank has stored and loaded the same blocks
            assert server.metric(RESTORED) <= COUNT * TOKENS // 32


def test_a_small_tier_says_what_it_does_not_keep(device, tmp_path):
    name = f"suspend-small-{os.getpid()}"
    run = named(replace(OFFLOADING, cpu_blocks=60), name)
    with started(run, device, tmp_path) as server:
        first = answers(server, COUNT)
        engine = control.find(name)
        with pytest.raises(control.Refused, match=r"no room for \d+ blocks"):
            engine.suspend(whole=True)
        planned = engine.plan()
        answer = engine.suspend(timeout=60)
        assert answer.lost == planned.lost > 0
        assert answer.kept == 60
        engine.resume()
        assert answers(server, COUNT) == first


def test_its_pages_are_its_neighbours(tmp_path):
    """A device with room for one of the two."""
    device = Device(tmp_path, size="112MiB")
    names = [f"suspend-{word}-{os.getpid()}" for word in ("gives", "takes")]
    runs = [named(OFFLOADING, name) for name in names]
    with (
        started(runs[0], device, tmp_path / "gives") as gives,
        started(runs[1], device, tmp_path / "takes") as takes,
    ):
        first = answers(gives, COUNT)
        before = control.find(names[1]).said["mapped"]
        answer = control.find(names[0]).suspend(timeout=60)
        theirs = answers(takes, COUNT)
        assert control.find(names[1]).said["mapped"] > before
        control.find(names[1]).suspend(timeout=60)
        control.find(names[0]).resume()
        again = answers(gives, COUNT)
        control.find(names[1]).resume()
    assert answer.lost == 0
    assert theirs == again == first


@pytest.mark.parametrize("point", [*kill_points.PHASES, *kill_points.BACK, "load"])
def test_killed_on_its_way_there_or_back_it_leaves_nothing_behind(
    point, device, tmp_path, monkeypatch
):
    """A load is one of a request that has waited since the suspension."""
    waits = point == "load"
    # Lazy mode has the most to store; the copies that can be stopped are OffloadingConnector's.
    kind = OFFLOADING if waits else replace(OFFLOADING, simple="lazy")
    name = f"suspend-killed-{point.replace(' ', '-')}-{os.getpid()}"
    run = named(kind, name)
    environment = device.environ(run)
    for variable in (HOST_DEVICE.name, HOST_DEVICE_DIR.name):
        monkeypatch.setenv(variable, environment[variable])
    charged = ledger.usage()
    server = Served(tmp_path / "served", run, device, {"point": point, "nth": 1})
    try:
        while not server.ready():
            time.sleep(0.05)
        for prompt in prompts(COUNT, length=320):
            server.complete(prompt)
        engine = control.find(name)
        server.armed.touch()

        with ThreadPoolExecutor() as pool:

            def go() -> control.Answer:
                engine.suspend()
                if waits:
                    pool.submit(server.complete, prompts(COUNT, length=320)[0])
                    assert eventually(lambda: control.find(name).said["waiting"] == 1)
                return engine.resume()

            asked = pool.submit(go)
            assert eventually(server.reached.exists), asked
            pid = int(server.reached.read_text())
            if not waits:  # copies are a worker's
                assert pid == engine.said["pid"]
            os.kill(engine.said["pid"], signal.SIGKILL)
            if pid != engine.said["pid"]:
                os.kill(pid, signal.SIGKILL)
            if not waits and point != "runs":  # which say it before they stop
                with pytest.raises(control.Refused, match=name):
                    asked.result(60)
        server.end_alone(30)
    finally:
        server.close()
    assert eventually(lambda: ledger.usage() == charged)
    assert [one.name for one in control.engines() if one.name == name] == []


def test_an_idle_engine_gives_its_pages_back_by_itself(device, tmp_path):
    name = f"suspend-idle-{os.getpid()}"
    run = named(OFFLOADING, name, KVPATCH_IDLE="2s")
    with started(run, device, tmp_path) as server:
        first = answers(server, COUNT)
        full = control.find(name).said["mapped"]
        assert eventually(lambda: control.find(name).said["mapped"] < full // 4, 60)
        said = control.find(name).said
        assert (said["phase"], said["limit"]) == ("runs", said["most"])
        before = server.metric(ON_THE_DEVICE)
        assert answers(server, COUNT) == first

        def hits() -> tuple[int, int]:
            return int(server.metric(LOADED)), int(server.metric(ON_THE_DEVICE) - before)

        assert eventually(lambda: sum(hits()) == COUNT * TOKENS)
        # The page of block 0 is never unmapped, and other blocks are on it.
        beside = said["mapped"] * run.blocks // said["most"] - 1
        assert hits()[1] <= beside * 32
