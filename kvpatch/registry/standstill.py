"""The row that keeps loaded requests from waiting for each other's memory."""

from __future__ import annotations

from kvpatch.patch import Feature, Patch
from kvpatch.registry.releases import KVCACHED_RANGE, VLLM_RANGE

FEATURE = Feature(
    name="standstill",
    summary="loaded requests that wait for memory give theirs back when nothing else can run",
    vllm=VLLM_RANGE,
    kvcached=KVCACHED_RANGE,
    patches=(
        Patch(
            id="standstill.schedule",
            target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
            why="vLLM never preempts a loaded request that waits, and memory can become less "
            "after its load was admitted",
            upstream="none: on memory of fixed size what was admitted goes on fitting",
            until="vLLM preempts requests that wait with loaded blocks",
            wrapper="kvpatch.standstill:around_schedule",
            parameters=("self",),
            vllm=">=0.16,<0.34",
            kvcached="==0.1.6",
        ),
    ),
)
