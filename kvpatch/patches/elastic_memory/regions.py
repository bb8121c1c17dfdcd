"""The memory regions of a block, which an offloading connector must copy.

kvcached's pools are views into a virtual memory reservation that is larger than the number
of blocks, and in the contiguous layout the layers of a block are adjacent:

    contiguous       one pool, block b at [b*R, (b+1)*R), R = layers * page
    non-contiguous   one pool per layer, block b at [b*page, (b+1)*page)
    split K/V        one pool per layer, K and V of block b in its two halves

vLLM's own registration assumes one dense tensor per layer and copies the bytes of other
blocks. The regions here are the actual ones, so that a contiguous block is a single copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvpatch import supported
from kvpatch.patches.elastic_memory import lifting
from kvpatch.refusal import Refusal
from kvpatch.status import record
from kvpatch.upstream.kvcached_api import block_view

# Specs whose blocks are validated byte for byte by a store and load round trip.
VALIDATED_SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "MambaSpec")
# State-space layers: the name in vLLM's ``MambaAttentionBackendEnum``, and the mamba_cache_mode.
VALIDATED_STATES = (("MAMBA2", "align"), ("GDN_ATTN", "align"))
# torch's names.
VALIDATED_DTYPES = ("bfloat16", "float16", "float32")
# On the releases of ``supported.FP8``: fp8, one byte for each value, which is uint8 in most of
# vLLM's specs. In other specs, and in other modes, uint8 stands for something else.
FP8_DTYPES = ("uint8", "float8_e4m3fn", "float8_e5m2")
FP8_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")
FP8_MODES = ("NONE", "FP8_PER_TENSOR")  # of vLLM's ``KVQuantMode``
DS_MLA = "fp8_ds_mla"  # of sparse attention: fp8 with scales, and what they do not scale, in bytes
INDEXER = "INDEXER"  # vLLM's ``SparseCacheRole`` of keys in fp8 with their scales, which are uint8


class Regions(NamedTuple):
    """The memory of all blocks."""

    tensors: list[Any]  # int8 tensors of shape ``[num_blocks, bytes]``; row b is a part of block b
    groups: list[list[int]]  # per KV cache group, the indices of the regions that its layers use

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return sum(int(tensor.shape[1]) for tensor in self.tensors)


def find_regions(
    kv_caches: dict[str, Any], groups: Iterable[Iterable[str]], num_blocks: int
) -> Regions:
    """Derive the regions from kvcached's block views, in the order in which layers use them.

    Args:
        kv_caches: a KV cache tensor per layer name, as the model runner registers them.
        groups: the layer names of each KV cache group.
        num_blocks: the blocks that the scheduler allocates; kvcached reserves more.

    Refused where a layer's KV cache is not kvcached's, or has fewer blocks than that.
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
                    "its blocks cannot be located in memory",
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
    """Refuse a ``KVCacheConfig`` with a kind of KV cache, or of elements, that is not validated.

    The dtype was checked with the configuration, but a checkpoint or a model may change it.
    """
    for group in config.kv_cache_groups:
        for spec in _specs(group.kv_cache_spec):
            for refusal in _refusals(spec):
                if not lifting.lifts(refusal):
                    raise refusal


def _specs(spec: Any) -> list[Any]:
    """Return a group's spec, or of vLLM's ``UniformTypeKVCacheSpecs`` those of its layers."""
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _refusals(spec: Any) -> Iterator[Refusal]:
    kind = type(spec).__name__
    layers = getattr(spec, "mamba_type", None)
    if layers is not None:
        name, mode = layers.name, spec.mamba_cache_mode
        if (name, mode) not in VALIDATED_STATES:
            kind += f" of {name} layers in the mamba_cache_mode {mode}"
    if kind not in VALIDATED_SPECS:
        yield Refusal(
            f"this model has a KV cache of kind {kind}",
            "offloading it has not been validated by a store and load round trip",
            "run it without a KV connector, or with KVPATCH=0",
            code="KVP406",
        )
    dtype = getattr(spec, "dtype", None)  # state-space layers have several
    name = str(dtype).removeprefix("torch.")
    is_packed = (
        getattr(spec, "cache_dtype_str", "") == DS_MLA
        or getattr(getattr(spec, "cache_role", None), "name", "") == INDEXER
    )
    known = name in VALIDATED_DTYPES or _is_validated_fp8(spec, name) or is_packed
    if dtype is not None and not known:
        yield Refusal(
            f"the layers of this model have KV caches of dtype {name}",
            "offloading them has not been validated by a store and load round trip",
            "set --kv-cache-dtype bfloat16, or set KVPATCH=0",
            code="KVP418",
        )


def _is_validated_fp8(spec: Any, dtype: str) -> bool:
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", FP8_MODES[0])
    return (
        dtype in FP8_DTYPES
        and type(spec).__name__ in FP8_SPECS
        and mode in FP8_MODES
        and record.facts is not None
        and supported.is_validated(record.facts.vllm, supported.FP8)
    )
