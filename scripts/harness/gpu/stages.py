"""Round trips and copy rates on kvcached's memory, without an engine.

On a GPU with vLLM's own copies, in a dry run with the host device's. kvcached reads its layout
once for each process, so that each layout has one of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import vllm  # noqa: F401

import kvpatch  # noqa: F401  before vllm
from harness import processes
from harness.gpu.copiers import CONNECTORS, held, synchronize
from harness.gpu.pages import Pages, planned, pool_for

DEVICE = "cuda:0"


def layout() -> str:
    """Return the name of kvcached's layout in this process."""
    contiguous = os.environ.get("KVCACHED_CONTIGUOUS_LAYOUT", "true") == "true"
    return "contiguous" if contiguous else "a pool for each layer"


def roundtrips(gpu: bool) -> list[dict[str, Any]]:
    """Store, overwrite, load elsewhere, compare; then free the pages while the copy is held."""
    count = 512 if gpu else 128
    rows = []
    for connector, make in CONNECTORS.items():
        pages = Pages(layers=8, heads=8, size=64, blocks=4 * count, device=DEVICE)
        copier = make(pages.regions, 4 * count, gpu)
        try:
            rows.append(_round_trip(connector, pages, copier, count, gpu))
            if connector == "OffloadingConnector":  # the other keeps its blocks while it copies
                rows.append(_unmap_under_a_copy(connector, pages, copier, count, gpu))
        finally:
            copier.close()
            pages.close()
    return rows


def _round_trip(connector: str, pages: Pages, copier: Any, count: int, gpu: bool) -> dict[str, Any]:
    blocks = pages.take(count)
    marks = list(range(count))
    pages.mark(blocks, marks)
    copier.store(blocks, marks)
    copier.wait()
    pages.mark(blocks, [0] * count)
    elsewhere = pages.take(count)
    copier.load(marks[::-1], elsewhere)
    copier.wait()
    synchronize(gpu)
    equal = pages.equal(elsewhere, marks[::-1])
    pages.manager.free(blocks + elsewhere)
    return _row("round trip", connector, count, equal)


def _row(what: str, connector: str, count: int, equal: int) -> dict[str, Any]:
    head = {"what": what, "connector": connector, "layout": layout()}
    return head | {"blocks": count, "equal": equal}


def _unmap_under_a_copy(
    connector: str, pages: Pages, copier: Any, count: int, gpu: bool
) -> dict[str, Any]:
    """Free every page under a store that has not run yet, and compare what it copied."""
    fence = pages.fenced()
    blocks = pages.take(count)
    marks = [count + at for at in range(count)]
    pages.mark(blocks, marks)
    synchronize(gpu)
    before = pages.mapped
    with held(gpu):
        copier.store(blocks, list(range(count)))
        planned(fence, pages, 1, blocks)
        pages.manager.free(blocks)
        planned(fence, pages, 1, blocks)  # a step is built after the free
        pages.release()
        under = pages.mapped
    copier.wait()
    fence.report(1, 1)
    pages.release()
    after = pages.mapped
    elsewhere = pages.take(count)
    copier.load(list(range(count)), elsewhere)
    copier.wait()
    synchronize(gpu)
    mapped = {"before": before, "under the copy": under, "after": after}
    equal = pages.equal(elsewhere, marks)
    return _row("freed while the copy is held", connector, count, equal) | {"mapped_bytes": mapped}


def timed(
    call: Callable[[], Any], gpu: bool, repeats: int, wait: Callable[[], Any] = lambda: None
) -> float:
    """Return the shortest time of some calls, each of which is waited for, in seconds."""
    best = float("inf")
    for _ in range(repeats + 1):
        synchronize(gpu)
        begun = time.perf_counter()
        call()
        wait()
        synchronize(gpu)
        best = min(best, time.perf_counter() - begun)
    return best


def ceiling(size: int, gpu: bool, repeats: int) -> dict[str, float]:
    """Return GB/s of one plain copy each way between device memory and pinned memory."""
    host = torch.zeros(size, dtype=torch.int8, pin_memory=gpu)
    device = torch.zeros(size, dtype=torch.int8, device=DEVICE if gpu else "cpu")
    seconds = {
        "to the host": timed(lambda: host.copy_(device, non_blocking=gpu), gpu, repeats),
        "to the device": timed(lambda: device.copy_(host, non_blocking=gpu), gpu, repeats),
    }
    return {direction: size / one / 1e9 for direction, one in seconds.items()}


# (layers, heads, head size): in bfloat16, blocks of 16 tokens; the smallest has 8 KiB per layer.
SHAPES = ((8, 2, 64), (8, 8, 64), (16, 8, 128), (32, 8, 128))


def copies(gpu: bool) -> list[dict[str, Any]]:
    """Measure both directions of every connector by the size of a row."""
    total, repeats = ((1 << 30), 5) if gpu else ((8 << 20), 1)
    top = ceiling(total, gpu, repeats)
    rows = []
    for layers, heads, size in SHAPES if gpu else SHAPES[:2]:
        block_bytes = layers * 16 * heads * size * 2 * 2
        count = total // block_bytes
        for connector, make in CONNECTORS.items():
            pages = Pages(layers, heads, size, pool_for(count, heads, size), DEVICE)
            copier = make(pages.regions, count, gpu)
            try:
                blocks = pages.take(count)
                tier = list(range(count))
                ways = {
                    "to the host": partial(copier.store, blocks, tier),
                    "to the device": partial(copier.load, tier, blocks),
                }
                for direction, launch in ways.items():
                    seconds = timed(launch, gpu, repeats, copier.wait)
                    rate = count * block_bytes / seconds / 1e9
                    rows.append(
                        {
                            "connector": connector,
                            "layout": layout(),
                            "direction": direction,
                            "row_bytes": int(pages.regions.tensors[0].shape[1]),
                            "gb_per_second": round(rate, 2),
                            "ceiling_gb_per_second": round(top[direction], 2),
                            "share_of_ceiling": round(rate / top[direction], 4),
                        }
                    )
                pages.manager.free(blocks)
            finally:
                copier.close()
                pages.close()
    return rows


def run(job: processes.Job) -> processes.Job:
    """Run a stage in the layout of this process; return its rows and the device's name."""
    gpu = not job["dry"]
    rows = {"roundtrips": roundtrips, "copies": copies}[job["stage"]](gpu)
    device = torch.cuda.get_device_name(0) if gpu else "none: a dry run on the host device"
    return {"device": device, "rows": rows}
