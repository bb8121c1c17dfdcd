"""Suspending, resuming and a lower limit on the other releases that they are validated with."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness import releases
from harness.engines.runs import Device, Run, prompts
from harness.engines.serving import eventually
from harness.kills import Served
from kvpatch import control
from kvpatch.patches.suspend.releases import RELEASES

OTHERS = tuple(one for one in RELEASES if one != releases.newest_built())
COUNT = 6
TOKENS = 640  # of a prompt, in whole blocks
LOADED = "vllm:external_prefix_cache_hits_total"
OFFLOADING = Run(blocks=300)
KINDS = {
    "offloading": OFFLOADING,
    "eager": replace(OFFLOADING, simple="eager"),
    "lazy": replace(OFFLOADING, simple="lazy"),
}


@pytest.mark.parametrize("vllm", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_and_every_page_is_given_back(
    kind: str, vllm: str, device: Device, tmp_path: Path
) -> None:
    name = f"suspend-{vllm}-{kind}-{os.getpid()}"
    named = (("KVCACHED_IPC_NAME", name),)
    run = replace(KINDS[kind], vllm=vllm, environment=named)
    server = Served(tmp_path / "served", run, device, {})
    try:
        while not server.ready():
            time.sleep(0.05)
        first = [server.complete(prompt)["tokens"] for prompt in prompts(COUNT)]

        def again() -> list[list[int]]:
            return [server.complete(prompt)["tokens"] for prompt in prompts(COUNT)]

        engine = control.find(name)
        assert engine.said["why_not"] == ""
        answer = engine.suspend(timeout=60)
        assert (answer.phase, answer.lost, answer.kept) == ("suspended", 0, answer.resident)
        assert answer.mapped == answer.limit  # the page of block 0
        before = server.metric(LOADED)
        assert engine.resume().phase == "runs"
        assert again() == first
        assert eventually(lambda: server.metric(LOADED) - before == COUNT * TOKENS)
        most = engine.said["most"]
        assert engine.limit(most // 4).said["evicted_without_copy"] == 0
        assert eventually(lambda: control.find(name).said["mapped"] <= most // 4)
        assert again() == first
        engine.limit(most)
        assert again() == first
    finally:
        server.close()
