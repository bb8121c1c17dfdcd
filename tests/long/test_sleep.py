"""A served engine sleeps and wakes up: its pages are free meanwhile, its tier is what it was.

On the host device its weights leave as on a GPU (kvpatch/patches/host_device/weights.py), so that
what is computed while it sleeps is no number.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from harness.engines import plugins
from harness.engines.runs import Run, prompts
from harness.engines.serving import Asked, answers, eventually, watched

COUNT = 6
TOKENS = 640  # of a prompt, in whole blocks
LONG = 40  # tokens to generate: a request that the engine stops in the middle of
BASE = Run(blocks=300)
KINDS = {
    "offloading": BASE,
    "offloading, runner v2": replace(BASE, runner="v2"),
    "eager": replace(BASE, simple="eager"),
    "lazy": replace(BASE, simple="lazy"),
}


class Sleeper(Asked):
    """A server whose engine can sleep."""

    def post(self, path: str, **query: Any) -> Any:
        answer = self.server.client.post(path, params=query)
        answer.raise_for_status()
        return answer.json()

    def sleeping(self) -> bool:
        answer = self.server.client.get("/is_sleeping").raise_for_status()
        return bool(answer.json()["is_sleeping"])

    def wakes_up(self, **tags: str) -> int:
        """Wake it up with a request that waits, and ask everything; return what was loaded before.

        It runs with all of its limit again, and what waited is answered as the others are.
        """
        waiting = self.begin(prompts(COUNT)[0])
        assert eventually(lambda: self.engine.said["waiting"] == 1)
        assert not waiting.done()
        before = self.loaded()
        assert self.post("/wake_up", **tags)["status"] == "awake"
        assert waiting.result(60)["tokens"] == self.first[0]
        assert not self.sleeping()
        assert eventually(lambda: self.engine.phase == "runs")
        assert self.engine.said["limit"] == self.engine.said["most"]
        self.again()
        return before


# Each kind has an engine, which all tests of its kind ask; what depends on no connector is asked of
# one of each.
EVERY = pytest.mark.parametrize("sleeper", KINDS, indirect=True)
ONE_OF_EACH = pytest.mark.parametrize("sleeper", ["offloading", "lazy"], indirect=True)


@pytest.fixture(scope="module")
def sleeper(request, device, tmp_path_factory):
    name = f"sleep-{os.getpid()}-{list(KINDS).index(request.param)}"
    run = KINDS[request.param].within({"KVCACHED_IPC_NAME": name})
    folder = tmp_path_factory.mktemp("serve")
    plugged = plugins.stop_when_running
    with watched(run, device, folder, plugged, enable_sleep_mode=True) as server:
        yield Sleeper(server, name, answers(server, COUNT))


@EVERY
def test_level_1_gives_every_page_back_and_loses_nothing(sleeper):
    sleeper.again()
    for _ in range(2):  # who does not know whether it sleeps asks again
        sleeper.post("/sleep", level=1)
    said = sleeper.engine.said
    assert sleeper.sleeping()
    assert (said["phase"], said["mapped"]) == ("suspended", said["limit"])  # the page of block 0
    before = sleeper.wakes_up()
    assert eventually(lambda: sleeper.loaded() - before == COUNT * TOKENS)


@ONE_OF_EACH
def test_it_wakes_up_in_parts(sleeper):
    sleeper.post("/sleep", level=1)
    assert sleeper.post("/wake_up", tags="weights")["status"] == "sleeping"
    assert sleeper.engine.phase == "suspended"
    assert sleeper.post("/wake_up", tags="kv_cache")["status"] == "awake"
    sleeper.again()


@ONE_OF_EACH
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_request_that_runs_ends_as_the_mode_says(sleeper, mode):
    prompt = prompts(1, seed=11, max_tokens=LONG)[0]
    whole = sleeper.server.complete(prompt)
    running = sleeper.begin_and_see(prompt)
    sleeper.post("/sleep", level=1, mode=mode)
    assert sleeper.engine.said["mapped"] == sleeper.engine.said["limit"]
    if mode == "abort":
        assert len(running.result(60)["tokens"]) < LONG
    elif mode == "wait":
        assert running.result(60)["tokens"] == whole["tokens"]
    sleeper.post("/wake_up")
    if mode == "keep":
        assert running.result(120)["tokens"] == whole["tokens"]
    sleeper.again()


@ONE_OF_EACH
def test_a_suspended_engine_sleeps_and_is_suspended_when_it_wakes_up(sleeper):
    sleeper.engine.suspend(timeout=60)
    sleeper.post("/sleep", level=1)
    sleeper.post("/wake_up")
    assert sleeper.engine.phase == "suspended"
    sleeper.engine.resume()
    sleeper.again()


@ONE_OF_EACH
def test_resumed_while_it_sleeps_it_computes_nothing(sleeper):
    """`kvpatch resume` gives the limit back; vLLM's own pause stays."""
    sleeper.post("/sleep", level=1)
    sleeper.engine.resume()
    waiting = sleeper.begin(prompts(COUNT)[0])
    assert eventually(lambda: sleeper.engine.said["waiting"] == 1)
    sleeper.post("/wake_up")
    assert waiting.result(60)["tokens"] == sleeper.first[0]
    sleeper.again()


