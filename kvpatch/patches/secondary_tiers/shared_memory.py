"""The primary tier's shared memory belongs to one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpatch.patch import argument
from kvpatch.refusal import Refusal
from kvpatch.upstream import connectors


def around_engine_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse an engine whose primary tier would be another engine's memory.

    Wraps ``EngineCore.__init__``. vLLM names the memory after ``engine_id``, and opens existing
    memory of that name, because the workers of an engine share it in this way.
    """
    config = argument(args, kwargs, 0, "vllm_config")
    transfer = config.kv_transfer_config
    if connectors.offloading(transfer):
        path = Path(f"/dev/shm/vllm_offload_{transfer.engine_id}.mmap")
        if path.exists():
            raise Refusal(
                f"the CPU tier's shared memory {path} already exists",
                f"another engine with engine_id {transfer.engine_id} is running or was killed, and "
                "two engines that share this memory would load each other's blocks",
                "give each engine its own engine_id in kv_transfer_config, or remove the "
                "file when no engine uses it",
                code="KVP413",
            )
    return wrapped(*args, **kwargs)
