"""What stops an engine while it sets kvcached up: the worker's failure, and a taken name."""

from __future__ import annotations

import socket
import uuid
from pathlib import Path

import pytest
from refused import REFUSES

IN_PROCESS = """
import sys
from vllm import LLM
if __name__ == "__main__":
    LLM(sys.argv[1], dtype="float32", max_model_len=2048, block_size=32, enforce_eager=True,
        num_gpu_blocks_override=64)
    print("the engine runs")
"""


@pytest.fixture
def blocked(machine):
    """A file where kvcached's worker needs a folder for its socket."""
    name = f"kvpatch-test-{uuid.uuid4().hex[:8]}"
    suffix = uuid.uuid5(uuid.NAMESPACE_DNS, name).hex[:8]
    path = Path("/tmp") / f"kvcached-tp-{name}-{suffix}"
    path.touch()
    yield {"KVCACHED_IPC_NAME": name}, f"FileExistsError: [Errno 17] File exists: '{path}'"
    path.unlink()


def test_in_the_process_of_the_operator(python, model, blocked):
    """From vLLM 0.29 on the set-up raises what failed; before, kvcached drops it (KVP403)."""
    environment, error = blocked
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    refused = python(IN_PROCESS, model, **environment)
    assert error in refused.log
    assert "the engine runs" not in refused.log


def test_in_processes_of_its_own(serve, blocked):
    environment, error = blocked
    refused = serve(**environment)
    assert error in refused.log
    assert "Application startup complete" not in refused.log


def test_a_name_that_another_engine_runs_under(python, model):
    name = f"kvpatch-test-{uuid.uuid4().hex[:8]}"
    environment = {"KVCACHED_IPC_NAME": name, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"\0kvpatch-engine-{name}")  # as that engine would hold it
        refused = python(IN_PROCESS, model, **environment)
    assert refused.sentence.removeprefix("[rank0]: ") == (
        f"{REFUSES}another engine uses the kvcached name {name}, because the two would share "
        "a page limit and unmap each other's pages; start every engine as a separate program, "
        "and give each its own KVCACHED_IPC_NAME if you set one."
    )
