"""Data parallelism: the engines of one server, each with memory, limit and tier of its own."""

from __future__ import annotations

from kvpatch.rows import feature, replacement
from kvpatch.supported import FLOOR

FEATURE = feature(
    __name__,
    summary="each engine of a data parallel server has a kvcached name of its own",
    since=FLOOR,
    rules="rules:RULES",
    seams=(
        replacement(
            "data_parallel.name",
            "vllm.v1.engine.core:EngineCoreProc.run_engine_core",
            "name:named_by_rank(dp_rank, local_dp_rank)",
            "the engines of a server inherit one kvcached name, and all but the first are "
            "refused (KVP414): they would share a page limit and the workers' sockets",
            "ovg-project/kvcached, _obtain_default_ipc_name in 0.1.6",
            "kvcached names each data parallel rank",
            since="0.26",
            earlier="data parallelism is refused (KVP374): vLLM gives the tiers of all ranks one "
            "name",
        ),
    ),
)
