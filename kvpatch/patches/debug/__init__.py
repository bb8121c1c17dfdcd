"""Debug mode (``KVPATCH_DEBUG=1``): stored blocks are checksummed and verified.

``audit`` has what the audits of the connectors share, ``checksums`` is OffloadingConnector's,
``simple`` SimpleCPUOffloadConnector's, and ``unmapping`` looks at every unmapping.
"""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Patch, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING, SIMPLE

_WORKER = f"{OFFLOADING}.worker:OffloadingConnectorWorker"
_IN_ONE_MODULE = f"{OFFLOADING}_connector:OffloadingConnectorWorker"  # up to 0.18
_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_INSTALL = f"{ENGINE_CORE}._kvcached_install_ordered_unmap"
_NO_CHECKS = "none: vLLM does not check what it offloads"
_CHECKS = "vLLM checks what it offloads"
_NO_TIERS = Gap("0.16", "0.24", "there are no secondary tiers")

FEATURE = Feature(
    name="audit",
    summary="debug mode: stored blocks are checksummed and verified, and so is every unmapping",
    since=FLOOR,
    wanted="kvpatch.patches.debug.audit:wanted",
    seams=(
        seam(
            Patch(
                id="audit.worker",
                target=f"{_WORKER}._init_worker",
                why="a copy from memory that was unmapped shows only as a wrong answer, later",
                upstream=_NO_CHECKS,
                until=_CHECKS,
                wrapper="kvpatch.patches.debug.checksums:around_init_worker",
                parameters=("self", "kv_caches"),
                since="0.25",
            ),
            Patch(
                id="audit.handlers",
                target=f"{_WORKER}._register_handlers",
                why="as audit.worker; the worker has a handler for each direction",
                upstream=_NO_CHECKS,
                until="vLLM 0.25",
                wrapper="kvpatch.patches.debug.legacy:around_register_handlers",
                parameters=("self", "kv_caches"),
                since="0.21",
                before="0.25",
            ),
            Patch(
                id="audit.handlers_by_request",
                target=f"{_WORKER}._register_handlers",
                why="as audit.handlers; the worker makes the jobs",
                upstream=_NO_CHECKS,
                until="vLLM 0.21",
                wrapper="kvpatch.patches.debug.legacy:around_register_by_request",
                parameters=("self", "kv_caches"),
                since="0.19",
                before="0.21",
            ),
            Patch(
                id="audit.handlers_of_tensors",
                target=f"{_IN_ONE_MODULE}._register_handlers",
                why="as audit.handlers_by_request; the worker is registered with tensors",
                upstream=_NO_CHECKS,
                until="vLLM 0.19",
                wrapper="kvpatch.patches.debug.legacy:around_register_tensors",
                parameters=("self", "kv_caches", "attn_backends"),
                since="0.16",
                before="0.19",
            ),
        ),
        seam(
            Patch(
                id="audit.store",
                target=f"{_WORKER}.prepare_store_kv",
                why="a store is launched a step after it was handed over, and may find other bytes",
                upstream=_NO_CHECKS,
                until=_CHECKS,
                wrapper="kvpatch.patches.debug.checksums:around_prepare_store",
                parameters=("self", "metadata"),
                since="0.25",
            ),
            Patch(
                id="audit.store_of_pairs",
                target=f"{_WORKER}.prepare_store_kv",
                why="as audit.store; a transfer is a pair of specs",
                upstream=_NO_CHECKS,
                until="vLLM 0.25",
                wrapper="kvpatch.patches.debug.legacy:around_prepare_store",
                parameters=("self", "metadata"),
                since="0.21",
                before="0.25",
            ),
            Patch(
                id="audit.store_by_request",
                target=f"{_WORKER}.prepare_store_kv",
                why="as audit.store; the worker makes the jobs",
                upstream=_NO_CHECKS,
                until="vLLM 0.21",
                wrapper="kvpatch.patches.debug.legacy:around_prepare_store_by_request",
                parameters=("self", "metadata"),
                since="0.19",
                before="0.21",
            ),
            Patch(
                id="audit.store_by_request_in_one_module",
                target=f"{_IN_ONE_MODULE}.prepare_store_kv",
                why="as audit.store; the worker makes the jobs",
                upstream=_NO_CHECKS,
                until="vLLM 0.19",
                wrapper="kvpatch.patches.debug.legacy:around_prepare_store_by_request",
                parameters=("self", "metadata"),
                since="0.16",
                before="0.19",
            ),
        ),
        seam(
            Patch(
                id="audit.load",
                target=f"{_WORKER}.start_kv_transfers",
                why="a violation must name the request of the load",
                upstream=_NO_CHECKS,
                until=_CHECKS,
                wrapper="kvpatch.patches.debug.checksums:around_start_transfers",
                parameters=("self", "metadata"),
                since="0.21",
            ),
            Gap("0.16", "0.21", "the worker makes the jobs, and knows whose they are"),
        ),
        seam(
            Patch(
                id="audit.promotions",
                target="vllm.v1.kv_offload.tiering.manager:"
                "TieringOffloadingManager._flush_pending_promotions",
                why="a secondary tier writes over what the device stored, and is not to blame",
                upstream=_NO_CHECKS,
                until=_CHECKS,
                wrapper="kvpatch.patches.debug.checksums:around_promotions",
                parameters=("self",),
                since="0.24",
            ),
            _NO_TIERS,
        ),
        seam(
            Patch(
                id="audit.build",
                target=f"{_SCHEDULER}.build_connector_meta",
                why="the workers must know what secondary tiers write over",
                upstream=_NO_CHECKS,
                until=_CHECKS,
                wrapper="kvpatch.patches.debug.checksums:around_build",
                parameters=("self", "scheduler_output"),
                since="0.24",
            ),
            _NO_TIERS,
        ),
        seam(
            Patch(
                id="audit.simple",
                target=f"{SIMPLE}.worker:SimpleCPUOffloadWorker.register_kv_caches",
                why="as audit.worker; the connector has copies of its own",
                upstream=_NO_CHECKS,
                until=_CHECKS,
                wrapper="kvpatch.patches.debug.simple:around_register",
                parameters=("self", "kv_caches"),
                since="0.19",
            ),
            Gap("0.16", "0.19", "there is no SimpleCPUOffloadConnector"),
        ),
        seam(
            Patch(
                id="audit.install",
                target=_INSTALL,
                why="a page that is unmapped under a transfer shows only as a wrong answer, later",
                upstream="none: there is no hook between connector and allocator",
                until="kvcached asks the connector before it unmaps",
                wrapper="kvpatch.patches.debug.unmapping:around_install",
                parameters=("self",),
                since="0.28",
            ),
            Patch(
                id="audit.install_of_windows",
                target=_INSTALL,
                why="as audit.install; the record of a store tells sliding windows apart",
                upstream="none: there is no hook between connector and allocator",
                until="vLLM 0.28",
                wrapper="kvpatch.patches.debug.legacy:around_install",
                parameters=("self",),
                since="0.21",
                before="0.28",
            ),
            Patch(
                id="audit.install_by_request",
                target=_INSTALL,
                why="as audit.install; requests are on record instead of jobs",
                upstream="none: there is no hook between connector and allocator",
                until="vLLM 0.21",
                wrapper="kvpatch.patches.debug.legacy:around_install_by_request",
                parameters=("self",),
                since="0.16",
                before="0.21",
            ),
        ),
    ),
)
