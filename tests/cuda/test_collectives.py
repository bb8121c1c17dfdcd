"""NCCL's collectives on the emulated devices, between two processes, without torch."""

import subprocess
import sys

from harness import releases
from harness.cuda import emulated
from harness.processes import clean_environment

# More than a slot of what the ranks share has; as bfloat16 (9) and float (7), summed (0).
RANK = """
import array, ctypes, os, sys, time
from ctypes import byref, c_size_t, c_void_p

class Id(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char * 128)]

rank, file, count = int(sys.argv[1]), sys.argv[2], 700_001
cuda, nccl = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libnccl.so.2")
nccl.ncclCommInitRank.argtypes = (c_void_p, ctypes.c_int, Id, ctypes.c_int)
found = (ctypes.c_int(), ctypes.c_int())
assert cuda.cudaSetDevice(2) == 101  # an invalid device
assert cuda.cudaSetDevice(rank) == cuda.cudaGetDevice(byref(found[0])) == 0
assert cuda.cudaGetDeviceCount(byref(found[1])) == 0
assert [one.value for one in found] == [rank, 2]
name = Id()
if rank == 0:
    assert nccl.ncclGetUniqueId(byref(name)) == 0
    with open(file + ".part", "wb") as made:
        made.write(bytes(name))
    os.rename(file + ".part", file)
while not os.path.exists(file):
    time.sleep(0.01)
with open(file, "rb") as made:
    ctypes.memmove(byref(name), made.read(), 128)
comm, stream = c_void_p(), c_void_p()
assert nccl.ncclCommInitRank(byref(comm), 2, name, rank) == 0
assert cuda.cudaStreamCreate(byref(stream)) == 0

def memory(values):
    at = c_void_p()
    assert cuda.cudaMalloc(byref(at), c_size_t(len(values) * values.itemsize)) == 0
    source = c_void_p(values.buffer_info()[0])
    assert cuda.cudaMemcpy(at, source, c_size_t(len(values) * values.itemsize), 1) == 0
    return at

def values(at, like):
    assert cuda.cudaStreamSynchronize(stream) == 0
    found = array.array(like.typecode, bytes(len(like) * like.itemsize))
    to = c_void_p(found.buffer_info()[0])
    assert cuda.cudaMemcpy(to, at, c_size_t(len(like) * like.itemsize), 2) == 0
    return found

own = array.array("f", (10 * rank + n % 7 for n in range(count)))
both = array.array("f", (10 * r + n % 7 for r in (0, 1) for n in range(count)))
one, every, told = memory(own), memory(both), memory(own)
many = c_size_t(count)
assert nccl.ncclAllGather(one, every, many, 7, comm, stream) == 0
assert nccl.ncclBroadcast(told, told, many, 7, 1, comm, stream) == 0
assert nccl.ncclAllReduce(one, one, many, 7, 0, comm, stream) == 0
assert values(every, both) == both
assert values(told, own) == both[count:]
assert values(one, own) == array.array("f", (10 + n % 7 * 2 for n in range(count)))
halves = array.array("H", [0x3F80 + rank, 0x4049])  # 1 or 1.0078125, and 3.140625
short = memory(halves)
assert nccl.ncclAllReduce(short, short, c_size_t(2), 9, 0, comm, stream) == 0
assert list(values(short, halves)) == [0x4000, 0x40C9]  # 2.0078125 is between two: the even one
other = c_void_p()
assert cuda.cudaSetDevice(1 - rank) == 0
assert cuda.cudaMalloc(byref(other), c_size_t(64)) == 801  # not emulated in one process
"""


def test_two_ranks_have_what_each_gave_and_a_process_one_device(tmp_path):
    release = releases.newest_built()
    emulated.made(release)
    here = emulated.device_of(release)
    environment = clean_environment(
        EMU_DEVICE="64MiB",
        EMU_DEVICE_DIR=str(tmp_path),
        KVPATCH_STAND_IN_GPUS="2",
        LD_LIBRARY_PATH=str(here),
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "id")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=60)[1] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], said
