"""What the emulated device says of order, asked through its own functions, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cuda.device import build
from harness.processes import clean_environment

# Work on one stream learns only when it runs, late, which bytes it writes; work on another reads
# them, and waits for it or does not. The second is known before the first has run.
LATE = """
import ctypes, json, sys, threading

class Access(ctypes.Structure):
    _fields_ = [("at", ctypes.c_size_t), ("size", ctypes.c_size_t), ("write", ctypes.c_bool)]

cuda = ctypes.CDLL("libcuda.so.1")
cuda.emu_count.restype = ctypes.c_uint64
cuda.emu_complaint.restype = ctypes.c_char_p
CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

def made(function, *more):
    value = ctypes.c_void_p()
    assert function(ctypes.byref(value), *more) == 0
    return value

assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context := ctypes.c_void_p()), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
memory = made(cuda.cuMemHostAlloc, ctypes.c_size_t(4096), 0)
one, other = made(cuda.cuStreamCreate, 1), made(cuda.cuStreamCreate, 1)
event = made(cuda.cuEventCreate, 0)
go = threading.Event()

def write(_):
    go.wait()
    cuda.emu_touch(ctypes.byref(Access(memory.value, 256, True)), 1)

def put(stream, what, call, *accesses):
    given = (Access * max(1, len(accesses)))(*accesses)
    cuda.emu_enqueue(stream, what, given, ctypes.c_size_t(len(accesses)), call, None, True)

calls = [CALL(write), CALL(lambda _: None)]
put(one, b"a step", calls[0])
assert cuda.cuEventRecord(event, one) == 0
if sys.argv[1] == "waits":
    assert cuda.cuStreamWaitEvent(other, event, 0) == 0
put(other, b"a copy", calls[1], Access(memory.value, 256, False))
go.set()
assert cuda.cuStreamSynchronize(one) == 0 and cuda.cuStreamSynchronize(other) == 0
print(json.dumps([cuda.emu_complaint(n).decode() for n in range(cuda.emu_count(4))]))
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    if build.headers(None) is None:
        pytest.skip("CUDA's headers are not there")
    build.build(folder)
    return folder


def said(device: Path, how: str) -> list[str]:
    environment = clean_environment(
        EMU_DEVICE="64MiB", EMU_DEVICE_DIR=str(device), LD_LIBRARY_PATH=str(device)
    )
    command = [sys.executable, "-c", LATE, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_what_waits_for_work_that_says_late_what_it_touches_is_ordered(device):
    assert said(device, "waits") == []


def test_what_does_not_wait_for_it_is_a_complaint_with_both_names(device):
    (complaint,) = said(device, "does not")
    assert complaint.startswith("RACE: a step writes") and "a copy of stream" in complaint
