"""The life of kvcached's pools of two layers; prints what was seen as JSON."""

import ctypes
import json
import sys
import threading
from pathlib import Path

import kvcached._C
import torch

MIB = 1 << 20
CONTIGUOUS = sys.argv[1] == "True"
LAYERS = 2
calls = torch.ops.kvcached
seen: dict[str, object] = {}

extension = ctypes.CDLL(kvcached._C.__file__)
seen["runtime"] = extension.kvpatch_ascend_runtime()
maps = Path("/proc/self/maps").read_text()
seen["on libascendcl.so"] = any(line.endswith("/libascendcl.so") for line in maps.splitlines())

acl = ctypes.CDLL("libascendcl.so")  # the one that is loaded


def free() -> int:
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert acl.aclrtSetDevice(0) == 0
    assert acl.aclrtGetMemInfo(1, ctypes.byref(left), ctypes.byref(total)) == 0
    return left.value >> 20


seen["free"] = free()
calls.init_kvcached("cuda:0", 0, CONTIGUOUS)
tensors = calls.create_kv_tensors(32 * MIB, 2, "cuda:0", LAYERS, 2, 0, False)
seen["free after reserving"] = free()
# A block of all layers, K and V, or the same of each layer's pool.
page = 2 * MIB * LAYERS * 2 if CONTIGUOUS else 2 * MIB
calls.map_to_kv_tensors([page], 0)
seen["free after mapping"] = free()
pool = tensors[0]
at = page // pool.element_size()
pool[at : at + 3] = 7
seen["written"] = pool[at : at + 3].tolist()
calls.unmap_from_kv_tensors([page], 0)
seen["free after unmapping"] = free()
seen["after unmapping"] = pool[at : at + 3].tolist()
pool[at : at + 3] = 9
seen["written to one hole, read in another"] = pool[:3].tolist()

done = []
thread = threading.Thread(target=lambda: done.append(calls.map_to_kv_tensors([page], 0)))
thread.start()
thread.join()
seen["mapped in a thread"] = done == [True]
calls.unmap_from_kv_tensors([page], 0)
del tensors, pool
calls.shutdown_kvcached()
seen["free at the end"] = free()
print(json.dumps(seen))
