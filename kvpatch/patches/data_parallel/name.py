"""The kvcached name of a data parallel rank.

Every rank gets a suffix, the first one too: the server's own name is then no engine's, so that no
verb that is meant for the server reaches a part of it, and a rank that kept it could not be told
from a server without ranks.
"""

from __future__ import annotations

from typing import Any

from kvpatch.control import protocol
from kvpatch.patches.elastic_memory import ipc_name


def named_by_rank(original: Any) -> Any:
    """Return ``EngineCoreProc.run_engine_core``, which names its engine first.

    Nothing in the engine's process has used the name yet, and only here is the first rank of a
    dense model known. No wrapper, because a process that is spawned finds its target by name.
    """
    run = getattr(original, "__func__", original)

    def run_engine_core(
        *args: Any, dp_rank: int = 0, local_dp_rank: int = 0, **kwargs: Any
    ) -> None:
        parallel = kwargs["vllm_config"].parallel_config
        if parallel.data_parallel_size > 1 or dp_rank > 0:  # as vLLM has it
            ipc_name.rename(lambda name: protocol.name_of_rank(name, dp_rank))
        run(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)

    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(run_engine_core, name, getattr(run, name))
    return staticmethod(run_engine_core)
