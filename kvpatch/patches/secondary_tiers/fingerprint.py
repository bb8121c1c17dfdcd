"""A fingerprint of all that makes the bytes of a block, so that only equal engines share files.

vLLM names a block's file after model name, block size, dtype and ranks. Engines that agree on these
can have different block layouts, attention backends, weights or configurations. So a digest of what
the workers have is part of every directory's name, and so is the user, who alone can read it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpatch import state
from kvpatch.patches.offloading.registration import Rows
from kvpatch.patches.secondary_tiers import shared_memory
from kvpatch.patches.secondary_tiers.block_files import own_folder
from kvpatch.patches.secondary_tiers.samples import Samples
from kvpatch.patches.secondary_tiers.weights import Weights
from kvpatch.refusal import Refusal
from kvpatch.upstream import connectors

# Of vLLM's ``ModelConfig``, ``CacheConfig`` and attention layers: what makes a block's bytes.
_MODEL = (
    "architecture",
    "dtype",
    "quantization",
    "max_model_len",
    "disable_sliding_window",
    "model_impl",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
_CACHE = ("cache_dtype", "calculate_kv_scales", "sliding_window", "kv_cache_dtype_skip_layers")
_STATE = ("mamba_cache_mode", "mamba_block_size", "mamba_cache_dtype", "mamba_ssm_cache_dtype")
_DRAFTS = ("method", "num_speculative_tokens", "parallel_drafting")
_LAYER = ("_k_scale_float", "_v_scale_float", "kv_cache_dtype")
_IMPLEMENTATION = ("scale", "sliding_window", "logits_soft_cap", "num_kv_heads", "head_size")

_folders = True  # whether names are those of folders
_described: str | None = None
_weights: Weights | None = None


def describe(worker: Any) -> dict[str, Any]:
    """Return all that makes the bytes of a worker's blocks; runs in the worker by RPC."""
    from vllm import __version__
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
    described = {
        "vllm": __version__,
        "platform": _platform(worker.device),
        "configuration": configuration(runner.vllm_config),
        "attention": {name: attention(layers[name]) for name in caches},
        "weights": sample_weights(runner.model),
    }
    if any(isinstance(cache, list | tuple) for cache in caches.values()):
        described["state"] = _chosen(runner.vllm_config.cache_config, _STATE)
    drafting = drafting_model(runner)
    if drafting is not None:
        described["drafts"] = drafts(runner.vllm_config.speculative_config)
        described["drafting weights"] = sample_weights(drafting)
    return described | block_layout(caches, groups, rows)


def drafting_model(runner: Any) -> Any:
    """Return the model that drafts tokens (V1's ``drafter``, V2's ``speculator``), or None."""
    owner = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    return getattr(owner, "model", None)


def drafts(config: Any) -> dict[str, Any]:
    """Return what of a ``SpeculativeConfig`` makes the bytes of a drafting model's blocks."""
    model = config.draft_model_config
    return {
        "model": plain(model.hf_config),
        "text": plain(model.hf_text_config),
        "options": _chosen(model, _MODEL),
    } | _chosen(config, _DRAFTS)


def configuration(config: Any) -> dict[str, Any]:
    """Return what of a ``VllmConfig`` makes the bytes of a block, as values of JSON.

    The model's own configuration is the resolved one, with the operator's overrides: scales,
    epsilons, RoPE, windows.
    """
    model = config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    return {
        "model": plain(model.hf_config),
        "text": plain(model.hf_text_config),
        "options": {
            name: plain(getattr(model, name, getattr(multimodal, name, None))) for name in _MODEL
        },
        "cache": _chosen(config.cache_config, _CACHE),
        "attention": plain(getattr(config, "attention_config", None)),
        "quantization": plain(getattr(config, "quant_config", None)),
    }


def attention(layer: Any) -> dict[str, Any]:
    """Return what of a layer with a KV cache makes the bytes of a block."""
    implementation = getattr(layer, "impl", None)
    return (
        {"class": plain(layer), "implementation": plain(implementation)}
        | _chosen(layer, _LAYER)
        | _chosen(implementation, _IMPLEMENTATION)
    )


def _chosen(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: plain(getattr(owner, name, None)) for name in names}


def plain(value: Any) -> Any:
    """Return ``value`` as values of JSON that are the same in every process.

    What has no value of its own there is its class: no address, no order of a set.
    """
    if value is None or isinstance(value, str | int | float):  # bool and simple enums too
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(plain(inner), sort_keys=True) for inner in value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):  # a configuration of transformers
        # An override of what its class does not know is an attribute and not in the dictionary.
        inner = value.to_dict() | vars(value)
        known = {key: one for key, one in inner.items() if not key.startswith("_")}
        return {"class": plain(type(value)), **plain(known)}
    if dataclasses.is_dataclass(value):
        return {
            one.name: plain(getattr(value, one.name, None)) for one in dataclasses.fields(value)
        }
    if type(value).__module__ == "torch":  # a dtype
        return str(value)
    return plain(type(value))


