"""A fingerprint of block layout and weights, so that only compatible engines share files.

vLLM names a block's file after the model name, the block size, the dtype and the number of
ranks. Two engines that agree on these can still have different block layouts: kvcached has
two, vLLM another, and the attention backend orders heads and tokens. They can also run
different weights under one name. So a digest of the layout and weights in the workers is
part of every file's directory name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import Any

from kvpatch import state
from kvpatch.patches.offloading.registration import Rows
from kvpatch.refusal import Refusal
from kvpatch.upstream import connectors

_SAMPLES = 8  # values of each weight matrix
_described: str | None = None


def describe(worker: Any) -> dict[str, Any]:
    """Return a worker's platform, weights and block layout; runs in the worker by RPC."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    runner = worker.model_runner
    layers = runner.compilation_config.static_forward_context
    config = runner.kv_cache_config
    groups = [list(group.layer_names) for group in config.kv_cache_groups]
    caches = {name: layers[name].kv_cache for names in groups for name in names}
    rows = next(
        found.places
        for part in connectors.parts(get_kv_transfer_group())
        if (found := state.find(getattr(part, "connector_worker", None), Rows)) is not None
    )
    return {
        "platform": _platform(worker.device),
        "weights": sample_weights(runner.model),
    } | block_layout(caches, groups, rows)


def block_layout(
    kv_caches: dict[str, Any], groups: list[list[str]], rows: list[tuple[int, int]]
) -> dict[str, Any]:
    """Return the position of each layer's values in the bytes of a block.

    Args:
        kv_caches: a KV cache tensor per layer name, on kvcached's memory.
        groups: the layer names of each KV cache group.
        rows: the address and the bytes of the first row of each region that is copied.

    Returns:
        The bytes of each region's row and, per layer of each group, its name, dtype, region,
        offset in bytes, and the sizes and strides, in bytes, of its dimensions in a block.
    """

    def layer(name: str) -> list[Any]:
        cache = kv_caches[name]
        at = cache.data_ptr()
        number, start, row = next(
            (number, start, row)
            for number, (start, row) in enumerate(rows)
            if start <= at < start + row
        )
        inside = [
            (size, stride * cache.element_size())
            for size, stride in zip(cache.shape, cache.stride(), strict=True)
            # Other dimensions lead to other blocks or, if K and V are separate, other regions.
            if size > 1 and stride * cache.element_size() < row
        ]
        return [name, str(cache.dtype), number, at - start, inside]

    return {
        "rows": [row for _, row in rows],
        "layers": [[layer(name) for name in names] for names in groups],
    }


def _platform(device: Any) -> str:
    """Return the platform, on which the packing of a block by the attention backend depends."""
    import torch
    from vllm.platforms import current_platform

    name = str(current_platform.device_name)
    if device.type == "cpu":  # keys are packed for the instruction set
        name += f" {torch.backends.cpu.get_cpu_capability()}"
    return name


def sample_weights(model: Any) -> str:
    """Return a digest of a few values of every weight matrix.

    Another revision, fine-tuning or quantization changes it, regardless of the model name;
    reading every weight would take as long as loading the model.
    """
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() < 2:  # some vectors are never initialized
            continue
        at = tuple(
            torch.tensor([k * (size - 1) // (_SAMPLES - 1) for k in range(_SAMPLES)])
            for size in weight.shape
        )
        values = weight.detach()[tuple(index.to(weight.device) for index in at)]
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def around_kv_caches(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Collect the workers' descriptions if a secondary tier is configured.

    Wraps ``EngineCore._initialize_kv_caches``, after which the workers have their
    memory and before which no tier exists.
    """
    global _described
    _described = None
    result = wrapped(*args, **kwargs)
    transfer = instance.vllm_config.kv_transfer_config
    if any(leaf.tiers for leaf in connectors.leaves(transfer)):
        descriptions = instance.model_executor.collective_rpc(describe)
        _described = hashlib.sha256(json.dumps(descriptions).encode()).hexdigest()
    return result


def around_file_mapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Add the digest of the workers' descriptions to the directory name.

    Wraps ``FileMapper.from_offloading_spec``. vLLM also lets engines with different numbers of
    ranks share a directory if heads are the outermost dimension of its blocks; in kvcached's
    blocks the layers are.

    Raises:
        Refusal: the workers have not been described yet.
    """
    if _described is None:
        raise Refusal(
            "a secondary tier is created before the KV cache",
            "its files could not be distinguished from those of another KV layout",
            "report this with your command line, or set KVPATCH=0",
            code="KVP412",
        )
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.arguments["parallel_agnostic"] = False
    mapper = wrapped(*bound.args, **bound.kwargs)
    mapper.fields["kvpatch_memory"] = _described
    mapper.base_path = mapper._compute_base_path(bound.arguments["root_dir"], mapper.fields)
    return mapper
