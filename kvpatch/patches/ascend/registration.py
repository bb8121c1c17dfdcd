"""vllm-ascend's worker registers K and V of kvcached's memory, each as a region of its own."""

from __future__ import annotations

from typing import Any

from kvpatch.patches.simple_offload import registration


def around_register(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions, each as a tensor with a storage of exactly its size.

    Wraps ``SimpleCPUOffloadNPUWorker.register_kv_caches(kv_caches)``, which takes one region per
    storage, and runs unchanged on these.

    Raises:
        Refusal: as for vLLM's own worker before 0.29.
    """
    registration.around_register(wrapped, instance, args, kwargs)
