"""Sparse latent attention (DeepSeek-V3.2's, GLM-5's) on a CPU, in torch: vLLM has it on GPUs alone.

An indexer keeps one vector of each token in a KV cache of its own, and chooses the tokens that a
token attends to. Both caches are vLLM's, of any stride, addressed by block and offset:

    a block of latents        [tokens, kv_lora_rank + rope]
                 in fp8_ds_mla [tokens, 656], bytes: 512 values, a scale for each 128, and the rope
    a block of the indexer's  [tokens, size + 4], bytes: values and their scale

Values in bytes are float8_e4m3fn, their scales float32, and the rope beside them is bfloat16.

Source: ``SparseAttnIndexer`` in ``vllm/model_executor/layers/sparse_attn_indexer.py``, and
``XPUMLASparseImpl`` in ``vllm/v1/attention/backends/mla/xpu_mla_sparse.py``, of vLLM 0.33.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
PATH = f"{__name__}.Backend"
DS_MLA, TILE = "fp8_ds_mla", 128  # vLLM's name of what is packed, and values of a scale


@dataclass
class Metadata(AttentionMetadata):  # type: ignore[misc]
    """Of a step, what both attend by; all its tokens count as decoded, as on Intel's GPUs."""

    slot_mapping: Any
    block_table: Any
    requests: list[tuple[int, int, int]]  # the first token of each, the one behind its last, length
    num_decodes: int
    num_decode_tokens: int
    num_actual_tokens: int
    num_prefills: int = 0

    def rows(self, cache: Any, request: int, chosen: Any) -> Any:
        """Return the rows of a cache that a request has of its ``chosen`` tokens."""
        size = cache.shape[1]
        blocks = self.block_table[request].long()
        return cache[blocks[chosen // size], chosen % size]


class Builder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    """Of both caches."""

    def __init__(self, *args: Any, block_table_width: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Metadata:
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        return Metadata(
            common.slot_mapping,
            common.block_table_tensor,
            [(*ends, length) for *ends, length in zip(starts, starts[1:], lengths, strict=False)],
            common.num_reqs,
            common.num_actual_tokens,
            common.num_actual_tokens,
        )


class IndexerBackend(DeepseekV32IndexerBackend):  # type: ignore[misc]
    """Of the indexer's cache, in blocks of any size."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return Builder


class Attention(MLAAttentionImpl[Metadata], SharedTopkIndicesBuffer):  # type: ignore[misc]
    """To the tokens that an indexer chose, all of a step in the latent space."""

    is_sparse = True
    supports_dense_mha_prefill = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *rest: Any,
        indexer: Any = None,
        topk_indices_buffer: Any = None,
        **of_latents: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_lora_rank = of_latents["kv_lora_rank"]
        self.kv_cache_dtype = of_latents["kv_cache_dtype"]
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """There is one stream."""

    def do_kv_cache_update(
        self, latents: Any, rope: Any, cache: Any, slots: Any, *rest: Any, **more: Any
    ) -> None:
        if not cache.numel():
            return
        rope = rope.squeeze(1)
        if self.kv_cache_dtype == DS_MLA:
            rows = torch.cat([packed(latents), as_bytes(rope.bfloat16())], dim=-1)
        else:
            rows = torch.cat([latents, rope], dim=-1).to(cache.dtype)
        write(cache, slots, rows)

    def latents(self, rows: Any) -> Any:
        """Return rows of the cache as ``[tokens, kv_lora_rank + rope]``, float32."""
        if self.kv_cache_dtype != DS_MLA:
            return rows.float()
        ends = self.kv_lora_rank + 4 * (self.kv_lora_rank // TILE)
        rope = rows[:, ends:].contiguous().view(torch.bfloat16)
        return torch.cat([unpacked(rows[:, :ends], self.kv_lora_rank), rope.float()], dim=-1)

    def forward_mqa(self, q: Any, cache: Any, metadata: Metadata, layer: Any) -> tuple[Any, None]:
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out = torch.zeros(q.shape[0], q.shape[1], self.kv_lora_rank, dtype=q.dtype)
        for request, (begin, end, _) in enumerate(metadata.requests):
            for token in range(begin, end):
                chosen = self.topk_indices_buffer[token]
                rows = self.latents(metadata.rows(cache, request, chosen[chosen >= 0].long()))
                weights = torch.softmax((q[token].float() @ rows.T) * self.scale, dim=-1)
                out[token] = (weights @ rows[:, : self.kv_lora_rank]).to(q.dtype)
        return out, None


class Backend(AttentionBackend):  # type: ignore[misc]
    """Of the latents' cache; by its name vLLM packs it in fp8."""

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


def write(cache: Any, slots: Any, rows: Any) -> None:
    """Write rows of tokens into a cache; a slot of -1 is padding."""
    slots = slots.flatten().long()
    used = slots >= 0
    size = cache.shape[1]
    cache[slots[used] // size, slots[used] % size] = rows[: len(slots)][used]


def as_bytes(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.uint8)


def packed(values: Any) -> Any:
    """Return values of ``[tokens, n]`` as bytes, with the scales of their tiles behind them."""
    tiles = values.float().unflatten(-1, (-1, TILE))
    scales = (tiles.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-10)
    rows = (tiles / scales).to(FP8).flatten(1), scales.flatten(1)
    return torch.cat([as_bytes(one) for one in rows], dim=-1)


def unpacked(rows: Any, size: int) -> Any:
    """Return the ``size`` values of each row that ``packed`` made, float32."""
    values = rows[:, :size].contiguous().view(FP8).float().unflatten(-1, (-1, TILE))
    return (values * rows[:, size:].contiguous().view(torch.float32).unsqueeze(-1)).flatten(1)


def choose(self: Any, hidden_states: Any, q: Any, k: Any, weights: Any) -> Any:
    """Store the keys of a step, and choose for each of its tokens those that it attends to.

    Args:
        self: a ``SparseAttnIndexer``.
        hidden_states: unused.
        q: ``[tokens, heads, size]``.
        k: ``[tokens, size]``.
        weights: ``[tokens, heads]``, of a token's heads.
    """
    chosen = self.topk_indices_buffer
    found = get_forward_context().attn_metadata
    if not isinstance(found, dict):  # vLLM measures
        return chosen
    metadata, cache = found[self.k_cache.prefix], self.k_cache.kv_cache
    write(cache, metadata.slot_mapping, packed(k))
    chosen[: metadata.num_decode_tokens] = -1
    for request, (begin, end, length) in enumerate(metadata.requests):
        keys = unpacked(metadata.rows(cache, request, torch.arange(length)), self.head_dim)
        for token in range(begin, end):
            seen = keys[: length - end + token + 1]
            scores = weights[token].float() @ torch.relu(q[token].float() @ seen.T)
            best = scores.topk(min(self.topk_tokens, len(seen))).indices.sort().values
            chosen[token, : len(best)] = best.int()
    return chosen


def unquantised(q: Any, *rest: Any, **more: Any) -> tuple[Any, Any]:
    """Return queries as they are, and scales of 1."""
    return q, torch.ones(*q.shape[:-1], 1)


def install() -> None:
    """Let vLLM's CPU build run models of sparse latent attention, on one thread or several."""
    original = CpuPlatform.get_attn_backend_cls.__func__

    def backend(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("attn_selector_config") or args[1]
        return PATH if config.use_sparse else original(cls, *args, **kwargs)

    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    SparseAttnIndexer.forward_cpu = choose
    deepseek_v2.DeepseekV32IndexerCache.get_attn_backend = lambda self: IndexerBackend
    deepseek_v2.per_token_group_quant_fp8 = unquantised
