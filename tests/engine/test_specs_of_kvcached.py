"""What kvcached takes of vLLM's descriptions of a KV cache: why KVP393 refuses DeepSeek-V4."""

from types import SimpleNamespace

import pytest
import torch
from kvcached.integration.vllm.model_runner_v2 import KVCachedConfigError, cache_geometry
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import MLAAttentionSpec

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


def latents():
    return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


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
