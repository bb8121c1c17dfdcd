"""kill -9 while copies are held: nothing hangs, and the next start finds nothing in its way."""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from harness.engines.runs import Run, prompts
from harness.engines.serving import watched
from harness.serve import Server
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice import ledger


def process_of(server: Server, role: str) -> psutil.Process:
    (found,) = (
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if role in " ".join(child.cmdline())
    )
    return found


@pytest.mark.parametrize(("role", "ranks"), [("VLLM::EngineCore", 1), ("VLLM::Worker_TP1", 2)])
def test_the_next_engine_of_that_name_starts_and_is_right(
    device, tmp_path, monkeypatch, role, ranks
):
    name = f"kvpatch-test-killed-{os.getpid()}-{ranks}"
    run = Run(ranks=ranks).within({"KVCACHED_IPC_NAME": name})
    environment = device.environ(run)
    for variable in (HOST_DEVICE.name, HOST_DEVICE_DIR.name):
        monkeypatch.setenv(variable, environment[variable])
    answers = []
    for attempt in ("killed", "next"):
        with watched(run, device, tmp_path / attempt, fresh=True) as server:
            answers.append(server.complete(prompts(1)[0]))
            started = psutil.Process(server.process.pid).children(recursive=True)
            if attempt == "next":
                break
            with ThreadPoolExecutor() as pool, ledger.hold_copies():
                load = [pool.submit(server.complete, prompt) for prompt in prompts(4, seed=9)]
                load[0].result()  # computed; its copies and those of others are in flight
                process_of(server, role).send_signal(signal.SIGKILL)
                # The server notices that its engine is gone, and ends by itself.
                server.process.wait(120)
                assert all(one.exception() for one in load[1:] if one.done() and one.exception())
    assert answers[0]["tokens"] == answers[1]["tokens"]
    psutil.wait_procs(started, 60)
    assert ledger.usage() == {}
    assert not list(Path("/dev/shm").glob(f"{name}*"))
    # kvcached leaves the folder of its workers' sockets behind; the second start used it.
    for folder in Path("/tmp").glob(f"kvcached-tp-{name}-*"):
        shutil.rmtree(folder)
