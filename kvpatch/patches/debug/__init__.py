"""Debug mode (``KVPATCH_DEBUG=1``): stored blocks are checksummed and verified."""

from __future__ import annotations

from kvpatch.rows import Row, feature, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING, SIMPLE

_WORKER = f"{OFFLOADING}.worker:OffloadingConnectorWorker"
_IN_ONE_MODULE = f"{OFFLOADING}_connector"  # up to 0.18
_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_INSTALL = f"{ENGINE_CORE}._kvcached_install_ordered_unmap"
_NO_CHECKS = "none: vLLM does not check what it offloads"
_CHECKS = "vLLM checks what it offloads"

FEATURE = feature(
    __name__,
    summary="debug mode: stored blocks are checksummed and verified, and so is every unmapping",
    since=FLOOR,
    upstream=_NO_CHECKS,
    until=_CHECKS,
    wanted="audit:wanted",
    seams=(
        seam(
            Row(
                "debug.worker",
                f"{_WORKER}._init_worker",
                "checksums:around_init_worker(self, kv_caches)",
                "a copy from memory that was unmapped shows only as a wrong answer, later",
                since="0.25",
            ),
            Row(
                "debug.handlers",
                f"{_WORKER}._register_handlers",
                "legacy:around_register_handlers",
                but="the worker has a handler for each direction",
                since="0.21",
            ),
            Row(
                "debug.handlers_by_request",
                wrapper="legacy:around_register_by_request",
                why="as debug.handlers; the worker makes the jobs",
                since="0.19",
            ),
            Row(
                "debug.handlers_of_tensors",
                f"{_IN_ONE_MODULE}:",
                "legacy:around_register_tensors(self, kv_caches, attn_backends)",
                "as debug.handlers_by_request; the worker is registered with tensors",
            ),
        ),
        seam(
            Row(
                "debug.store",
                f"{_WORKER}.prepare_store_kv",
                "checksums:around_prepare_store(self, metadata)",
                "a store is launched a step after it was handed over, and may find other bytes",
                since="0.25",
            ),
            Row(
                "debug.store_of_pairs",
                wrapper="legacy:around_prepare_store",
                but="a transfer is a pair of specs",
                since="0.21",
            ),
            Row(
                "debug.store_by_request",
                wrapper="legacy:around_prepare_store_by_request",
                but="the worker makes the jobs",
                since="0.19",
            ),
            Row(
                "debug.store_by_request_in_one_module",
                f"{_IN_ONE_MODULE}:",
                until="vLLM 0.19",
            ),
        ),
        Row(
            "debug.load",
            f"{_WORKER}.start_kv_transfers",
            "checksums:around_start_transfers(self, metadata)",
            "a violation must name the request of the load",
            since="0.21",
            earlier="the worker makes the jobs, and knows whose they are",
        ),
        Row(
            "debug.promotions",
            "vllm.v1.kv_offload.tiering.manager:TieringOffloadingManager._flush_pending_promotions",
            "checksums:around_promotions",
            "a secondary tier writes over what the device stored, and is not to blame",
            since="0.24",
            earlier="there are no secondary tiers",
        ),
        Row(
            "debug.build",
            f"{_SCHEDULER}.build_connector_meta",
            "checksums:around_build(self, scheduler_output)",
            "the workers must know what secondary tiers write over",
            since="0.24",
            earlier="there are no secondary tiers",
        ),
        Row(
            "debug.simple",
            f"{SIMPLE}.worker:SimpleCPUOffloadWorker.register_kv_caches",
            "simple:around_register(self, kv_caches)",
            "as debug.worker; the connector has copies of its own",
            since="0.19",
            earlier="there is no SimpleCPUOffloadConnector",
        ),
        seam(
            Row(
                "debug.install",
                _INSTALL,
                "unmapping:around_install",
                "a page that is unmapped under a transfer shows only as a wrong answer, later",
                "none: there is no hook between connector and allocator",
                "kvcached asks the connector before it unmaps",
                since="0.28",
            ),
            Row(
                "debug.install_of_windows",
                wrapper="legacy:around_install",
                but="the record of a store tells sliding windows apart",
                since="0.21",
            ),
            Row(
                "debug.install_by_request",
                wrapper="legacy:around_install_by_request",
                but="requests are on record instead of jobs",
            ),
        ),
    ),
)