def block_layout(
    kv_caches: dict[str, Any], groups: list[list[str]], rows: list[tuple[int, int]]
) -> dict[str, Any]:
    """Return the position of each layer's values in the bytes of a block.

    Args:
        kv_caches: a KV cache tensor per layer name, on kvcached's memory; of a state's several.
        groups: the layer names of each KV cache group.
        rows: the address and the bytes of the first row of each region that is copied.

    Returns:
        The bytes of each region's row and, per layer of each group, its name, dtype, region,
        offset in bytes, and the sizes and strides, in bytes, of its dimensions in a block; of a
        state its name, and that of each of its tensors.
    """

    def layer(name: str) -> list[Any]:
        cache = kv_caches[name]
        if isinstance(cache, list | tuple):
            return [name, *map(tensor, cache)]
        return [name, *tensor(cache)]

    def tensor(cache: Any) -> list[Any]:
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
        return [str(cache.dtype), number, at - start, inside]

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
    """Return a digest of values of every parameter and every buffer of ``model``.

    Another revision, fine-tuning, quantization or RoPE changes it, regardless of the model name;
    reading every value would take as long as loading the model. Buffers that are not saved
    with the model, such as RoPE's, count too.
    """
    samples = Samples()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in sorted(tensors):
        samples.add(name, tensors[name])
    for name, module in model.named_modules():
        if getattr(module, "cpu_linear", None) is not None and not module.weight.numel():
            samples.add(f"{name} packed", _response(module))
    return samples.digest()


def _response(layer: Any) -> Any:
    """Return what a linear layer makes of one fixed input.

    vLLM's CPU backend packs some weights into objects of a library, and drops the tensor.
    """
    import torch

    size = getattr(layer, "input_size_per_partition", None) or layer.input_size
    source = torch.Generator().manual_seed(0)
    given = torch.randn(1, size, generator=source).to(layer.weight.dtype)
    with torch.inference_mode():
        return layer.cpu_linear(given, layer.weight, None)


def _digest(executor: Any) -> str:
    descriptions = executor.collective_rpc(describe)
    return hashlib.sha256(json.dumps(descriptions, sort_keys=True).encode()).hexdigest()


def around_kv_caches(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Collect the workers' descriptions, and which files they share, before a tier exists."""
    global _described, _weights
    _described = _weights = None
    shared_memory.expect([])
    result = wrapped(*args, **kwargs)
    transfer = instance.vllm_config.kv_transfer_config
    if any(leaf.tiers for leaf in connectors.leaves(transfer)):
        shared_memory.expect(instance.model_executor.collective_rpc(shared_memory.files))
        _described = _digest(instance.model_executor)
        # Weakly: this module must not keep an engine that was deleted.
        core = weakref.ref(instance)
        _weights = state.attach(
            instance,
            Weights(lambda: _digest(core().model_executor), _described),  # type: ignore[union-attr]
        )
    return result


@contextmanager
def without_folders() -> Iterator[None]:
    """Let names be given that are not those of folders: of objects in a store."""
    global _folders
    _folders = False
    try:
        yield
    finally:
        _folders = True


def around_file_mapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Add the digest of the workers' descriptions, and the user, to the directory name.

    vLLM also lets engines with different numbers of ranks share a directory if heads are the
    outermost dimension of its blocks; in kvcached's blocks the layers are. Refused before there is
    a digest, or where the directory is not this user's.
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
    root, folders = bound.arguments["root_dir"], _folders

    def rename(described: str) -> None:
        mapper.fields |= {"kvpatch_memory": described, "kvpatch_user": os.geteuid()}
        mapper.base_path = mapper._compute_base_path(root, mapper.fields)
        if not folders:
            return
        # vLLM's own configuration file, and the blocks.
        for folder in (mapper.base_path, f"{mapper.base_path}_r{mapper.rank}"):
            own_folder(Path(folder))

    try:
        rename(_described)
    except OSError as error:
        raise unusable(root, error) from error
    if _weights is not None:
        _weights.renamed.append(rename)
        state.attach(mapper, _weights)
    return mapper


def unusable(root: Any, error: OSError) -> Refusal:
    """Return the refusal of a secondary tier's folder."""
    return Refusal(
        f"the folder {root} of a secondary tier cannot be used",
        f"{error}, and blocks are stored in folders that only this user can write to",
        "give root_dir a folder that this user can write to, or remove the folder in the way",
        code="KVP334",
    )
