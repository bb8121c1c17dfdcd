"""kvcached 0.1.6 on vLLM releases that came after it.

When it patches vLLM, kvcached chooses its variant of a patch by vLLM's version. Where a newer
release needs the variant of an older one, the older version is substituted for that decision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch.patch import argument

# What kvcached registers for vLLM <0.31 and later releases need as well.
_FOR_LATER = ("model_runner_v2", "kv_layout_v2")
_LATER = ">=0.29.0"

# Set by vLLM's own block pool, read by its methods, unknown to kvcached's.
_POOL_ATTRIBUTES = ("medium", "num_hash_lookahead_tokens")


def _with_version(version: str, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    actual = instance.detected_version
    instance.detected_version = version
    try:
        return wrapped(*args, **kwargs)
    finally:
        instance.detected_version = actual


def as_on_0_30(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let one of kvcached's patches be made as for vLLM 0.30.

    ``BlockPool``, the coordinator's geometry and the allocation of slots have the same
    shape in 0.30 to 0.33.
    """
    return _with_version("0.30.0", wrapped, instance, args, kwargs)


def as_on_0_28(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let kvcached's patch of ``EngineCore.__init__`` be made as for vLLM 0.28.

    That is the release for which it refuses neither runner. What it refuses on later
    ones, kvpatch's own rules refuse: see ``configuration``.
    """
    return _with_version("0.28.0", wrapped, instance, args, kwargs)


def register_for_later_releases(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Register kvcached's adapter of Model Runner V2 for later releases too.

    Wraps ``PatchManager.register_patches_with_versions(patches)``, which takes pairs of
    a patch and its range.
    """
    patches = argument(args, kwargs, 0, "patches")
    return wrapped(
        [(patch, _LATER if patch.patch_name in _FOR_LATER else own) for patch, own in patches]
    )


def carry_pool_attributes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Give kvcached's block pool what vLLM set on the pool it takes the place of."""
    native = instance.block_pool
    result = wrapped(*args, **kwargs)
    for name in _POOL_ATTRIBUTES:
        if hasattr(native, name):
            setattr(instance.block_pool, name, getattr(native, name))
    return result


def request_memory(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
    """Take the weights that another process holds off the engine's budget, as vLLM does.

    Wraps kvcached's ``request_memory(init_snapshot, cache_config)``; vLLM 0.32 gives a
    third argument, in bytes.

    Raises:
        ValueError: those weights leave nothing of the budget, as in vLLM.
    """

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
    """Put around kvcached's profile run what vLLM puts around its own.

    Wraps ``Worker.determine_available_memory``. From 0.31 vLLM keeps the allocator from
    splitting large blocks meanwhile, and randomises the inputs where the model needs it;
    from 0.32 the configuration is current as well.
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
