"""What a verdict of ``kvpatch verify`` holds for: versions, code, device, model shape, flags.

Read from vLLM's resolved configuration, in the words of JSON, so that it can be compared with
what a verdict file has.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from kvpatch import verdicts
from kvpatch.environ import FIRST_LIMIT, HOST_DEVICE, HOST_POOL, IDLE
from kvpatch.upstream import connectors
from kvpatch.version import VERSION
from kvpatch.versions import Facts

# The settings of vLLM on which it depends which code runs, and on which memory; sizes do not
# matter. One that a release does not have is None.
FLAGS = (
    "cache_config.block_size",
    "cache_config.cache_dtype",
    "cache_config.enable_prefix_caching",
    "cache_config.mamba_cache_mode",
    "cache_config.prefix_caching_hash_algo",
    "compilation_config.cudagraph_mode",
    "compilation_config.mode",
    "attention_config.backend",
    "model_config.dtype",
    "model_config.enforce_eager",
    "model_config.enable_sleep_mode",
    "model_config.quantization",
    "model_config.runner_type",
    "parallel_config.data_parallel_size",
    "parallel_config.decode_context_parallel_size",
    "parallel_config.distributed_executor_backend",
    "parallel_config.enable_expert_parallel",
    "parallel_config.pipeline_parallel_size",
    "parallel_config.prefill_context_parallel_size",
    "parallel_config.tensor_parallel_size",
    "scheduler_config.async_scheduling",
    "scheduler_config.disable_hybrid_kv_cache_manager",
    "scheduler_config.enable_chunked_prefill",
    "scheduler_config.policy",
    "scheduler_config.scheduler_cls",
    "speculative_config.method",
    "speculative_config.num_speculative_tokens",
    "kv_events_config.enable_kv_cache_events",
    "kv_transfer_config.kv_role",
    "lora_config.max_lora_rank",
    "use_v2_model_runner",
)
ENVIRONMENT = (
    "KVCACHED_CONTIGUOUS_LAYOUT",
    "KVCACHED_PAGE_PREALLOC_ENABLED",
    "KVCACHED_PAGE_SIZE_MB",
    "TRITON_INTERPRET",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_USE_V2_MODEL_RUNNER",
)
# Settings of kvpatch's that bring code of their own, whatever their size.
OURS = (HOST_POOL, IDLE, FIRST_LIMIT)
# Of a connector's extra config: how much, and where, but not how.
_SIZES = ("bytes", "num_cpu_blocks", "root_dir", "path")
_NAMES = ("_name_or_path", "transformers_version")


def of(config: Any, facts: Facts, touched: Iterable[str]) -> dict[str, Any]:
    """Return the combination of a ``VllmConfig``.

    Args:
        config: vLLM's configuration, resolved.
        facts: of this process.
        touched: the modules of vLLM and kvcached whose objects patches replace.
    """
    return {
        "versions": {
            "kvpatch": VERSION,
            "vllm": facts.vllm.text,
            "kvcached": facts.kvcached.text,
            "torch": metadata.version("torch"),
            "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        },
        "code": verdicts.digests(touched),
        "device": device(facts),
        "model": model(config),
        "flags": flags(config, facts),
    }


def device(facts: Facts) -> str:
    """Return the device of the KV cache; empty if vLLM does not know its name."""
    if facts.device == "cpu" and facts.environment.get(HOST_DEVICE.name):
        return "the host device"
    from vllm.platforms import current_platform

    try:
        return f"{facts.device} {current_platform.get_device_name()}"
    except Exception:  # of a library of the device's maker
        return ""


def model(config: Any) -> dict[str, Any]:
    """Return the shape of a model: two models of one shape use the KV cache in one way."""
    described = config.model_config.hf_config.to_dict()
    shape = {key: value for key, value in described.items() if key not in _NAMES}
    text = json.dumps(shape, sort_keys=True, default=str)
    return {
        "architecture": str(config.model_config.architecture),
        "shape": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def flags(config: Any, facts: Facts) -> dict[str, Any]:
    """Return the settings that matter."""
    found = settings(config, FLAGS)
    found |= {name: facts.environment.get(name) for name in ENVIRONMENT}
    found |= {one.name: bool(one.read(facts.environment)) for one in OURS}
    for number, leaf in enumerate(connectors.leaves(config.kv_transfer_config)):
        extra = {
            key: value
            for key, value in sorted(leaf.extra.items())
            if not any(part in key for part in _SIZES)
        }
        found[f"connector {number}"] = f"{leaf.module or 'vllm'}:{leaf.name} {_plain(extra)}"
    return found


def settings(config: Any, paths: Iterable[str]) -> dict[str, Any]:
    """Return settings by their paths in a configuration; None for one that it does not have."""
    return {path: _plain(_of(config, path)) for path in paths}


def workers(config: Any) -> int:
    """Return how many workers the engines of a configuration have."""
    parallel = config.parallel_config
    return int(parallel.world_size * parallel.data_parallel_size)


def copiers(config: Any) -> int:
    """Return how many connectors copy blocks in each worker."""
    return len(connectors.leaves(config.kv_transfer_config))


def _of(config: Any, path: str) -> Any:
    found = config
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True, default=str)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return str(getattr(value, "name", value))
