"""vLLM's OffloadingConnector on kvcached's memory."""

from __future__ import annotations

from kvpatch.rows import Row, feature, gap, seam
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import ENGINE_CORE, OFFLOADING

_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_IN_ONE_MODULE = f"{OFFLOADING}_connector"  # up to 0.18
_NO_FAILURE = "vllm-project/vllm, the connector asserts that every transfer has succeeded"


FEATURE = feature(
    __name__,
    summary="vLLM's OffloadingConnector copies the correct bytes of kvcached's memory",
    since=FLOOR,
    upstream=_NO_FAILURE,
    until="the connector handles transfers that fail",
    rules="together:RULES",
    seams=(
        Row(
            "offloading.use_uniform_kv_cache",
            "vllm.v1.worker.kv_connector_model_runner_mixin:"
            "KVConnectorModelRunnerMixin.use_uniform_kv_cache",
            "registration:keep_elastic(attn_groups)",
            "a cross-layer KV cache is one torch.zeros that bypasses kvcached's memory",
            "ovg-project/kvcached#269, ovg-project/kvcached#361",
            "kvcached allocates cross-layer KV caches itself, or vLLM 0.29",
            later=("0.29", "the path was removed"),
        ),
        seam(
            Row(
                "offloading.check_regions",
                f"{OFFLOADING}.worker:OffloadingConnectorWorker._init_worker",
                "registration:check_regions(self, kv_caches)",
                "regions that do not match kvcached's blocks go unnoticed",
                "none: from 0.29 on vLLM's regions follow the layout, and are correct",
                "the connector takes its regions from the allocator",
                since="0.29",
            ),
            Row(
                "offloading.register_kv_caches",
                f"{OFFLOADING}.worker:OffloadingConnectorWorker.register_kv_caches",
                "registration:register_regions",
                "vLLM registers one dense tensor per layer, and copies other blocks' bytes",
                "ovg-project/kvcached#361 (requests to keep the cross-layer speed)",
                "the connector takes its regions from the allocator",
                since="0.26",
            ),
            Row(
                "offloading.register_with_spec",
                wrapper="legacy:register_with_spec",
                why="as offloading.register_kv_caches; the KV cache config is in the spec",
                since="0.25",
            ),
            Row(
                "offloading.register_with_handlers",
                wrapper="legacy:register_with_handlers",
                why="as offloading.register_kv_caches; the worker has one handler per direction",
                since="0.19",
            ),
            Row(
                "offloading.register_with_backends",
                f"{_IN_ONE_MODULE}:",
                "legacy:register_with_backends",
                "as offloading.register_kv_caches; attention backends define the block layout",
            ),
        ),
        Row(
            "offloading.storable_chunks",
            f"{OFFLOADING}.scheduler:RequestOffloadState.storable_chunks",
            "legacy:around_storable(self, group_config, num_offloadable_tokens)",
            "a request aborted before or during its computation ends the engine",
            "vllm-project/vllm#49118, vllm-project/vllm#49146",
            since="0.26",
            earlier="an aborted request is stored as far as it was computed",
            later=("0.27", "fixed by vllm-project/vllm#49146"),
        ),
        Row(
            "offloading.last_token",
            f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler._calc_num_offloadable_tokens",
            "fixes:around_offloadable(self, req_status, num_computed_tokens)",
            "the last sampled token of a request is never computed; a block that ends with "
            "it is stored, and gives later requests wrong tokens",
            "vllm-project/vllm#54193, vllm-project/vllm#54288",
            since="0.26",
            earlier="nothing of a request is stored once it has finished",
            later=("0.30", "fixed by vllm-project/vllm#54288"),
        ),
        seam(
            Row(
                "offloading.copies_made",
                f"{OFFLOADING}.worker:OffloadingConnectorWorker.start_kv_transfers",
                "failures:around_transfers(self, metadata)",
                "a copy that fails ends the engine with an assertion that does not name it",
                since="0.19",
            ),
            Row("offloading.copies_made_in_one_module", f"{_IN_ONE_MODULE}:"),
        ),
        seam(
            Row(
                "offloading.copies_flushed",
                f"{OFFLOADING}.worker:OffloadingConnectorWorker.handle_preemptions",
                "failures:around_transfers",
                "as offloading.copies_made; the copies of preempted requests are waited for",
                since="0.19",
            ),
            Row("offloading.copies_flushed_in_one_module", f"{_IN_ONE_MODULE}:"),
        ),
        seam(
            Row(
                "offloading.copies_ended",
                f"{OFFLOADING}.worker:OffloadingConnectorWorker.get_finished",
                "failures:around_transfers(self, finished_req_ids)",
                "as offloading.copies_made; the events of copies are asked for",
                since="0.19",
            ),
            Row("offloading.copies_ended_in_one_module", f"{_IN_ONE_MODULE}:"),
        ),
        Row(
            "offloading.replaced_weights",
            f"{ENGINE_CORE}.collective_rpc",
            "legacy:around_call(self, method)",
            "weights that are replaced leave the blocks of the old ones in the CPU tier, "
            "which gives wrong tokens",
            "vllm-project/vllm, reset_cache of SimpleCPUOffloadConnector raises up to "
            "0.23 and OffloadingConnector has none up to 0.21",
            later=("0.24", "the connectors can be reset: secondary_tiers.reset_caches"),
        ),
        Row(
            "offloading.preempted_loads",
            f"{_SCHEDULER}.build_connector_meta",
            "resets:around_build(self, scheduler_output)",
            "a request that a reset preempts and the next step loads ends the engine",
            "vllm-project/vllm, build_connector_meta in 0.33 leaves such loads out",
            since="0.25",
            earlier="offloading.name_preempted leaves such loads out",
            later=("0.33", "fixed: loads of the same step are left out"),
        ),
        Row(
            "offloading.reset_of_requests",
            "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
            "legacy:around_scheduler_reset(self, reset_running_requests)",
            "blocks of requests that a reset preempts are written while they are stored",
            "vllm-project/vllm, reset_preempted_req_ids in 0.25",
            later=("0.25", "vLLM names such requests to the connector"),
        ),
        seam(
            gap("vLLM names such requests to the connector", since="0.25"),
            Row(
                "offloading.name_preempted",
                f"{_SCHEDULER}.build_connector_meta",
                "legacy:name_preempted_of_jobs(self, scheduler_output)",
                "a step does not name the requests that a reset has preempted",
                "vllm-project/vllm, reset_preempted_req_ids in 0.25",
                since="0.21",
            ),
            Row(
                "offloading.name_preempted_by_request",
                wrapper="legacy:name_preempted",
                since="0.19",
            ),
            Row("offloading.name_preempted_in_one_module", f"{_IN_ONE_MODULE}:"),
        ),
        Row(
            "offloading.lookup",
            f"{_SCHEDULER}.get_num_new_matched_tokens",
            "legacy:around_lookup(self, request)",
            "a preempted request that is loaded while it is stored ends the engine",
            "vllm-project/vllm#46014, vllm-project/vllm#46231",
            since="0.21",
            earlier="copies belong to requests, of which both can be in flight",
            later=("0.24", "fixed by vllm-project/vllm#46231"),
        ),
        seam(
            gap("fixed by vllm-project/vllm#44592", since="0.24"),
            Row(
                "offloading.computed_tokens",
                f"{_SCHEDULER}.get_num_new_matched_tokens",
                "legacy:around_match(self, request)",
                "a prompt whose log-probabilities are asked for is loaded, not computed",
                "vllm-project/vllm#44585, vllm-project/vllm#44592",
                since="0.19",
            ),
            Row("offloading.computed_tokens_in_one_module", f"{_IN_ONE_MODULE}:"),
        ),
        seam(
            gap("fixed by vllm-project/vllm#50696", since="0.28"),
            Row(
                "offloading.loads_in_order",
                "vllm.v1.kv_offload.cpu.gpu_worker:SingleDirectionOffloadingHandler.transfer_async",
                "legacy:around_load",
                "a load overtakes the step before it, which still writes into its blocks",
                "vllm-project/vllm#50696, vllm-project/vllm#45357 (deferred frees)",
                since="0.21",
            ),
            Row(
                "offloading.loads_in_order_of_handlers",
                "vllm.v1.kv_offload.worker.cpu_gpu:SingleDirectionOffloadingHandler.transfer_async",
            ),
        ),
        Row(
            "offloading.session",
            "vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session",
            "fixes:before_session(self, session)",
            "a session's block is stored under the hash of a token that it has dropped",
            "vllm-project/vllm#49449",
            later=("0.32", "fixed by vllm-project/vllm#49449"),
        ),
        Row(
            "offloading.other_loads",
            "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:"
            "MultiConnector.update_state_after_alloc",
            "fixes:around_other_loads(self, blocks, num_external_tokens)",
            "in MultiConnector another connector loads into blocks that are being stored",
            "vllm-project/vllm#46865, vllm-project/vllm#46951",
            since="0.21",
            earlier="a finished request keeps its blocks until they are stored",
            later=("0.33", "fixed by vllm-project/vllm#46951"),
        ),
        seam(
            gap("copies have numbers of their own", since="0.21"),
            Row(
                "offloading.aborted_loads",
                f"{_SCHEDULER}.request_finished",
                "legacy:around_finished(self, request)",
                "a request that is aborted while it is loaded is freed under the load",
                "vllm-project/vllm#39186",
                since="0.19",
            ),
            Row("offloading.aborted_loads_in_one_module", f"{_IN_ONE_MODULE}:"),
        ),
        seam(
            gap("copies have numbers of their own", since="0.21"),
            Row(
                "offloading.aborted_reports",
                f"{_SCHEDULER}.update_connector_output",
                "legacy:without_aborted_loads(self, connector_output)",
                "as offloading.aborted_loads; its stores are reported once more",
                "vllm-project/vllm#39186",
                since="0.19",
            ),
            Row("offloading.aborted_reports_in_one_module", f"{_IN_ONE_MODULE}:"),
        ),
        seam(
            Row(
                "offloading.reset_again",
                f"{_SCHEDULER}.reset_cache",
                "resets:around_reset",
                "a second reset before the next step fails and leaves the CPU tier as it was",
                "vllm-project/vllm#41956, which asserts that no flush is to come",
                "vLLM resets the connector twice without a step between",
                since="0.26",
            ),
            Row(
                "offloading.reset_with_jobs",
                wrapper="legacy:around_reset",
                but="and requests keep the copies that a reset discards, the next of which ends "
                "the engine",
                upstream="vllm-project/vllm#41956; from 0.26 on the copies are forgotten",
                since="0.22",
            ),
            gap("the connector cannot be reset"),
        ),
    ),
)
