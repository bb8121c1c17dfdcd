"""Latent attention (MLA) on the host device, with any cached prefix and any block stride.

vLLM's CPU backend for these models reads its KV cache as one dense tensor, and disables
prefix caching, without which a KV connector cannot load anything. Here a token's row is
addressed by block and offset. Written for correctness, not for speed.

    a block of the KV cache   [tokens, kv_lora_rank + rope]: per token, shared by all heads

Source: ``CPUMLAImpl`` in ``vllm/v1/attention/backends/mla/cpu_mla.py``, and
``gather_mla_context_cache_cpu`` in ``vllm/_custom_ops.py``.
"""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument

_ROTARY = "rotary_embedding"  # vLLM's name of the op


def keep_prefix_caching(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Keep prefix caching, which vLLM disables here, with a rotary embedding correct with it.

    vLLM's CPU kernel for rotary embeddings does not rotate the first token of a step if the keys
    are a view into another tensor, as in these models: after a cached prefix it needs it.
    """
    config = argument(args, kwargs, 0, "vllm_config")
    configured = config.cache_config.enable_prefix_caching
    wrapped(*args, **kwargs)
    if config.model_config is not None and config.model_config.use_mla:
        config.cache_config.enable_prefix_caching = configured
        ops = config.compilation_config.custom_ops
        ops[:] = [op for op in ops if op != f"+{_ROTARY}"] + [f"-{_ROTARY}"]


def write(
    self: Any,
    kv_c_normed: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    skip_scale: bool = False,
) -> None:
    """Write new tokens: ``kv_c_normed`` of ``[tokens, rank]``, ``k_pe`` of ``[tokens, 1, rope]``.

    A slot is block * tokens per block + offset; -1 is padding. vLLM passes ``skip_scale`` from
    0.33 on, for a KV cache in fp8, which latent attention does not have on a CPU.
    """
    import torch

    if kv_cache.numel() == 0:
        return
    slots = slot_mapping.flatten().to(torch.long)
    real = slots >= 0
    rows = torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1).to(kv_cache.dtype)
    size = kv_cache.shape[1]
    kv_cache[slots[real] // size, slots[real] % size] = rows[: len(slots)][real]


def _context(kv_cache: Any, blocks: Any, tokens: int) -> Any:
    """Return the rows of a request's first ``tokens`` tokens: ``[tokens, rank + rope]``."""
    size = kv_cache.shape[1]
    used = blocks[: -(-tokens // size)].long()
    return kv_cache[used].flatten(0, 1)[:tokens]


def decode(
    self: Any, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any
) -> tuple[Any, None]:
    """Attend to one token per request, whose query is already in the latent space.

    ``q`` is ``[tokens, heads, rank + rope]``, or its two parts; the KV cache ``[blocks, tokens,
    rank + rope]`` of any stride; returned are ``[tokens, heads, rank]``, and no log-sum-exp.
    """
    import torch

    if isinstance(q, tuple):
        q = torch.cat(q, dim=-1)
    of = attn_metadata.decode
    out = torch.zeros(q.shape[0], self.num_heads, self.kv_lora_rank, dtype=q.dtype)
    for token in range(q.shape[0]):
        rows = _context(kv_c_and_k_pe_cache, of.block_table[token], int(of.seq_lens[token]))
        weights = torch.softmax((q[token].float() @ rows.float().T) * self.scale, dim=-1)
        out[token] = (weights @ rows[:, : self.kv_lora_rank].float()).to(q.dtype)
    return out, None


def gather(*, src_cache: Any, dst: Any, block_table: Any, starts: Any, cu_seq_lens: Any) -> None:
    """Copy each request's cached tokens, from ``starts``, to ``cu_seq_lens`` in ``dst``."""
    ends = cu_seq_lens.tolist()
    for request, (begin, end, start) in enumerate(
        zip(ends, ends[1:], starts.tolist(), strict=False)
    ):
        last = start + end - begin
        dst[begin:end] = _context(src_cache, block_table[request], last)[start:]


def replace_write(original: Any) -> Any:
    """Return ``write`` for ``CPUMLAImpl.do_kv_cache_update``."""
    return write


def replace_decode(original: Any) -> Any:
    """Return ``decode`` for ``CPUMLAImpl.forward_mqa``."""
    return decode


def replace_gather(original: Any) -> Any:
    """Return ``gather`` for ``gather_mla_context_cache_cpu``."""
    return gather
