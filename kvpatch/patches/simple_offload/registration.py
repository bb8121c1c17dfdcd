"""The connector's worker copies exactly the blocks that the scheduler allocates.

Up to vLLM 0.28 the worker sizes a block by the storage of each tensor. kvcached's storage
is a reservation that is larger than the blocks, so that the rows would be misplaced and the
CPU tier would have another number of blocks than in the scheduler. From 0.29 on it uses the
KV cache config, which has all layers in one allocation, while kvcached's non-contiguous
layout has one per layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvpatch.patch import argument
from kvpatch.patches.elastic_memory.regions import check_kinds, find_regions
from kvpatch.refusal import Refusal
from kvpatch.upstream.kvcached_api import on_kvcached


def around_register(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions, each as a tensor with a storage of exactly its size.

    Refuses kinds of KV cache that are not validated, and another size of tier than the scheduler's.
    """
    import torch

    kv_caches: dict[str, Any] = argument(args, kwargs, 0, "kv_caches")
    config = instance.kv_cache_config
    check_kinds(config)
    regions = find_regions(
        kv_caches, [group.layer_names for group in config.kv_cache_groups], config.num_blocks
    )
    check_tier(instance, max(1, instance.cpu_capacity_bytes // regions.block_bytes))
    # DLPack passes address and shape only: the resulting storage ends with the region.
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
    """Register kvcached's pools, with a KV cache config that matches their allocations.

    From vLLM 0.29 on. Refuses as ``around_register``, and memory that is not kvcached's.
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
    block_bytes = plan.kv_cache_tensors[0].size // plan.num_blocks  # the size of all layers
    if not inside or sum(region.shape[1] for region in regions) != block_bytes:
        raise _other_memory()
    check_tier(instance, instance.num_cpu_blocks)


def layer_by_layer(plan: Any) -> Any:
    """Return a KV cache config with a separate allocation per layer.

    A config in which the layers of a block are contiguous is returned unchanged: kvcached's
    contiguous layout also has a single allocation.
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
    """Refuse a CPU tier of another number of blocks than the scheduler's by the KV cache config."""
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
