"""A served engine is suspended and resumed: its pages are free meanwhile, its answers the same.

One engine per connector; what is asserted of it is asked one after the other, as each question
begins with what the one before it left.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.engines.runs import Device, Run, engine_arguments, prompts
from harness.engines.serving import eventually, watched
from harness.serve import Server
from kvpatch import control
from kvpatch.hostdevice import ledger

COUNT = 6
TOKENS = 640  # of a prompt, in whole blocks
LONG = 400  # tokens to generate: a request that is certainly running when it is preempted
KINDS = ["offloading", "eager", "lazy"]


@dataclass
class Suspended:
    """A server with an engine that listens.

    Attributes:
        first: what it answered before anything was suspended.
    """

    server: Server
    name: str
    first: list[Any]
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))

    @property
    def engine(self) -> control.Engine:
        return control.find(self.name)

    def begin(self, prompt: dict[str, Any]) -> Future[Any]:
        return self.pool.submit(self.server.complete, prompt)

    def loaded(self) -> int:
        """Tokens that came from the tier so far."""
        return int(self.server.metric("vllm:external_prefix_cache_hits_total"))


def run_of(kind: str, name: str, asynchronous: bool = True, **more: str) -> Run:
    own = {"KVCACHED_IPC_NAME": name, **more}
    return Run(
        simple="" if kind == "offloading" else kind,
        asynchronous=asynchronous,
        blocks=300,
        environment=tuple(own.items()),
    )


@pytest.fixture(scope="module", params=KINDS)
def suspended(
    request: pytest.FixtureRequest,
    models: Callable[[str], Path],
    device: Device,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Suspended]:
    name = f"suspend-{request.param}-{os.getpid()}"
    run = run_of(request.param, name)
    folder = tmp_path_factory.mktemp("serve")
    with watched(models(run.model), engine_arguments(run), device.environ(run), folder) as server:
        first = [server.complete(prompt) for prompt in prompts(COUNT)]
        yield Suspended(server, name, first)


def test_its_pages_are_free_and_it_answers_the_same_afterwards(suspended: Suspended) -> None:
    engine = suspended.engine
    assert engine.said["why_not"] == ""
    plan = engine.plan()
    assert plan.resident >= COUNT * TOKENS // 32
    assert plan.lost == 0
    answer = engine.suspend(timeout=60)
    assert (answer.phase, answer.lost, answer.kept) == ("suspended", 0, answer.resident)
    page = answer.said["limit"]  # the one of block 0
    assert answer.mapped == page
    assert answer.freed > 0
    waiting = suspended.begin(prompts(COUNT)[0])
    assert eventually(lambda: suspended.engine.said["waiting"] == 1)
    assert suspended.engine.said["mapped"] == page
    assert not waiting.done()
    before = suspended.loaded()
    assert engine.resume().phase == "runs"
    assert waiting.result(60)["tokens"] == suspended.first[0]["tokens"]
    again = [suspended.server.complete(prompt) for prompt in prompts(COUNT)[1:]]
    assert [one["tokens"] for one in again] == [one["tokens"] for one in suspended.first[1:]]
    assert eventually(lambda: suspended.loaded() - before == COUNT * TOKENS)


def test_a_request_that_runs_is_preempted_and_goes_on(suspended: Suspended) -> None:
    prompt = prompts(1, seed=11, max_tokens=LONG)[0]
    whole = suspended.server.complete(prompt)
    running = suspended.begin(prompt)
    assert eventually(lambda: suspended.engine.said["running"] == 1)
    answer = suspended.engine.suspend(timeout=60)
    assert answer.lost == 0
    assert not running.done()
    said = suspended.engine.said
    assert (said["running"], said["waiting"]) == (0, 1)
    suspended.engine.resume()
    assert running.result(120)["tokens"] == whole["tokens"]


def test_a_request_that_runs_may_finish_first(suspended: Suspended) -> None:
    prompt = prompts(1, seed=12, max_tokens=LONG)[0]
    running = suspended.begin(prompt)
    assert eventually(lambda: suspended.engine.said["running"] == 1)
    suspended.engine.suspend(finish=True, timeout=120)
    assert len(running.result(10)["tokens"]) == LONG
    suspended.engine.resume()


def test_a_lower_limit_gives_pages_back_and_loses_nothing(suspended: Suspended) -> None:
    for prompt in prompts(COUNT):
        suspended.server.complete(prompt)
    most = suspended.engine.said["most"]
    answer = suspended.engine.limit(most // 4)
    assert answer.said["evicted_without_copy"] == 0
    assert eventually(lambda: suspended.engine.said["mapped"] <= most // 4)
    before = suspended.loaded()
    again = [suspended.server.complete(prompt) for prompt in prompts(COUNT)]
    assert [one["tokens"] for one in again] == [one["tokens"] for one in suspended.first]
    assert suspended.loaded() > before
    assert suspended.engine.limit(most).limit == most


def test_asked_by_several_at_once_and_again_and_again(suspended: Suspended) -> None:
    asked = [suspended.pool.submit(suspended.engine.suspend, timeout=60) for _ in range(4)]
    assert {one.result(60).phase for one in asked} == {"suspended"}
    for _ in range(3):
        suspended.engine.resume()
        assert suspended.engine.suspend(timeout=60).phase == "suspended"
    suspended.engine.resume()
    again = [suspended.server.complete(prompt) for prompt in prompts(COUNT)]
    assert [one["tokens"] for one in again] == [one["tokens"] for one in suspended.first]


def test_under_load_it_is_suspended_and_resumed_without_a_wrong_token(
    suspended: Suspended,
) -> None:
    stop = threading.Event()

    def load() -> list[tuple[int, Any]]:
        answers = []
        while not stop.is_set():
            for index in range(COUNT):
                answers.append((index, suspended.server.complete(prompts(COUNT)[index])))
        return answers

    loads = [suspended.pool.submit(load) for _ in range(3)]
    for _ in range(4):
        suspended.engine.suspend(timeout=60)
        suspended.engine.resume()
        time.sleep(0.5)  # so that requests are in different places the next time
    stop.set()
    for one in loads:
        for index, answer in one.result(300):
            assert answer["tokens"] == suspended.first[index]["tokens"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["pausing", "storing", "suspended"])
def test_killed_on_its_way_it_leaves_nothing_behind(
    kind: str,
    when: str,
    models: Callable[[str], Path],
    device: Device,
    tmp_path: Path,
) -> None:
    name = f"suspend-killed-{os.getpid()}"
    run = run_of(kind, name)
    with watched(models(run.model), engine_arguments(run), device.environ(run), tmp_path) as server:
        for prompt in prompts(COUNT):
            server.complete(prompt)
        engine = control.find(name)
        pid = int(engine.said["pid"])

        def kill(said: dict[str, Any]) -> None:
            os.kill(pid, signal.SIGKILL)

        with pytest.raises(control.Refused, match=name):
            engine.suspend(tell=kill if when != "suspended" else None)
            kill({})
            engine.resume()
        assert eventually(lambda: pid not in ledger.usage())
    assert [one.name for one in control.engines() if one.name == name] == []


def test_an_idle_engine_gives_its_pages_back_by_itself(
    models: Callable[[str], Path], device: Device, tmp_path: Path
) -> None:
    name = f"suspend-idle-{os.getpid()}"
    run = run_of("offloading", name, KVPATCH_IDLE="2s")
    with watched(models(run.model), engine_arguments(run), device.environ(run), tmp_path) as server:
        first = [server.complete(prompt) for prompt in prompts(COUNT)]
        page = control.find(name).said["most"] // 300
        assert eventually(lambda: control.find(name).said["mapped"] < 32 * page, 60)
        assert control.find(name).phase == "runs"
        again = [server.complete(prompt) for prompt in prompts(COUNT)]
        assert [one["tokens"] for one in again] == [one["tokens"] for one in first]
        loaded = "vllm:external_prefix_cache_hits_total"
        assert eventually(lambda: server.metric(loaded) == COUNT * TOKENS)
