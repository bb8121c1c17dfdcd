"""Plain copies between a device and pinned memory, as many and as large as a connector's."""

import time
from collections.abc import Callable
from typing import Any

import torch

from harness.processes import Job

REPEATS = 5


def copy(job: Job) -> Job:
    """Return the best rate of copying ``blocks`` of ``bytes`` each, one after the other."""
    gpu = torch.cuda.is_available()
    shape = (min(job["blocks"], (1 << 30) // job["bytes"] or 1), job["bytes"])
    host = torch.zeros(shape, dtype=torch.int8, pin_memory=gpu)
    device = torch.zeros(shape, dtype=torch.int8, device="cuda" if gpu else "cpu")
    into, from_ = (host, device) if job["way"] == "store" else (device, host)
    wait: Callable[[], Any] = torch.cuda.synchronize if gpu else lambda: None
    best = float("inf")
    for _ in range(REPEATS):
        wait()
        begun = time.perf_counter()
        for block in range(shape[0]):
            into[block].copy_(from_[block], non_blocking=gpu)
        wait()
        best = min(best, time.perf_counter() - begun)
    return {"gb_per_second": host.numel() / best / 1e9}
