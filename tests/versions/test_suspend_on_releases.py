"""Suspending, limits and sleep mode on the other releases that they are validated with."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from harness import releases
from harness.engines.runs import Device, Run
from harness.engines.serving import answers, eventually
from harness.kills import Served
from kvpatch import admitted, control
from kvpatch.patches.host_device.rules import SLEEPING

IDLE, LIMITED = (admitted.releases_with(name, "Offloading") for name in ("idle", "first limit"))
OTHERS = tuple(one for one in IDLE if one != releases.newest_built())
COUNT = 6
TOKENS = 640  # of a prompt, in whole blocks
LOADED = "vllm:external_prefix_cache_hits_total"
OFFLOADING = Run(blocks=300)
KINDS = {
    "offloading": OFFLOADING,
    "eager": replace(OFFLOADING, simple="eager"),
    "lazy": replace(OFFLOADING, simple="lazy"),
}


@contextmanager
def served(run: Run, device: Device, folder: Path) -> Iterator[Served]:
    """A server of a run that is ready."""
    server = Served(folder / "served", run, device, {})
    try:
        while not server.ready():
            time.sleep(0.05)
        yield server
    finally:
        server.close()


def of(kind: str, vllm: str, **more: str) -> tuple[str, Run]:
    """A run of a kind on a release, and the name of its engine."""
    name = f"suspend-{vllm}-{kind}-{os.getpid()}"
    environment = {"KVCACHED_IPC_NAME": name, "VLLM_SERVER_DEV_MODE": "1", **more}
    return name, replace(KINDS[kind], vllm=vllm, environment=tuple(environment.items()))


@pytest.mark.parametrize("vllm", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_and_every_page_is_given_back(kind, vllm, device, tmp_path):
    name, run = of(kind, vllm)
    with served(run, device, tmp_path) as server:
        first = answers(server, COUNT)
        engine = control.find(name)
        assert engine.said["why_not"] == ""
        answer = engine.suspend(timeout=60)
        assert (answer.phase, answer.lost, answer.kept) == ("suspended", 0, answer.resident)
        assert answer.mapped == answer.limit  # the page of block 0
        before = server.metric(LOADED)
        assert engine.resume().phase == "runs"
        assert answers(server, COUNT) == first
        assert eventually(lambda: server.metric(LOADED) - before == COUNT * TOKENS)
        # Lazy mode has stored nothing before, and the others everything that could be spilled.
        spilled = server.metric("vllm:kvpatch_spilled_blocks_total")
        assert eventually(lambda: server.metric("vllm:kvpatch_restored_blocks_total") == spilled)
        assert (spilled > 0) is (kind == "lazy")
        most = engine.said["most"]
        assert engine.limit(most // 4).said["evicted_without_copy"] == 0
        assert eventually(lambda: control.find(name).said["mapped"] <= most // 4)
        assert answers(server, COUNT) == first
        engine.limit(most)
        assert answers(server, COUNT) == first


@pytest.mark.parametrize("vllm", [one for one in LIMITED if one in OTHERS])
def test_it_is_limited_from_the_start(vllm, device, tmp_path):
    name, run = of("offloading", vllm, KVPATCH_FIRST_LIMIT="50%")
    with served(run, device, tmp_path) as server:
        engine = control.find(name)
        needs = engine.demand()
        assert abs(engine.said["limit"] - engine.said["most"] // 2) < needs["page"]
        assert needs["needs"] == 0
        first = answers(server, COUNT)
        assert control.find(name).said["mapped"] <= engine.said["limit"]
        engine.limit(engine.said["most"])
        assert answers(server, COUNT) == first


@pytest.mark.parametrize("vllm", [one for one in SLEEPING if one in OTHERS])
@pytest.mark.parametrize("kind", KINDS)
def test_it_sleeps_and_wakes_up(kind, vllm, device, tmp_path):
    name, run = of(kind, vllm)
    run = replace(run, settings=(("enable_sleep_mode", True),))
    with served(run, device, tmp_path) as server:
        first = answers(server, COUNT)
        server.client.post("/sleep", params={"level": 1}).raise_for_status()
        said = control.find(name).said
        assert (said["phase"], said["mapped"]) == ("suspended", said["limit"])
        before = server.metric(LOADED)
        server.client.post("/wake_up").raise_for_status()
        assert answers(server, COUNT) == first
        assert eventually(lambda: server.metric(LOADED) - before == COUNT * TOKENS)
        server.client.post("/sleep", params={"level": 2}).raise_for_status()
        server.client.post("/wake_up", params={"tags": "weights"}).raise_for_status()
        server.rpc("reload_weights")
        server.client.post("/wake_up", params={"tags": "kv_cache"}).raise_for_status()
        before = server.metric(LOADED)
        assert answers(server, COUNT) == first
        assert server.metric(LOADED) == before
