"""vLLM's OffloadingConnector on kvcached's memory."""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Patch, Seam, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING

_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_NO_FAILURE = "vllm-project/vllm, the connector asserts that every transfer has succeeded"


def _transfers(row: str, method: str, parameters: tuple[str, ...], why: str) -> Seam:
    """Return the rows around a method of the connector's worker that makes or ends copies."""
    return seam(
        *(
            Patch(
                id=row + suffix,
                target=f"{home}:OffloadingConnectorWorker.{method}",
                why=why,
                upstream=_NO_FAILURE,
                until="the connector handles transfers that fail",
                wrapper="kvpatch.patches.offloading.failures:around_transfers",
                parameters=parameters,
                since=since,
                before=before,
            )
            for suffix, home, since, before in (
                ("", f"{OFFLOADING}.worker", "0.19", None),
                ("_in_one_module", f"{OFFLOADING}_connector", "0.16", "0.19"),
            )
        )
    )


FEATURE = Feature(
    name="offloading-connector",
    summary="vLLM's OffloadingConnector copies the correct bytes of kvcached's memory",
    since=FLOOR,
    rules="kvpatch.patches.offloading.together:RULES",
    seams=(
        seam(
            Patch(
                id="offloading.use_uniform_kv_cache",
                target="vllm.v1.worker.kv_connector_model_runner_mixin:"
                "KVConnectorModelRunnerMixin.use_uniform_kv_cache",
                why="a cross-layer KV cache is one torch.zeros that bypasses kvcached's memory",
                upstream="ovg-project/kvcached#269, ovg-project/kvcached#361",
                until="kvcached allocates cross-layer KV caches itself, or vLLM 0.29",
                wrapper="kvpatch.patches.offloading.registration:keep_elastic",
                parameters=("attn_groups",),
                since="0.16",
                before="0.29",
            ),
            Gap("0.29", None, "the path was removed"),
        ),
        seam(
            Patch(
                id="offloading.check_regions",
                target=f"{OFFLOADING}.worker:OffloadingConnectorWorker._init_worker",
                why="regions that do not match kvcached's blocks go unnoticed",
                upstream="none: from 0.29 on vLLM's regions follow the layout, and are correct",
                until="the connector takes its regions from the allocator",
                wrapper="kvpatch.patches.offloading.registration:check_regions",
                parameters=("self", "kv_caches"),
                since="0.29",
            ),
            Patch(
                id="offloading.register_kv_caches",
                target=f"{OFFLOADING}.worker:OffloadingConnectorWorker.register_kv_caches",
                why="vLLM registers one dense tensor per layer, and copies other blocks' bytes",
                upstream="ovg-project/kvcached#361 (requests to keep the cross-layer speed)",
                until="the connector takes its regions from the allocator",
                wrapper="kvpatch.patches.offloading.registration:register_regions",
                parameters=("self", "kv_caches"),
                since="0.26",
                before="0.29",
            ),
            Patch(
                id="offloading.register_with_spec",
                target=f"{OFFLOADING}.worker:OffloadingConnectorWorker.register_kv_caches",
                why="as offloading.register_kv_caches; the KV cache config is in the spec",
                upstream="ovg-project/kvcached#361 (requests to keep the cross-layer speed)",
                until="vLLM 0.26",
                wrapper="kvpatch.patches.offloading.legacy:register_with_spec",
                parameters=("self", "kv_caches"),
                since="0.25",
                before="0.26",
            ),
            Patch(
                id="offloading.register_with_handlers",
                target=f"{OFFLOADING}.worker:OffloadingConnectorWorker.register_kv_caches",
                why="as offloading.register_kv_caches; the worker has one handler per direction",
                upstream="ovg-project/kvcached#361 (requests to keep the cross-layer speed)",
                until="vLLM 0.25",
                wrapper="kvpatch.patches.offloading.legacy:register_with_handlers",
                parameters=("self", "kv_caches"),
                since="0.19",
                before="0.25",
            ),
            Patch(
                id="offloading.register_with_backends",
                target=f"{OFFLOADING}_connector:OffloadingConnectorWorker.register_kv_caches",
                why="as offloading.register_kv_caches; attention backends define the block layout",
                upstream="ovg-project/kvcached#361 (requests to keep the cross-layer speed)",
                until="vLLM 0.19",
                wrapper="kvpatch.patches.offloading.legacy:register_with_backends",
                parameters=("self", "kv_caches"),
                since="0.16",
                before="0.19",
            ),
        ),
        seam(
            Patch(
                id="offloading.storable_chunks",
                target=f"{OFFLOADING}.scheduler:RequestOffloadState.storable_chunks",
                why="a request aborted before or during its computation ends the engine",
                upstream="vllm-project/vllm#49118, vllm-project/vllm#49146",
                until="vLLM 0.27",
                wrapper="kvpatch.patches.offloading.legacy:around_storable",
                parameters=("self", "group_config", "num_offloadable_tokens"),
                since="0.26",
                before="0.27",
            ),
            Gap("0.16", "0.26", "an aborted request is stored as far as it was computed"),
            Gap("0.27", None, "fixed by vllm-project/vllm#49146"),
        ),
        seam(
            Patch(
                id="offloading.last_token",
                target=f"{OFFLOADING}.scheduler:"
                "OffloadingConnectorScheduler._calc_num_offloadable_tokens",
                why="the last sampled token of a request is never computed; a block that ends with "
                "it is stored, and gives later requests wrong tokens",
                upstream="vllm-project/vllm#54193, vllm-project/vllm#54288",
                until="vLLM 0.30",
                wrapper="kvpatch.patches.offloading.legacy:around_offloadable",
                parameters=("self", "req_status", "num_computed_tokens"),
                since="0.26",
                before="0.30",
            ),
            Gap("0.16", "0.26", "nothing of a request is stored once it has finished"),
            Gap("0.30", None, "fixed by vllm-project/vllm#54288"),
        ),
        _transfers(
            "offloading.copies_made",
            "start_kv_transfers",
            ("self", "metadata"),
            "a copy that fails ends the engine with an assertion that does not name it",
        ),
        _transfers(
            "offloading.copies_flushed",
            "handle_preemptions",
            ("self",),
            "as offloading.copies_made; the copies of preempted requests are waited for",
        ),
        _transfers(
            "offloading.copies_ended",
            "get_finished",
            ("self", "finished_req_ids"),
            "as offloading.copies_made; the events of copies are asked for",
        ),
        seam(
            Patch(
                id="offloading.replaced_weights",
                target=f"{ENGINE_CORE}.collective_rpc",
                why="weights that are replaced leave the blocks of the old ones in the CPU tier, "
                "which gives wrong tokens",
                upstream="vllm-project/vllm, reset_cache of SimpleCPUOffloadConnector raises up to "
                "0.23 and OffloadingConnector has none up to 0.21",
                until="vLLM 0.24",
                wrapper="kvpatch.patches.offloading.legacy:around_call",
                parameters=("self", "method"),
                since="0.16",
                before="0.24",
            ),
            Gap("0.24", None, "the connectors can be reset, which tiers.reset_caches asks for"),
        ),
        seam(
            Patch(
                id="offloading.preempted_loads",
                target=f"{_SCHEDULER}.build_connector_meta",
                why="a request that a reset preempts and the next step loads ends the engine",
                upstream="vllm-project/vllm, build_connector_meta in 0.33 leaves such loads out",
                until="vLLM 0.33",
                wrapper="kvpatch.patches.offloading.resets:around_build",
                parameters=("self", "scheduler_output"),
                since="0.25",
                before="0.33",
            ),
            Gap("0.16", "0.25", "offloading.name_preempted leaves such loads out"),
            Gap("0.33", None, "fixed: loads of the same step are left out"),
        ),
        seam(
            Patch(
                id="offloading.reset_of_requests",
                target="vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
                why="blocks of requests that a reset preempts are written while they are stored",
                upstream="vllm-project/vllm, reset_preempted_req_ids in 0.25",
                until="vLLM 0.25",
                wrapper="kvpatch.patches.offloading.legacy:around_scheduler_reset",
                parameters=("self", "reset_running_requests"),
                since="0.16",
                before="0.25",
            ),
            Gap("0.25", None, "vLLM names such requests to the connector"),
        ),
        seam(
            *(
                Patch(
                    id=f"offloading.name_preempted{suffix}",
                    target=f"{home}:OffloadingConnectorScheduler.build_connector_meta",
                    why="a step does not name the requests that a reset has preempted",
                    upstream="vllm-project/vllm, reset_preempted_req_ids in 0.25",
                    until="vLLM 0.25",
                    wrapper=f"kvpatch.patches.offloading.legacy:{wrapper}",
                    parameters=("self", "scheduler_output"),
                    since=since,
                    before=before,
                )
                for suffix, home, wrapper, since, before in (
                    ("", f"{OFFLOADING}.scheduler", "name_preempted_of_jobs", "0.21", "0.25"),
                    ("_by_request", f"{OFFLOADING}.scheduler", "name_preempted", "0.19", "0.21"),
                    ("_in_one_module", f"{OFFLOADING}_connector", "name_preempted", "0.16", "0.19"),
                )
            ),
            Gap("0.25", None, "vLLM names such requests to the connector"),
        ),
        seam(
            Patch(
                id="offloading.lookup",
                target=f"{_SCHEDULER}.get_num_new_matched_tokens",
                why="a preempted request that is loaded while it is stored ends the engine",
                upstream="vllm-project/vllm#46014, vllm-project/vllm#46231",
                until="vLLM 0.24",
                wrapper="kvpatch.patches.offloading.legacy:around_lookup",
                parameters=("self", "request"),
                since="0.21",
                before="0.24",
            ),
            Gap("0.16", "0.21", "copies belong to requests, of which both can be in flight"),
            Gap("0.24", None, "fixed by vllm-project/vllm#46231"),
        ),
        seam(
            *(
                Patch(
                    id=f"offloading.computed_tokens{suffix}",
                    target=f"{home}:OffloadingConnectorScheduler.get_num_new_matched_tokens",
                    why="a prompt whose log-probabilities are asked for is loaded, not computed",
                    upstream="vllm-project/vllm#44585, vllm-project/vllm#44592",
                    until="vLLM 0.24",
                    wrapper="kvpatch.patches.offloading.legacy:around_match",
                    parameters=("self", "request"),
                    since=since,
                    before=before,
                )
                for suffix, home, since, before in (
                    ("", f"{OFFLOADING}.scheduler", "0.19", "0.24"),
                    ("_in_one_module", f"{OFFLOADING}_connector", "0.16", "0.19"),
                )
            ),
            Gap("0.24", None, "fixed by vllm-project/vllm#44592"),
        ),
        seam(
            *(
                Patch(
                    id=f"offloading.loads_in_order{suffix}",
                    target=f"vllm.v1.kv_offload.{home}:"
                    "SingleDirectionOffloadingHandler.transfer_async",
                    why="a load overtakes the step before it, which still writes into its blocks",
                    upstream="vllm-project/vllm#50696, vllm-project/vllm#45357 (deferred frees)",
                    until="vLLM 0.28",
                    wrapper="kvpatch.patches.offloading.legacy:around_load",
                    parameters=("self",),
                    since=since,
                    before=before,
                )
                for suffix, home, since, before in (
                    ("", "cpu.gpu_worker", "0.21", "0.28"),
                    ("_of_handlers", "worker.cpu_gpu", "0.16", "0.21"),
                )
            ),
            Gap("0.28", None, "fixed by vllm-project/vllm#50696"),
        ),
        seam(
            Patch(
                id="offloading.session",
                target="vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session",
                why="a session's block is stored under the hash of a token that it has dropped",
                upstream="vllm-project/vllm#49449",
                until="vLLM 0.32",
                wrapper="kvpatch.patches.offloading.legacy:before_session",
                parameters=("self", "session"),
                since="0.16",
                before="0.32",
            ),
            Gap("0.32", None, "fixed by vllm-project/vllm#49449"),
        ),
        seam(
            Patch(
                id="offloading.other_loads",
                target="vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:"
                "MultiConnector.update_state_after_alloc",
                why="in MultiConnector another connector loads into blocks that are being stored",
                upstream="vllm-project/vllm#46865, vllm-project/vllm#46951",
                until="vLLM 0.33",
                wrapper="kvpatch.patches.offloading.legacy:around_other_loads",
                parameters=("self", "blocks", "num_external_tokens"),
                since="0.21",
                before="0.33",
            ),
            Gap("0.16", "0.21", "a finished request keeps its blocks until they are stored"),
            Gap("0.33", None, "fixed by vllm-project/vllm#46951"),
        ),
        seam(
            *(
                Patch(
                    id=f"offloading.aborted_loads{suffix}",
                    target=f"{home}:OffloadingConnectorScheduler.request_finished",
                    why="a request that is aborted while it is loaded is freed under the load",
                    upstream="vllm-project/vllm#39186",
                    until="vLLM 0.21",
                    wrapper="kvpatch.patches.offloading.legacy:around_finished",
                    parameters=("self", "request"),
                    since=since,
                    before=before,
                )
                for suffix, home, since, before in (
                    ("", f"{OFFLOADING}.scheduler", "0.19", "0.21"),
                    ("_in_one_module", f"{OFFLOADING}_connector", "0.16", "0.19"),
                )
            ),
            Gap("0.21", None, "copies have numbers of their own"),
        ),
        seam(
            *(
                Patch(
                    id=f"offloading.aborted_reports{suffix}",
                    target=f"{home}:OffloadingConnectorScheduler.update_connector_output",
                    why="as offloading.aborted_loads; its stores are reported once more",
                    upstream="vllm-project/vllm#39186",
                    until="vLLM 0.21",
                    wrapper="kvpatch.patches.offloading.legacy:without_aborted_loads",
                    parameters=("self", "connector_output"),
                    since=since,
                    before=before,
                )
                for suffix, home, since, before in (
                    ("", f"{OFFLOADING}.scheduler", "0.19", "0.21"),
                    ("_in_one_module", f"{OFFLOADING}_connector", "0.16", "0.19"),
                )
            ),
            Gap("0.21", None, "copies have numbers of their own"),
        ),
        seam(
            Patch(
                id="offloading.reset_again",
                target=f"{_SCHEDULER}.reset_cache",
                why="a second reset before the next step fails and leaves the CPU tier as it was",
                upstream="vllm-project/vllm#41956, which asserts that no flush is to come",
                until="vLLM resets the connector twice without a step between",
                wrapper="kvpatch.patches.offloading.resets:around_reset",
                parameters=("self",),
                since="0.26",
            ),
            Patch(
                id="offloading.reset_with_jobs",
                target=f"{_SCHEDULER}.reset_cache",
                why="as offloading.reset_again; and requests keep the copies that a reset "
                "discards, the next of which ends the engine",
                upstream="vllm-project/vllm#41956; from 0.26 on the copies are forgotten",
                until="vLLM 0.26",
                wrapper="kvpatch.patches.offloading.legacy:around_reset",
                parameters=("self",),
                since="0.22",
                before="0.26",
            ),
            Gap("0.16", "0.22", "the connector cannot be reset"),
        ),
    ),
)
