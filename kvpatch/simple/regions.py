"""The connector's worker copies exactly the blocks the scheduler hands out.

It sizes a block by the storage behind each tensor. kvcached's storage is a
reservation that is larger than the blocks, so that rows would lie elsewhere and the
CPU tier have another number of blocks than the scheduler counts.
"""

from __future__ import annotations

from typing import Any

from kvpatch import geometry
from kvpatch.errors import Refusal


def around_register(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions, each as a tensor with a storage of its own size.

    Wraps ``SimpleCPUOffloadWorker.register_kv_caches(kv_caches)``, which runs unchanged
    on them.

    Raises:
        Refusal: the model has a kind of KV cache that was never compared, or worker
            and scheduler would not agree on the blocks of the CPU tier.
    """
    import torch

    kv_caches: dict[str, Any] = kwargs["kv_caches"] if "kv_caches" in kwargs else args[0]
    config = instance.kv_cache_config
    geometry.check_kinds(config)
    regions = geometry.find_regions(
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
        raise Refusal(
            "the connector registered other memory than kvcached's regions",
            "it would copy other blocks' bytes",
            "report this with your command line, or set KVPATCH=0",
            code="KVP410",
        )
    check_tier(instance, instance.num_cpu_blocks)


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
