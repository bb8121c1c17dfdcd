"""Registering kvcached's regions with vLLM's OffloadingConnector, as up to 0.28 it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.patches.elastic_memory.regions import Regions, check_kinds, find_regions
from kvpatch.refusal import Refusal
from kvpatch.upstream import vllm_api
from kvpatch.upstream.kvcached_api import on_kvcached


@dataclass
class Rows:
    """The address and bytes of each region's first row; kept on the connector's worker."""

    places: list[tuple[int, int]]


def keep_elastic(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Return False: a KV cache of all layers would be one ``torch.zeros``, not kvcached's."""
    return False


def register_regions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the worker instead; refused as in ``checked_regions``."""
    regions = checked_regions(instance, argument(args, kwargs, 0, "kv_caches"))
    instance._init_worker(canonical(regions))


def checked_regions(worker: Any, kv_caches: dict[str, Any]) -> Regions:
    """Return a worker's regions, by its layers' KV caches; refused if they are not validated."""
    config = worker.kv_cache_config
    check_kinds(config)
    regions = find_regions(
        kv_caches, [group.layer_names for group in config.kv_cache_groups], config.num_blocks
    )
    check_size(worker, regions.block_bytes)
    remember(worker, regions.tensors)
    return regions


def check_regions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """As ``checked_regions``, for those that vLLM derives from 0.29 on: all must be kvcached's."""
    canonical_caches = argument(args, kwargs, 0, "kv_caches")
    check_kinds(instance.kv_cache_config)
    if not all(on_kvcached(region.tensor) for region in canonical_caches.tensors):
        raise Refusal(
            "the connector copies memory that is not kvcached's",
            "the engine computes its blocks in kvcached's memory",
            "report this with your command line, or set KVPATCH=0",
            code="KVP408",
        )
    check_size(instance, sum(region.page_size_bytes for region in canonical_caches.tensors))
    remember(instance, [region.tensor for region in canonical_caches.tensors])
    return wrapped(*args, **kwargs)


def remember(worker: Any, regions: list[Any]) -> None:
    """Record the first row of each region: int8 tensors of ``[num_blocks, bytes]``."""
    state.attach(worker, Rows([(region.data_ptr(), int(region.shape[1])) for region in regions]))


def check_size(worker: Any, block_bytes: int) -> None:
    """Refuse regions that do not add up to the bytes per block that the CPU tier was sized by."""
    expected = worker.spec.config.worker_kv_bytes_per_block
    if block_bytes != expected:
        raise Refusal(
            f"a block has {block_bytes} bytes in memory and {expected} in vLLM's KV cache config",
            "the CPU tier was sized by the config and would be overrun",
            "report this with your command line, or set KVPATCH=0",
            code="KVP407",
        )


def canonical(regions: Regions) -> Any:
    """Return ``regions`` as vLLM's ``CanonicalKVCaches``."""
    find = vllm_api.find
    reference, tensor_of = find("CanonicalKVCacheRef"), find("CanonicalKVCacheTensor")
    sizes = [int(tensor.shape[1]) for tensor in regions.tensors]
    return find("CanonicalKVCaches")(
        tensors=[
            tensor_of(tensor=tensor, page_size_bytes=size)
            for tensor, size in zip(regions.tensors, sizes, strict=True)
        ],
        group_data_refs=[
            [reference(tensor_idx=index, page_size_bytes=sizes[index]) for index in group]
            for group in regions.groups
        ],
    )
