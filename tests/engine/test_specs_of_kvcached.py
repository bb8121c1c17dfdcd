"""What kvcached takes of vLLM's descriptions of a KV cache.

It takes none of DeepSeek-V4's windows, which KVP393 refuses, and pages of two sizes, as an indexer
has them, only where a block is contiguous.
"""

from types import SimpleNamespace

import pytest
import torch
from kvcached.integration.vllm import model_runner_v2
from kvcached.integration.vllm.model_runner_v2 import KVCachedConfigError, cache_geometry
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import MLAAttentionSpec, UniformTypeKVCacheSpecs

BLOCKS = 4


def described(*specs):
    """A KV cache of one layer of each spec, whose blocks lie side by side."""
    layers = [f"layers.{number}" for number in range(len(specs))]
    sizes = [spec.page_size_bytes for spec in specs]
    tensors = [
        SimpleNamespace(
            layers=[layer],
            size=BLOCKS * sum(sizes),
            block_stride=sum(sizes),
            layer_stride=size,
            offset=sum(sizes[:number]),
        )
        for number, (layer, size) in enumerate(zip(layers, sizes, strict=True))
    ]
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=layers[at : at + 1])
        for at, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=tensors, num_blocks=BLOCKS)


def latents(size=576, dtype=torch.bfloat16):
    return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=size, dtype=dtype)


def windows_of_latents():
    """What vLLM describes of a layer of DeepSeek-V4."""
    layer = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        bounded_replay=False,
        block_size=64,
        head_dim=512,
        dtype=torch.bfloat16,
        window_size=128,
    )
    return DeepseekV4SWACache.get_kv_cache_spec(layer, None)


def test_kvcached_takes_no_windows_of_latents():
    assert cache_geometry(described(latents())).page_bytes == latents().page_size_bytes
    with pytest.raises(KVCachedConfigError, match="SlidingWindowSpec, MLAAttentionSpec and"):
        cache_geometry(described(latents(), windows_of_latents()))


@pytest.mark.parametrize("contiguous", [True, False])
def test_pages_of_two_sizes_need_contiguous_blocks(monkeypatch, contiguous):
    monkeypatch.setattr(model_runner_v2, "CONTIGUOUS_LAYOUT", contiguous)
    specs = {"layers.0": latents(), "layers.1": latents(132, torch.uint8)}
    config = described(*specs.values())
    group = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
    config.kv_cache_groups = [SimpleNamespace(kv_cache_spec=group, layer_names=list(specs))]
    if contiguous:
        both = sum(spec.page_size_bytes for spec in specs.values())
        assert cache_geometry(config).page_bytes * 2 == both
    else:
        with pytest.raises(KVCachedConfigError, match="require uniform pages"):
            cache_geometry(config)