@EVERY
def test_level_2_forgets_what_other_weights_must_not_find(sleeper):
    sleeper.post("/sleep", level=2)
    sleeper.post("/wake_up", tags="weights")
    sleeper.server.rpc("reload_weights")
    sleeper.post("/wake_up", tags="kv_cache")
    before = sleeper.loaded()
    sleeper.again()
    assert sleeper.loaded() == before
    sleeper.again()


@EVERY
def test_released_kv_memory_is_the_devices_again_and_no_cache_is_kept(sleeper):
    """`/release_kv_cache_memory` drops the CPU tier too, as in vLLM: other weights may follow."""
    sleeper.again()
    sleeper.post("/sleep", level=0)
    full = sleeper.engine.said["mapped"]
    assert sleeper.post("/release_kv_cache_memory")["status"] == "kv_cache_released"
    said = sleeper.engine.said
    assert (said["phase"], said["mapped"]) == ("suspended", said["limit"])  # the page of block 0
    assert said["limit"] < full
    before = sleeper.wakes_up(tags="kv_cache")
    assert sleeper.loaded() == before


@ONE_OF_EACH
def test_a_request_that_a_release_keeps_is_computed_again(sleeper):
    prompt = prompts(1, seed=12, max_tokens=LONG)[0]
    whole = sleeper.server.complete(prompt)
    running = sleeper.begin_and_see(prompt)
    sleeper.post("/sleep", level=0, mode="keep")
    sleeper.post("/release_kv_cache_memory")
    assert sleeper.engine.said["mapped"] == sleeper.engine.said["limit"]
    sleeper.post("/wake_up")
    assert running.result(120)["tokens"] == whole["tokens"]
    sleeper.again()


@pytest.fixture(scope="module")
def others(models, tmp_path_factory):
    """The same model with other weights."""
    folder = tmp_path_factory.mktemp("others") / "model"
    shutil.copytree(models(BASE.model), folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: of.flip(0) for name, of in load_file(file).items()}, file)
    return folder


@pytest.mark.parametrize("when", ["while it sleeps", "when it is awake"])
@ONE_OF_EACH
def test_other_weights_find_no_block_that_a_sleep_kept(sleeper, models, others, when):
    """vLLM has none of them either, and so nobody asks it for a reset."""

    def replace_weights(by: Path) -> list[Any]:
        asleep = when == "while it sleeps"
        sleeper.post("/sleep", level=1)
        sleeper.post("/wake_up", **({"tags": "weights"} if asleep else {}))
        job = {"method": "reload_weights", "kwargs": {"weights_path": str(by)}}
        sleeper.server.client.post("/collective_rpc", json=job).raise_for_status()
        if asleep:
            sleeper.post("/wake_up", tags="kv_cache")
        before = sleeper.loaded()
        found = answers(sleeper.server, COUNT)
        assert sleeper.loaded() == before
        return found

    sleeper.again()
    other = replace_weights(others)
    assert all(one != before for one, before in zip(other, sleeper.first, strict=True))
    assert replace_weights(models(BASE.model)) == sleeper.first
