"""The operators of torch_npu, vllm-ascend and ATB that a dense model needs, in torch.

Each does what the published documentation says of it, on the host's view of the same bytes, for
the arguments that vllm-ascend passes; another argument is an error. Every operator that is not
here stays what it is without an NPU: an error of the emulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

_kept: list[Any] = []  # a registration ends with its library
_CAUSAL, _BAND, _NO_MASK = 3, 4, 0  # sparse modes of attention


def _host(tensor: Any) -> Any:
    return torch.ops.kvpatch_npu.host(tensor)


def _npu(tensor: Any, like: Any) -> Any:
    return tensor.to(like.device)


def _refuse(operator: str, arguments: dict[str, Any], allowed: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name in allowed and value in allowed[name]:
            continue
        if value is not None:
            raise NotImplementedError(f"the emulated NPU has {operator} without {name}={value!r}")


def rms_norm(input: Any, gamma: Any, epsilon: float = 1e-6) -> tuple[Any, Any]:
    """``npu::npu_rms_norm``."""
    normed, scale = _rms(_host(input), _host(gamma), epsilon)
    return _npu(normed, input), _npu(scale, input)


def _rms(values: Any, gamma: Any, epsilon: float) -> tuple[Any, Any]:
    exact = values.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return (exact * scale * gamma.float()).to(values.dtype), scale


def add_rms_norm_bias(
    x1: Any, x2: Any, gamma: Any, beta: Any = None, epsilon: float = 1e-6
) -> tuple[Any, Any, Any]:
    """``_C_ascend::npu_add_rms_norm_bias``."""
    total = _host(x1) + _host(x2)
    normed, scale = _rms(total, _host(gamma), epsilon)
    if beta is not None:
        normed = normed + _host(beta)
    return _npu(normed, x1), _npu(scale, x1), _npu(total, x1)


def add_rms_norm(x1: Any, x2: Any, gamma: Any, epsilon: float = 1e-6) -> tuple[Any, Any, Any]:
    """``npu::npu_add_rms_norm``."""
    return add_rms_norm_bias(x1, x2, gamma, None, epsilon)


def swiglu(input: Any, dim: int = -1) -> Any:
    """``npu::npu_swiglu``."""
    gate, up = _host(input).chunk(2, dim)
    return _npu(torch.nn.functional.silu(gate) * up, input)


def rotary_embedding(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox_style: bool
) -> None:
    """``atb::_npu_rotary_embedding``: in place, for heads that rotate as a whole."""
    cos, sin = _host(cos_sin_cache)[_host(positions).long()].unsqueeze(1).float().chunk(2, -1)
    for tensor in (_host(query), _host(key)):
        heads = tensor.view(tensor.shape[0], -1, head_size)
        if cos.shape[-1] * 2 != head_size:
            raise NotImplementedError("the emulated NPU rotates whole heads only")
        if is_neox_style:
            first, second = heads[..., : head_size // 2], heads[..., head_size // 2 :]
        else:
            first, second = heads[..., ::2], heads[..., 1::2]
        one, two = first.float(), second.float()
        # Both, before either is written: of float32 these are no copies.
        rotated = one * cos - two * sin, two * cos + one * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])


def reshape_and_cache(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_indices: Any
) -> None:
    """``atb::_npu_reshape_and_cache``: a token's K and V at its slot; none at a negative one."""
    slots = _host(slot_indices).long()
    wanted = slots >= 0
    slots = slots[wanted]
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        blocks = _host(cache)
        blocks[slots // blocks.shape[1], slots % blocks.shape[1]] = _host(tokens)[wanted]


def matmul_add_fp32(x: Any, weight: Any, C: Any) -> None:  # noqa: N803 - the operator's name
    """``atb::_npu_matmul_add_fp32``."""
    _host(C).add_(_host(x).float().T @ _host(weight).float())


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    atten_mask: Any = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Any = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **others: Any,
) -> tuple[Any, Any]:
    """``npu::npu_fused_infer_attention_score`` of the layout TND, over blocks or tokens."""
    name = "npu_fused_infer_attention_score"
    zero = dict.fromkeys(("inner_precise", "antiquant_mode"), (0,))
    zero |= dict.fromkeys(("key_antiquant_mode", "value_antiquant_mode"), (0,))
    _refuse(name, others, zero | {"softmax_lse_flag": (False,)})
    _refuse(name, {"input_layout": input_layout}, {"input_layout": ("TND",)})
    _refuse(name, {"sparse_mode": sparse_mode}, {"sparse_mode": (_CAUSAL, _BAND, _NO_MASK)})
    if actual_seq_lengths is None or actual_seq_lengths_kv is None:
        raise NotImplementedError(f"the emulated NPU has {name} with the lengths of sequences only")
    if sparse_mode == _NO_MASK and atten_mask is not None:
        raise NotImplementedError(f"the emulated NPU has {name} without masks of its callers")
    heads, kv_heads = num_heads, num_key_value_heads or num_heads
    queries = _host(query)
    size = queries.shape[-1]
    made = torch.zeros_like(queries)
    keys = _sequences(_host(key), block_table, actual_seq_lengths_kv, kv_heads, size, block_size)
    values = _sequences(
        _host(value), block_table, actual_seq_lengths_kv, kv_heads, size, block_size
    )
    first = 0
    for end, one_key, one_value in zip(actual_seq_lengths, keys, values, strict=True):
        tokens = end - first
        # A token sees those up to its own place at the end of the sequence.
        place = torch.arange(len(one_key) - tokens, len(one_key)).unsqueeze(1)
        other = torch.arange(len(one_key)).unsqueeze(0)
        seen = torch.ones(tokens, len(one_key), dtype=torch.bool)
        if sparse_mode == _CAUSAL:
            seen = other <= place
        elif sparse_mode == _BAND:
            seen = (other <= place + next_tokens) & (other >= place - pre_tokens)
        of_query = queries[first:end].transpose(0, 1).float()
        of_key, of_value = (
            one.transpose(0, 1).repeat_interleave(heads // kv_heads, 0).float()
            for one in (one_key, one_value)
        )
        scores = (of_query @ of_key.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        result = torch.softmax(scores, -1) @ of_value
        made[first:end] = result.transpose(0, 1).to(made.dtype)
        first = end
    return _npu(made, query), torch.empty(0, dtype=torch.float32, device=query.device)


def _sequences(
    cache: Any, block_table: Any, lengths: Sequence[int], heads: int, size: int, block_size: int
) -> Iterator[Any]:
    """Yield K or V of each sequence: of its blocks, or of its tokens one after the other."""
    if block_table is None:
        first = 0
        for end in lengths:
            yield cache[first:end].reshape(end - first, heads, size)
            first = end
        return
    for blocks, length in zip(_host(block_table).long(), lengths, strict=False):
        used = blocks[: -(-length // block_size)]
        yield cache[used].reshape(-1, heads, size)[:length]


class SlotMapping:
    """vLLM's Triton kernel ``_compute_slot_mapping_kernel``, of one rank."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run

    @staticmethod
    def _run(
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: Any,
        positions: Any,
        block_table: Any,
        block_table_stride: int,
        block_size: int,
        slot_mapping: Any,
        *,
        PAD_ID: int,  # noqa: N803 - the kernel's names
        TOTAL_CP_WORLD_SIZE: int,  # noqa: N803
        **others: Any,
    ) -> None:
        _refuse(
            "slots", {"TOTAL_CP_WORLD_SIZE": TOTAL_CP_WORLD_SIZE}, {"TOTAL_CP_WORLD_SIZE": (1,)}
        )
        starts, place, slots = _host(query_start_loc), _host(positions), _host(slot_mapping)
        blocks = _host(block_table)
        for request, (start, end) in enumerate(pairwise(starts)):
            if request == len(blocks):
                break  # a request that only pads
            at = place[start:end].long()
            slots[start:end] = (
                blocks[request][at // block_size].long() * block_size + at % block_size
            )
        slots[num_tokens:max_num_tokens] = PAD_ID


OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "npu": {
        "npu_rms_norm": rms_norm,
        "npu_add_rms_norm": add_rms_norm,
        "npu_swiglu": swiglu,
        "npu_fused_infer_attention_score": attention,
    },
    "atb": {
        "_npu_rotary_embedding": rotary_embedding,
        "_npu_reshape_and_cache": reshape_and_cache,
        "_npu_matmul_add_fp32": matmul_add_fp32,
    },
    "_C_ascend": {"npu_add_rms_norm_bias": add_rms_norm_bias},
}


def install(namespace: str) -> None:
    """Take the place of a library's kernels, once it is loaded."""
    library = torch.library.Library(namespace, "IMPL")
    for name, operator in OPERATORS[namespace].items():
        library.impl(name, operator, "PrivateUse1", allow_override=True)
    _kept.append(library)
