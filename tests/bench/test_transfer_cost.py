"""Registration, and the descriptors of a transfer, by layers and blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from parts import sizes
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler
from vllm.v1.simple_kv_offload import cuda_mem_ops

from kvpatch.patches.elastic_memory.regions import Regions, find_regions
from kvpatch.patches.offloading.registration import canonical

POOL = 8192  # blocks
ROW = 64  # bytes of a block of a layer: what is measured does not depend on it


class Cache:
    """A layer's KV cache, as far as its block view is read."""

    def __init__(self, view: Any) -> None:
        self._kvcached_block_copy_view = view


def caches(layers: int, contiguous: bool) -> dict[str, Cache]:
    """Views as kvcached makes them: one pool, or one for each layer."""
    if contiguous:
        pool = torch.zeros((POOL, layers * ROW), dtype=torch.uint8)
        return {f"layer{n}": Cache(pool) for n in range(layers)}
    return {f"layer{n}": Cache(torch.zeros((POOL, ROW), dtype=torch.uint8)) for n in range(layers)}


def regions(layers: int, contiguous: bool) -> Regions:
    made = caches(layers, contiguous)
    return find_regions(made, [list(made)], POOL)


LAYOUTS = (("contiguous", True), ("a pool for each layer", False))


@pytest.mark.parametrize(("layout", "contiguous"), LAYOUTS)
@pytest.mark.parametrize("layers", sizes(4, 16, 64, 128))
def test_registration(part, layers, layout, contiguous):
    made = caches(layers, contiguous)
    names = [list(made)]
    part(
        f"registration, {layout}",
        layers,
        "layers",
        lambda: canonical(find_regions(made, names, POOL)),
    )


def shuffled(blocks: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0)
    return source.permutation(POOL)[:blocks], source.permutation(POOL)[:blocks]


@pytest.mark.parametrize(("layout", "contiguous"), LAYOUTS)
@pytest.mark.parametrize("blocks", sizes(64, 512, 4096))
def test_descriptors_of_the_offloading_connector(part, blocks, layout, contiguous):
    """vLLM's own, which a GPU takes, on the regions that kvpatch registers for 32 layers."""
    tensors = regions(32, contiguous)
    refs = canonical(tensors).group_data_refs
    handler = SimpleNamespace(
        layer_refs_per_group=refs,
        src_tensors=tensors.tensors,
        dst_tensors=tensors.tensors,
        src_blocks_per_chunk=1,
        dst_blocks_per_chunk=1,
    )
    source, target = shuffled(blocks)
    arrays = [np.empty(blocks * len(refs[0]), dtype=np.uint64) for _ in range(3)]

    def fill() -> None:
        count, _ = SingleDirectionOffloadingHandler._fill_direct_ops(
            handler, 0, source, target, blocks, 0, 0, *arrays, 0
        )
        assert count == len(arrays[0])

    part(f"descriptors, OffloadingConnector, {layout}, 32 layers", blocks, "blocks", fill)


@pytest.mark.parametrize(("layout", "contiguous"), LAYOUTS)
@pytest.mark.parametrize("blocks", sizes(64, 512, 4096))
def test_descriptors_of_the_simple_connector(part, blocks, layout, contiguous, monkeypatch):
    """vLLM's own, up to the call of the driver."""
    tensors = regions(32, contiguous).tensors
    monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", (lambda *arguments: 0, 1))
    named = {f"region{n}": tensor for n, tensor in enumerate(tensors)}
    stream = SimpleNamespace(cuda_stream=0)
    params = cuda_mem_ops.build_params(named, named, stream)
    source, target = (ids.tolist() for ids in shuffled(blocks))
    part(
        f"descriptors, simple connector, {layout}, 32 layers",
        blocks,
        "blocks",
        lambda: cuda_mem_ops.copy_blocks(source, target, params),
    )
