"""Data parallelism: the engines of one server, each with memory, limit and tier of its own."""

from __future__ import annotations

from kvpatch.patch import Feature, Gap, Kind, Patch, seam
from kvpatch.supported import FLOOR

FEATURE = Feature(
    name="data-parallel",
    summary="each engine of a data parallel server has a kvcached name of its own",
    since=FLOOR,
    rules="kvpatch.patches.data_parallel.rules:RULES",
    seams=(
        seam(
            Gap(
                "0.16",
                "0.26",
                "data parallelism is refused (KVP374): vLLM gives the tiers of all ranks one name",
            ),
            Patch(
                id="parallel.name",
                target="vllm.v1.engine.core:EngineCoreProc.run_engine_core",
                why="the engines of a server inherit one kvcached name, and all but the first are "
                "refused (KVP414): they would share a page limit and the workers' sockets",
                upstream="ovg-project/kvcached, _obtain_default_ipc_name in 0.1.6",
                until="kvcached names each data parallel rank",
                wrapper="kvpatch.patches.data_parallel.name:named_by_rank",
                parameters=("dp_rank", "local_dp_rank"),
                since="0.26",
                kind=Kind.REPLACE,
            ),
        ),
    ),
)
