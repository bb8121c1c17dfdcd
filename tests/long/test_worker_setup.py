"""What stops an engine while it sets kvcached up: the worker's failure, and a taken name."""

import os
import shutil
import uuid
from pathlib import Path

import pytest

from harness.engines.refused import REFUSES
from harness.engines.runs import Run
from kvpatch import claims

IN_PROCESS = """
import sys
from vllm import LLM
if __name__ == "__main__":
    LLM(sys.argv[1], dtype="float32", max_model_len=2048, block_size=32, enforce_eager=True,
        num_gpu_blocks_override=64)
    print("the engine runs")
"""


@pytest.fixture
def name():
    return f"kvpatch-test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def sockets(machine, name):
    """The folder that a kvcached name's workers make for their sockets."""
    suffix = uuid.uuid5(uuid.NAMESPACE_DNS, name).hex[:8]
    path = Path("/tmp") / f"kvcached-tp-{name}-{suffix}"
    machine["KVCACHED_IPC_NAME"] = name
    yield path
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.fixture
def blocked(sockets):
    """A folder where kvcached's worker binds its socket; return the refusal of that."""
    sockets.mkdir(mode=0o700)
    (sockets / "w0.sock").mkdir()
    return (
        f"{REFUSES}kvcached could not be set up in this worker, because it failed with OSError: "
        "[Errno 98] Address already in use; fix that error, or set KVPATCH=0."
    )


def test_in_the_process_of_the_operator(start_python, model, blocked):
    refused = start_python(IN_PROCESS, model, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert refused.sentence.removeprefix("[rank0]: ") == blocked
    assert refused.code == "KVP403"
    assert "the engine runs" not in refused.log


def test_in_processes_of_its_own(start_server, blocked):
    refused = start_server()
    assert (refused.sentence, refused.code) == (blocked, "KVP403")
    assert "Application startup complete" not in refused.log


def refused_in_a_fork(engine, name):
    """The end of the log of an engine of that name, which needs no Python of its own."""
    refused = engine(Run(environment=(("KVCACHED_IPC_NAME", name),)))
    assert refused.code != 0
    return refused.log


def test_a_folder_of_sockets_that_others_can_enter(engine, sockets, name):
    sockets.mkdir()
    sockets.chmod(0o777)
    assert (
        f"{REFUSES}{sockets} is open to other users (mode 0777), because whoever answers in it "
        "instead of kvcached's workers runs code as this user; remove it when no engine uses it "
        f"(rm -r {sockets}), or set another KVCACHED_IPC_NAME. [KVP416]\n"
    ) in refused_in_a_fork(engine, name)


def test_a_name_that_another_engine_runs_under(engine, name):
    other = claims.take("pool", name)
    log = refused_in_a_fork(engine, name)
    other.release()
    assert (
        f"{REFUSES}another engine (pid {os.getpid()}) uses the kvcached name {name}, because the "
        "two would share a page limit and unmap each other's pages; start every engine as a "
        "separate program, and give each its own KVCACHED_IPC_NAME if you set one."
    ) in log
