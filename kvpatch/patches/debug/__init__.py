"""Debug mode (``KVPATCH_DEBUG=1``): stored blocks are checksummed and verified."""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Patch, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import OFFLOADING

_WORKER = f"{OFFLOADING}.worker:OffloadingConnectorWorker"

FEATURE = Feature(
    name="audit",
    summary="debug mode: stored blocks are checksummed and verified, and so is every unmapping",
    since=FLOOR,
    wanted="kvpatch.patches.debug.checksums:wanted",
    seams=(
        seam(
            Patch(
                id="audit.worker",
                target=f"{_WORKER}._init_worker",
                why="a copy from memory that was unmapped shows only as a wrong answer, later",
                upstream="none: vLLM does not check what it offloads",
                until="vLLM checks what it offloads",
                wrapper="kvpatch.patches.debug.checksums:around_init_worker",
                parameters=("self", "kv_caches"),
                since="0.25",
            ),
            Gap("0.16", "0.25", "TODO"),
        ),
        seam(
            Patch(
                id="audit.store",
                target=f"{_WORKER}.prepare_store_kv",
                why="a store is launched a step after it was handed over, and may find other bytes",
                upstream="none: vLLM does not check what it offloads",
                until="vLLM checks what it offloads",
                wrapper="kvpatch.patches.debug.checksums:around_prepare_store",
                parameters=("self", "metadata"),
                since="0.22",
            ),
            Gap("0.16", "0.22", "TODO"),
        ),
        seam(
            Patch(
                id="audit.load",
                target=f"{_WORKER}.start_kv_transfers",
                why="a violation must name the request of the load",
                upstream="none: vLLM does not check what it offloads",
                until="vLLM checks what it offloads",
                wrapper="kvpatch.patches.debug.checksums:around_start_transfers",
                parameters=("self", "metadata"),
                since="0.22",
            ),
            Gap("0.16", "0.22", "TODO"),
        ),
    ),
)
