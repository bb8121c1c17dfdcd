"""What an operator sees of a served engine: /metrics and ``kvpatch status``.

One ``vllm serve`` with two API servers, each of which gets a part of the engine's
stats: what they show together must be what the load counted itself.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from harness import ROOT
from harness.engines.runs import ROOM, Run, block_bytes, prompts
from harness.engines.serving import eventually, watched
from harness.serve import Server
from kvpatch.telemetry import reader

COUNT = 12
DASHBOARD = ROOT / "docs/monitoring/grafana/dashboards/kvpatch.json"
# Of engines with secondary tiers, and in debug mode.
OF_OTHERS = {
    f"vllm:kvpatch_{name}_total" for name in ("disk_bytes", "disk_errors", "verified_blocks")
}
SAMPLE = re.compile(r"^(vllm:kvpatch_\w+)\{(.*)\} (\S+)$")


@dataclass
class Served:
    """A server under observation, and what the load on it counted."""

    server: Server
    counted: dict[str, int]

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Every series of ours, by its name and sorted labels of ours."""
        text = requests.get(f"{self.server.url}/metrics", timeout=120).text
        found: dict[tuple[str, ...], float] = {}
        for line in text.splitlines():
            if match := SAMPLE.match(line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
                assert labels.pop("engine") == "0"
                assert labels.pop("model_name")
                key = (match[1].removeprefix("vllm:kvpatch_"), *labels.values())
                assert key not in found, f"twice: {line}"
                found[key] = float(match[3])
        return found

    def status(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.server.kvpatch("status", *options)

    @property
    def environment(self) -> Mapping[str, str]:
        return self.server.environment

    def engine(self) -> dict[str, Any]:
        """The engine core's part of ``kvpatch status --json``."""
        processes = json.loads(self.status("--json").stdout)["processes"]
        (engine,) = [process for process in processes if "engine" in process]
        return dict(engine)


@pytest.fixture(scope="module")
def served(device, tmp_path_factory):
    # A small prefix cache, so that an idle engine has given pages back.
    own = {"KVCACHED_MAX_CACHED_TOKENS": "640", "KVCACHED_IPC_NAME": f"watching-{os.getpid()}"}
    folder = tmp_path_factory.mktemp("serve")
    run = Run().within(own)
    with watched(run, device, folder, fresh=True, api_server_count=2) as server:
        server.rpc("watch_transfers")
        for _ in range(2):
            for prompt in prompts(COUNT):
                server.complete(prompt)
        (counted,) = server.rpc("transfer_outcome")
        yield Served(server, counted)


def test_metrics_are_what_the_load_counted(served):
    size = block_bytes(Run())
    stored, loaded = (served.counted[name] * size for name in ("stored", "loaded"))
    assert loaded == COUNT * 640 // 32 * size

    def sums(name: str) -> dict[str, float]:
        found = served.metrics().items()
        return {key[2]: value for key, value in found if key[:2] == (name, "OffloadingConnector")}

    moved = {"stored": stored, "loaded": loaded}
    assert eventually(lambda: sums("offload_bytes_total") == moved), served.metrics()
    transfers = {
        f"{name}ed" if name == "load" else f"{name}d": served.server.metric(
            f"vllm:kv_offload_{name}_size_count"
        )
        for name in ("store", "load")
    }
    assert transfers["loaded"] > 0
    assert sums("offload_operations_total") == transfers | {"dropped": 0, "skipped": 0}


def test_both_api_servers_have_a_part_in_the_sums(served):
    """Otherwise the test above would not show that the parts add up."""
    log = served.server.log
    assert len(set(re.findall(r"\(ApiServer_(\d) pid=\d+\).*/v1/completions", log))) == 2


def test_gauges_of_an_idle_engine(served):
    assert eventually(lambda: served.metrics()[("fence_held_bytes",)] == 0)
    metrics = served.metrics()
    page = served.engine()["engine"]["device"]["page_bytes"]
    assert 0 < metrics["device_bytes", "mapped"] < metrics[("device_limit_bytes",)]
    assert metrics["device_bytes", "mapped"] % page == 0
    assert metrics["device_bytes", "zero"] == page
    assert metrics["tier_blocks", "used"] == served.counted["stored"]
    assert metrics["tier_blocks", "free"] == ROOM["llama"] - served.counted["stored"]
    assert metrics[("fence_hold_seconds_count",)] > 0
    assert metrics[("elastic",)] == 1
    assert metrics[("fence_released_pages_total",)] > 0


def test_the_info_gauge_says_what_runs(served):
    (info,) = [key for key in served.metrics() if key[0] == "info"]
    assert {"OffloadingConnector", "contiguous", "0.1.6"} <= set(info)
    assert ("feature", "fence", "applied") in served.metrics()


def test_status_says_the_same(served):
    def released() -> tuple[float, float]:
        shown = served.engine()["engine"]["fence"]["released"]
        return shown, served.metrics()[("fence_released_pages_total",)]

    # A step sends its stats at once; its page is written up to half a second later.
    assert eventually(lambda: len(set(released())) == 1), released()
    metrics, process = served.metrics(), served.engine()
    engine = process["engine"]
    size = block_bytes(Run())
    assert process["state"] == "runs"
    assert process["elastic"] is True
    assert process["roles"] == ["engine-core"]
    assert set(process["features"].values()) == {"applied", "not-needed"}
    assert process["features"]["fence"] == "applied"
    assert engine["bytes"] == {
        "stored": served.counted["stored"] * size,
        "loaded": served.counted["loaded"] * size,
    }
    assert engine["hits"]["tier"] == COUNT * 640
    assert engine["tier"] == {
        "used_blocks": served.counted["stored"],
        "total_blocks": ROOM["llama"],
    }
    assert engine["fence"]["holding"] == 0
    assert engine["fence"]["released"] == metrics[("fence_released_pages_total",)]
    device = engine["device"]
    assert device["mapped_pages"] * device["page_bytes"] == metrics["device_bytes", "mapped"]
    assert engine["requests"] == {"running": 0, "waiting": 0}


def test_every_process_has_a_page(served):
    processes = json.loads(served.status("--json").stdout)["processes"]
    roles = sorted("+".join(process["roles"]) for process in processes)
    assert {process["state"] for process in processes} == {"runs"}
    assert roles.count("worker") == roles.count("engine-core") == 1
    assert set(roles) == {"engine-core", "frontend", "worker"}
    (worker,) = [process for process in processes if process["roles"] == ["worker"]]
    assert worker["elastic"] is True


def test_status_in_text(served):
    done = served.status()
    assert done.returncode == 0, done.stdout
    head, line, *_ = done.stdout.splitlines()  # and the device
    cells = dict(zip(re.split(r"  +", head), re.split(r"  +", line), strict=True))
    assert cells["PORT"] == str(served.server.port)
    assert cells["NAME"] == served.environment["KVCACHED_IPC_NAME"]
    assert cells["STATE"] == "runs"
    done = served.status("-v")
    assert done.returncode == 0, done.stdout
    assert "KV on elastic memory: yes" in done.stdout
    assert "1.00 loaded for each stored" in done.stdout
    assert f"{COUNT * 640} came from the tier" in done.stdout
    pid = served.engine()["pid"]
    assert f"pid {pid}  engine-core  kvpatch" in served.status("--pid", str(pid)).stdout


def test_status_of_an_engine_at_work(served):
    """It answers while a step is under way, and shows the request that runs."""
    body = {"prompt": [5] * 40, "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():  # one may be over before anybody has looked
            answer = requests.post(f"{served.server.url}/v1/completions", json=body, timeout=600)
            assert answer.ok, answer.text

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            assert eventually(lambda: served.engine()["engine"]["requests"]["running"] == 1)
        finally:
            ended.set()
        asking.result()
    assert eventually(lambda: served.engine()["engine"]["requests"]["running"] == 0)


def test_the_page_is_private(served):
    folder = Path(served.environment["KVPATCH_STATUS_DIR"]) / f"kvpatch-status-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.page")} == {0o600}


def queries() -> list[str]:
    """Every query of the dashboard, for all models and five minutes."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        re.sub(r'"\$\w+"', '".*"', target["expr"]).replace("$__rate_interval", "5m")
        for panel in panels
        if panel["type"] != "row"
        for target in panel["targets"]
    ]


def test_every_series_of_the_dashboard_is_there(served):
    text = requests.get(f"{served.server.url}/metrics", timeout=120).text
    there = set(re.findall(r"^([\w:]+)[{ ]", text, re.MULTILINE))
    asked = set(re.findall(r"vllm:\w+", " ".join(queries())))
    assert asked
    assert asked - OF_OTHERS <= there


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_real_prometheus_reads_it_and_answers_the_dashboard(served, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = (ROOT / "docs/monitoring/prometheus.yml").read_text()
    config = config.replace("127.0.0.1:8000", f"127.0.0.1:{served.server.port}")
    shutil.copy(ROOT / "docs/monitoring/alerts.yml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(config.replace("5s", "1s"))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml"]
    command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={address}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as prometheus:

        def results(query: str) -> list[Any]:
            try:
                got = requests.get(
                    f"http://{address}/api/v1/query", params={"query": query}, timeout=120
                )
            except requests.ConnectionError:
                return []  # not up yet
            if got.status_code == requests.codes.service_unavailable:
                return []  # up, and not ready
            answer = got.json()
            assert answer["status"] == "success", (query, answer)
            return list(answer["data"]["result"])

        try:
            info = "count_over_time(vllm:kvpatch_info[5m]) >= 3"
            assert eventually(lambda: bool(results(info)), 60)
            for query in queries():
                # What only divides by what has happened meanwhile has nothing to say at rest.
                other = OF_OTHERS & set(re.findall(r"vllm:\w+", query))
                if "> 0" not in query and "/" not in query and not other:
                    assert results(query), query
                else:
                    results(query)
            (stored,) = results('vllm:kvpatch_offload_bytes_total{outcome="stored"}')
            now = served.metrics()["offload_bytes_total", "OffloadingConnector", "stored"]
            assert float(stored["value"][1]) == now
        finally:
            prometheus.terminate()


# These end the server or stop it; they stay last.


def test_an_engine_that_hangs(served, monkeypatch):
    """Its worker is stopped in the middle of a request, and the step never ends."""
    processes = json.loads(served.status("--json").stdout)["processes"]
    (worker,) = [process["pid"] for process in processes if process["roles"] == ["worker"]]
    engine = served.engine()["pid"]
    monkeypatch.setenv("KVPATCH_STATUS_DIR", served.environment["KVPATCH_STATUS_DIR"])
    monkeypatch.setattr(reader, "STUCK", 1.0)  # and not the half minute that it takes an operator
    with ThreadPoolExecutor() as threads:
        os.kill(worker, signal.SIGSTOP)
        try:
            answer = threads.submit(served.server.complete, prompts(1, seed=8)[0])
            assert eventually(lambda: reader.one(engine).state is reader.State.STUCK)
            line = reader.one(engine).line
            assert line.startswith(f"pid {engine} hangs: 1 requests run and no step has ended for")
        finally:
            os.kill(worker, signal.SIGCONT)
        assert len(answer.result()["tokens"]) == 8
    assert eventually(lambda: reader.one(engine).state is reader.State.RUNS)


def test_an_engine_that_is_stopped(served):
    pid = served.engine()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: served.status("--pid", str(pid)).returncode == 1)
        (line,) = served.status("--pid", str(pid)).stdout.splitlines()
        assert line.startswith(f"pid {pid} is stopped (kill -CONT {pid} continues it)")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: served.status("--pid", str(pid)).returncode == 0)


def test_an_engine_that_was_killed(served):
    """With its API servers, as when a container ends: they would clear up after it."""
    pid = served.engine()["pid"]
    os.killpg(served.server.process.pid, signal.SIGKILL)
    assert eventually(lambda: not served.server.processes())
    assert eventually(lambda: "exited without cleanup" in served.status("--pid", str(pid)).stdout)
    (line,) = served.status("--pid", str(pid)).stdout.splitlines()
    assert line.startswith(f"pid {pid} exited without cleanup (killed?), last seen")
    assert served.status().returncode == 1


def test_what_the_killed_engine_left_behind_is_named_and_stays(served):
    """Its name is the operator's."""
    name = served.environment["KVCACHED_IPC_NAME"]
    left = [Path("/dev/shm") / name, *Path("/tmp").glob(f"kvcached-tp-{name}-*")]
    assert len(left) == 2  # the pool, and the folder of its workers' sockets
    try:
        listed = ("clean", "--json")  # as text they are counted where others left many
        for path in left:
            assert eventually(
                lambda path=path: str(path) in served.server.kvpatch(*listed).stdout, 120
            )
            assert path.exists()
    finally:
        left[0].unlink()
        shutil.rmtree(left[1])
        # Tests that come after this one share the folder.
        for page in Path(served.environment["KVPATCH_STATUS_DIR"]).glob("kvpatch-status-*/*.page"):
            page.unlink()


@pytest.fixture
def alone(request, device, tmp_path):
    """A server whose pages are in a place of their own."""
    name = f"alone-{request.node.name[-8:]}-{os.getpid()}"
    run = Run().within({"KVCACHED_IPC_NAME": name, "KVPATCH_STATUS_DIR": str(tmp_path)})
    with watched(run, device, tmp_path / "serve", fresh=True) as server:
        yield Served(server, {})
    (Path("/dev/shm") / name).unlink(missing_ok=True)


def test_a_server_that_is_asked_to_stop_has_not_crashed(alone):
    """vLLM kills its engines when it stops, and their pages stay."""
    there, server = alone, alone.server
    metrics = there.metrics()  # before the first request
    assert metrics["device_bytes", "zero"] > 0
    assert metrics[("fence_released_pages_total",)] == 0
    pid = there.engine()["pid"]
    os.kill(server.process.pid, signal.SIGTERM)
    assert eventually(lambda: server.process.poll() is not None)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
    (said,) = there.status("--pid", str(pid)).stdout.splitlines()
    assert "killed?" not in there.status().stdout
    if said != f"pid {pid} is not running and has left no status page":
        assert said.startswith(f"pid {pid} ended with its server")


def test_a_server_whose_engine_was_killed_has_not_ended_as_one_that_was_asked_to(alone):
    """As by the OOM killer: the server notices, and ends in order."""
    there, server = alone, alone.server
    pid = there.engine()["pid"]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: server.process.poll() is not None)
    (said,) = there.status("--pid", str(pid)).stdout.splitlines()
    assert said.startswith(f"pid {pid} exited without cleanup (killed?)")
    every = there.status()
    assert every.returncode == 1
    assert f"pid {server.process.pid} ended because its engine had died" in every.stdout
