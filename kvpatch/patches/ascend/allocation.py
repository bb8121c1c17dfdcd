"""vllm-ascend's KV cache, which its runner allocates and shapes itself, on kvcached's memory."""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument
from kvpatch.patches.ascend import standing
from kvpatch.patches.elastic_memory import verify
from kvpatch.refusal import Refusal
from kvpatch.upstream import kvcached_api


def from_kvcached(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Allocate kvcached's pools, by kvcached's method of vLLM's runner."""
    config = argument(args, kwargs, 0, "kv_cache_config")
    check_kinds(config)
    instance.hybrid_with_attn_and_mamba = False  # which vllm-ascend's method decides
    return instance._allocate_kv_cache_from_kvcached(config)


def check_kinds(config: Any) -> None:
    """Refuse other layers than full attention's in one group, which vllm-ascend lays out itself."""
    kinds = {type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups}
    if len(config.kv_cache_groups) != 1 or kinds != {"FullAttentionSpec"}:
        raise Refusal(
            f"this model has KV caches of {', '.join(sorted(kinds))} on an NPU",
            "only models whose layers all have full attention are validated there",
            "run it with KVPATCH=0",
            code="KVP605",
        )


def as_pairs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return K and V of each layer as vllm-ascend's backend takes them: the halves of its pool."""
    shaped = instance._reshape_kv_cache_tensors_from_kvcached(
        argument(args, kwargs, 0, "kv_cache_config"),
        argument(args, kwargs, 1, "kv_cache_raw_tensors"),
    )
    return {name: halves(cache) for name, cache in shaped.items()}


def halves(cache: Any) -> tuple[Any, Any]:
    """Return K and V, with kvcached's view of the layer's blocks on the first."""
    key, value = cache[0], cache[1]
    kvcached_api.mark(key, kvcached_api.block_view(cache))
    return key, value


def around_kv_cache_tensors(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a worker without kvcached's KV caches, or all patches: vllm-ascend made its own."""
    standing.check(instance.vllm_config.scheduler_config.get_scheduler_cls())
    return verify.around_kv_cache_tensors(wrapped, instance, args, kwargs)


def after_shutdown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """End kvcached's listener with the worker, as kvcached does for vLLM's."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        from kvcached import tp_ipc_util

        tp_ipc_util.stop_worker_listener_threads()
