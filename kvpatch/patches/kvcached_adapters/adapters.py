"""kvcached 0.1.6 on newer vLLM releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Set by vLLM's own block pool and read by its methods, but not set by kvcached's.
_POOL_ATTRIBUTES = ("medium", "num_hash_lookahead_tokens")


def carry_pool_attributes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Copy attributes of vLLM's block pool to kvcached's, which replaces it."""
    native = instance.block_pool
    result = wrapped(*args, **kwargs)
    for name in _POOL_ATTRIBUTES:
        if hasattr(native, name):
            setattr(instance.block_pool, name, getattr(native, name))
    return result


def request_memory(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
    """Subtract weights held by another process, vLLM 0.32's third argument, from the budget."""

    def bind(init_snapshot: Any, cache_config: Any, external_weight_memory: int = 0) -> Any:
        return (init_snapshot, cache_config), external_weight_memory

    taken, external = bind(*args, **kwargs)
    budget = int(wrapped(*taken)) - int(external)
    if budget <= 0:
        raise ValueError(
            f"weights of {external} bytes that are held outside this process exceed the "
            "desired GPU memory utilization; increase --gpu-memory-utilization"
        )
    return budget


def profile_as_vllm(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
    """Run kvcached's profile run with the same settings as vLLM's own.

    From 0.31 on vLLM prevents the allocator from splitting large blocks, and randomizes the inputs
    if the model needs it; from 0.32 on it also sets the current configuration.
    """
    from vllm.config import set_current_vllm_config

    runner = instance.model_runner
    profile: Callable[..., Any] = runner.profile_run

    def profile_run(*run_args: Any, **run_kwargs: Any) -> Any:
        run_kwargs.setdefault("randomize_inputs", instance.randomize_dummy_inputs)
        with (
            instance._scoped_allocator_max_split(max_split_size_mb=20),
            set_current_vllm_config(instance.vllm_config),
        ):
            return profile(*run_args, **run_kwargs)

    runner.profile_run = profile_run
    try:
        return int(wrapped(*args, **kwargs))
    finally:
        del runner.profile_run
