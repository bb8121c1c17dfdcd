"""Which bytes a block has: the regions an offloading connector must copy.

kvcached's pools are views into a virtual reservation that is larger than the
block count, and in the contiguous layout a block's layers lie side by side:

    contiguous       one pool, block b at [b*R, (b+1)*R), R = layers * page
    non-contiguous   one pool a layer, block b at [b*page, (b+1)*page)
    split K/V        one pool a layer, K and V of block b in its two halves

vLLM's own registration assumes a dense tensor a layer and copies other blocks'
bytes. Here each region is what the memory really has, so that a contiguous block
is one copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvpatch.calls import argument
from kvpatch.errors import Refusal
from kvpatch.status import block_view, on_kvcached

# Specs whose blocks have been compared byte for byte after a round trip.
PROVEN_SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "MambaSpec")
# Of the layers that keep a state: the name in vLLM's ``MambaAttentionBackendEnum``, and which of
# their states are cached.
PROVEN_STATES = (("MAMBA2", "align"),)


@dataclass
class Regions:
    """The memory of all blocks.

    Attributes:
        tensors: int8 tensors of shape ``[num_blocks, bytes]``; row b is a part of block b.
        groups: for each KV cache group, the indices of the regions its layers use.
    """

    tensors: list[Any]
    groups: list[list[int]]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return sum(int(tensor.shape[1]) for tensor in self.tensors)


def find_regions(
    kv_caches: dict[str, Any], groups: Iterable[Iterable[str]], num_blocks: int
) -> Regions:
    """Derive the regions from kvcached's block views.

    Args:
        kv_caches: a KV cache tensor per layer name, as the model runner registers them.
        groups: the layer names of each KV cache group.
        num_blocks: the blocks the scheduler hands out; kvcached reserves more.

    Returns:
        The regions, in the order of the first layer that uses each.

    Raises:
        Refusal: a layer's KV cache is not kvcached's, or has fewer blocks than
            the scheduler hands out.
    """
    import torch

    tensors: list[Any] = []
    indices_of_view: dict[tuple[Any, ...], list[int]] = {}
    group_indices: list[list[int]] = []
    for names in groups:
        used: list[int] = []
        for name in names:
            view = block_view(kv_caches[name])
            if view is None or view.shape[0] < num_blocks:
                raise Refusal(
                    f"the KV cache of {name} is not {num_blocks} blocks of kvcached's memory",
                    "its blocks cannot be told apart in memory",
                    "report this with your command line, or set KVPATCH=0",
                    code="KVP405",
                )
            key = (view.data_ptr(), tuple(view.shape), tuple(view.stride()))
            if key not in indices_of_view:
                parts = [view] if view.ndim == 2 else [view[:, 0], view[:, 1]]
                indices_of_view[key] = list(range(len(tensors), len(tensors) + len(parts)))
                tensors += [part[:num_blocks].view(torch.int8) for part in parts]
            used += [index for index in indices_of_view[key] if index not in used]
        group_indices.append(used)
    return Regions(tensors, group_indices)


def check_kinds(config: Any) -> None:
    """Check every group of a ``KVCacheConfig``.

    Raises:
        Refusal: the model has a kind of KV cache that was never compared.
    """
    for group in config.kv_cache_groups:
        kind = type(group.kv_cache_spec).__name__
        layers = getattr(group.kv_cache_spec, "mamba_type", None)
        if layers is not None:
            name, mode = layers.name, group.kv_cache_spec.mamba_cache_mode
            if (name, mode) not in PROVEN_STATES:
                kind += f" of {name} layers in the mamba_cache_mode {mode}"
        if kind not in PROVEN_SPECS:
            raise Refusal(
                f"this model has a KV cache of kind {kind}",
                "offloading it from kvcached's memory was never compared with plain vLLM",
                "run it without a KV connector, or with KVPATCH=0",
                code="KVP406",
            )


def register_regions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the OffloadingConnector's worker.

    Takes the place of ``OffloadingConnectorWorker.register_kv_caches(kv_caches)``.

    Raises:
        Refusal: the model has a kind of KV cache that was never compared, or the
            regions do not add up to the bytes the CPU tier was sized by.
    """
    regions = checked_regions(instance, argument(args, kwargs, 0, "kv_caches"))
    instance._init_worker(canonical(regions))


def checked_regions(worker: Any, kv_caches: dict[str, Any]) -> Regions:
    """Return the regions of a worker's KV caches.

    Args:
        worker: the ``OffloadingConnectorWorker``.
        kv_caches: a KV cache tensor per layer name.

    Raises:
        Refusal: see ``register_regions``.
    """
    config = worker.kv_cache_config
    check_kinds(config)
    regions = find_regions(
        kv_caches, [group.layer_names for group in config.kv_cache_groups], config.num_blocks
    )
    check_size(worker, regions.block_bytes)
    remember(worker, regions.tensors)
    return regions


def check_regions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Check the regions that vLLM itself derived, from 0.29 on.

    Wraps ``OffloadingConnectorWorker._init_worker(kv_caches)``.

    Raises:
        Refusal: the model has a kind of KV cache that was never compared, a region lies
            outside kvcached's memory, or they do not add up to a block.
    """
    canonical_caches = argument(args, kwargs, 0, "kv_caches")
    check_kinds(instance.kv_cache_config)
    if not all(on_kvcached(region.tensor) for region in canonical_caches.tensors):
        raise Refusal(
            "the connector copies memory that is not kvcached's",
            "the blocks that the engine computes lie in kvcached's memory",
            "report this with your command line, or set KVPATCH=0",
            code="KVP408",
        )
    check_size(instance, sum(region.page_size_bytes for region in canonical_caches.tensors))
    remember(instance, [region.tensor for region in canonical_caches.tensors])
    return wrapped(*args, **kwargs)


def remember(worker: Any, regions: list[Any]) -> None:
    """Keep where each region's first row lies: ``kvpatch_rows``, (address, bytes) each.

    Args:
        worker: the ``OffloadingConnectorWorker``.
        regions: int8 tensors of ``[num_blocks, bytes]``, as they were registered.
    """
    worker.kvpatch_rows = [(region.data_ptr(), int(region.shape[1])) for region in regions]


def check_size(worker: Any, block_bytes: int) -> None:
    """Refuse regions that do not add up to what the CPU tier was sized by.

    Args:
        worker: the ``OffloadingConnectorWorker``.
        block_bytes: bytes of one block over all regions.

    Raises:
        Refusal: they do not.
    """
    expected = worker.spec.config.worker_kv_bytes_per_block
    if block_bytes != expected:
        raise Refusal(
            f"a block has {block_bytes} bytes in memory and {expected} in vLLM's plan",
            "the CPU tier was sized by the plan and would be overrun or mixed up",
            "report this with your command line, or set KVPATCH=0",
            code="KVP407",
        )


def canonical(regions: Regions) -> Any:
    """Return ``regions`` as vLLM's ``CanonicalKVCaches``."""
    from kvpatch.older_names import find

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
