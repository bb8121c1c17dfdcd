"""Rows of the debug mode."""

from __future__ import annotations

from kvpatch.patch import Feature, Patch
from kvpatch.registry.releases import KVCACHED_RANGE
from kvpatch.registry.targets import OFFLOADING

_WORKER = f"{OFFLOADING}.worker:OffloadingConnectorWorker"

FEATURE = Feature(
    name="audit",
    summary="debug mode: stored blocks are summed and checked, and so is every unmapping",
    vllm="==0.28.0",
    kvcached=KVCACHED_RANGE,
    wanted="kvpatch.audit:wanted",
    patches=(
        Patch(
            id="audit.worker",
            target=f"{_WORKER}._init_worker",
            why="a copy from memory that was unmapped shows only as a wrong answer, later",
            upstream="none: vLLM does not check what it offloads",
            until="vLLM checks what it offloads",
            wrapper="kvpatch.audit:around_init_worker",
            parameters=("self", "kv_caches"),
            vllm=">=0.25,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="audit.store",
            target=f"{_WORKER}.prepare_store_kv",
            why="a store is launched a step after it was handed over, and may find other bytes",
            upstream="none: vLLM does not check what it offloads",
            until="vLLM checks what it offloads",
            wrapper="kvpatch.audit:around_prepare_store",
            parameters=("self", "metadata"),
            vllm=">=0.22,<0.34",
            kvcached="==0.1.6",
        ),
        Patch(
            id="audit.load",
            target=f"{_WORKER}.start_kv_transfers",
            why="a violation must name the request of the load",
            upstream="none: vLLM does not check what it offloads",
            until="vLLM checks what it offloads",
            wrapper="kvpatch.audit:around_start_transfers",
            parameters=("self", "metadata"),
            vllm=">=0.22,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)
