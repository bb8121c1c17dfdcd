"""The connector's worker copies exactly the blocks the scheduler hands out.

Up to vLLM 0.28 it sizes a block by the storage behind each tensor. kvcached's storage
is a reservation that is larger than the blocks, so that rows would lie elsewhere and the
CPU tier have another number of blocks than the scheduler counts. From 0.29 on it goes
by the plan of the KV cache, which has all layers in one allocation, where kvcached
has one for each layer in its non-contiguous layout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvpatch.patch import argument
from kvpatch.patches.elastic_memory.regions import check_kinds, find_regions
from kvpatch.refusal import Refusal
from kvpatch.upstream.kvcached_api import on_kvcached


def around_register(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions, each as a tensor with a storage of its own size.

    Wraps ``SimpleCPUOffloadWorker.register_kv_caches(kv_caches)``, which runs unchanged
    on them.

    Raises:
        Refusal: the model has a kind of KV cache that was never compared, or worker
            and scheduler would not agree on the blocks of the CPU tier.
    """
    import torch

    kv_caches: dict[str, Any] = argument(args, kwargs, 0, "kv_caches")
    config = instance.kv_cache_config
    check_kinds(config)
    regions = find_regions(
        kv_caches, [group.layer_names for group in config.kv_cache_groups], config.num_blocks
    )
    check_tier(instance, max(1, instance.cpu_capacity_bytes // regions.block_bytes))
    # The capsule carries address and shape only: the storage made of it ends with the region.
    wrapped(
        {
            f"region{index}": torch.from_dlpack(region)
            for index, region in enumerate(regions.tensors)
        }
    )
    registered = [
        (tensor.data_ptr(), tuple(tensor.shape)) for tensor in instance.gpu_kv_caches.values()
    ]
    if registered != [(region.data_ptr(), tuple(region.shape)) for region in regions.tensors]:
        raise _other_memory()
    check_tier(instance, instance.num_cpu_blocks)


def around_register_placed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's pools, with a plan that places every layer where it is.

    Wraps ``SimpleCPUOffloadWorker.register_kv_caches(kv_caches)`` from vLLM 0.29 on.

    Raises:
        Refusal: the model has a kind of KV cache that was never compared, a region is not
            kvcached's, or they do not add up to a block.
    """
    plan = instance.kv_cache_config
    check_kinds(plan)
    instance.kv_cache_config = layer_by_layer(plan)
    try:
        wrapped(*args, **kwargs)
    finally:
        instance.kv_cache_config = plan
    regions = list(instance.gpu_kv_caches.values())
    inside = all(on_kvcached(region) for region in regions)
    block_bytes = plan.kv_cache_tensors[0].size // plan.num_blocks  # the size is that of all
    if not inside or sum(region.shape[1] for region in regions) != block_bytes:
        raise _other_memory()
    check_tier(instance, instance.num_cpu_blocks)


def layer_by_layer(plan: Any) -> Any:
    """Return the plan of a KV cache with an allocation of its own for every layer.

    A plan in which a block's layers lie together is returned as it is: its one
    allocation is one in kvcached's contiguous layout too.
    """
    blocks = plan.num_blocks
    if any(one.layer_stride < blocks * one.block_stride for one in plan.kv_cache_tensors):
        return plan
    return replace(
        plan,
        kv_cache_tensors=[
            replace(one, size=one.layer_stride, layers=[layer], offset=0)
            for one in plan.kv_cache_tensors
            for layer in one.layers
        ],
    )


def _other_memory() -> Refusal:
    return Refusal(
        "the connector registered other memory than kvcached's regions",
        "it would copy other blocks' bytes",
        "report this with your command line, or set KVPATCH=0",
        code="KVP410",
    )


def check_tier(worker: Any, blocks: int) -> None:
    """Compare a worker's blocks of the CPU tier with the scheduler's count.

    Raises:
        Refusal: the scheduler, which sizes the tier by the plan of the KV cache, hands
            out another number.
    """
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    plan = SimpleCPUOffloadScheduler._derive_cpu_config(
        worker.kv_cache_config, worker.cpu_capacity_bytes
    )
    if blocks != plan.num_blocks:
        raise Refusal(
            f"the CPU tier has {blocks} blocks in the worker and {plan.num_blocks} in the "
            "scheduler",
            "blocks would be copied past the end of the tier, or never",
            "report this with your command line, or set KVPATCH=0",
            code="KVP411",
        )
