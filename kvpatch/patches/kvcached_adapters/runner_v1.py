"""Model Runner V1 of vLLM 0.29 and later, where both runners allocate through one function."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from kvpatch.patches.elastic_memory import lifting
from kvpatch.refusal import Refusal

_lasting: ContextVar[bool] = ContextVar("kvpatch_lasting_allocation", default=False)


def set_up_worker(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Set up kvcached in a worker of Runner V1, as kvcached does for Runner V2."""
    wrapped(*args, **kwargs)
    from kvcached.integration.vllm import interfaces
    from kvcached.integration.vllm.patches import _should_enable_async_sched
    from vllm.distributed.parallel_state import (
        get_pp_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    interfaces.init_kvcached(
        tp_rank=get_tensor_model_parallel_rank(),
        world_size=get_tensor_model_parallel_world_size(),
        pp_rank=get_pp_group().rank_in_group,
        is_worker=True,
        device=str(instance.device),
        async_sched=_should_enable_async_sched(instance.vllm_config),
    )


def mark_lasting_allocation(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Mark, during the call, whether the KV cache is permanent; graph profiling's is vLLM's own.

    Layers that share their KV cache are not validated on this runner, and refused.
    """
    is_profiling = kwargs.get("is_profiling", args[1] if len(args) > 1 else False)
    if not is_profiling and getattr(instance, "shared_kv_cache_layers", None):
        refusal = Refusal(
            "layers of this model share their KV cache and it runs on Model Runner V1",
            "that is not validated on this runner",
            "set VLLM_USE_V2_MODEL_RUNNER=1, or set KVPATCH=0",
            code="KVP415",
        )
        if not lifting.lifts(refusal):
            raise refusal
    token = _lasting.set(not is_profiling)
    try:
        return wrapped(*args, **kwargs)
    finally:
        _lasting.reset(token)


def allocate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Allocate a permanent KV cache from kvcached's memory."""
    if not _lasting.get():
        return wrapped(*args, **kwargs)
    from kvcached.integration.vllm import model_runner_v2

    return model_runner_v2.allocate_kv_cache(*args, **kwargs)
