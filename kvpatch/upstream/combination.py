"""What a verdict of ``kvpatch verify`` holds for: versions, code, device, model shape, flags.

Read from vLLM's resolved configuration, in the words of JSON, so that it can be compared with
what a verdict file has. Every field of the configuration is in it but those of which it is known
that they cannot matter: a field that a later release adds makes verdicts hold for less, not more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from importlib import metadata
from typing import Any

from kvpatch import verdicts
from kvpatch.environ import FIRST_LIMIT, HOST_DEVICE, HOST_POOL, IDLE, of_a_service
from kvpatch.upstream import connectors
from kvpatch.version import VERSION
from kvpatch.versions import Facts

# Those with kernels that read or write the KV cache, or with models.
LIBRARIES = ("torch", "transformers", "triton", "flashinfer-python", "flash-attn", "xformers")
# Fields, by the classes of vLLM's configuration, that decide neither which code runs nor the shape
# of the KV cache: names, places, ranks, logs, seeds, sizes of memory, and what vLLM notes itself.
_BESIDE = {
    "VllmConfig": (
        *("instance_id", "logging_config", "profiler_config", "shutdown_timeout"),
        "watchdog_config",
    ),
    "CacheConfig": (
        *("cpu_kvcache_space_bytes", "gpu_memory_utilization", "kv_cache_max_concurrency"),
        *("kv_cache_memory_bytes", "kv_cache_size_tokens", "kv_offloading_size", "num_cpu_blocks"),
        *("num_gpu_blocks", "num_gpu_blocks_override", "simple_cpu_offload_num_blocks"),
        "swap_space",
    ),
    "CompilationConfig": (
        *("cache_dir", "compilation_time", "debug_dump_path", "disabled_custom_ops"),
        *("enabled_custom_ops", "encoder_compilation_time", "local_cache_dir"),
        *("static_all_moe_layers", "static_forward_context", "traced_files"),
    ),
    "ECTransferConfig": ("ec_ip", "ec_port", "engine_id"),
    "KVEventsConfig": ("endpoint", "replay_endpoint", "topic"),
    "KVTransferConfig": ("engine_id", "kv_ip", "kv_port"),
    "LoadConfig": ("download_dir", "use_tqdm_on_load"),
    # Of a model its shape is compared, and not its weights.
    "ModelConfig": (
        *("allowed_local_media_path", "allowed_media_domains", "generation_config"),
        *("hf_config_path", "hf_token", "model", "model_weights", "override_generation_config"),
        *("seed", "served_model_name", "tokenizer", "tokenizer_revision"),
    ),
    "ObservabilityConfig": ("otlp_traces_endpoint",),
    "ParallelConfig": (
        *("_api_process_count", "_api_process_rank", "_coord_store_port"),
        *("_data_parallel_master_port_list", "_stateless_dp_group_port_list"),
        *("_stateless_ep_group_port_list", "_stateless_eplb_group_port_list"),
        *("_stateless_world_group_port_list", "assigned_physical_gpu_ids", "data_parallel_index"),
        *("data_parallel_master_ip", "data_parallel_master_port", "data_parallel_rank"),
        *("data_parallel_rank_local", "data_parallel_rpc_port", "master_addr", "master_port"),
        *("node_rank", "numa_bind_cpus", "numa_bind_nodes", "placement_group", "rank"),
    ),
    # Its targets are the configurations beside it.
    "SpeculativeConfig": ("model", "target_model_config", "target_parallel_config"),
    "WatermarkConfig": ("key",),  # a secret
}
# Of a connector's extra config, at any depth: how much, and where, but not how.
_SIZES = frozenset(
    {
        *("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank", "num_cpu_blocks"),
        *("disk_capacity_bytes", "disk_path", "root_dir"),
    }
)
_EXTRA = "kv_transfer_config.kv_connector_extra_config"
_NAMES = ("_name_or_path", "transformers_version")
# Variables that may decide which code runs, by the beginnings of their names and by their names,
# and those of which it is known that they do not.
_PREFIXES = ("VLLM_", "KVCACHED_")
_VARIABLES = (
    *("K_SCALE_CONSTANT", "Q_SCALE_CONSTANT", "V_SCALE_CONSTANT", "LD_PRELOAD"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHDYNAMO_DISABLE", "TRITON_INTERPRET"),
)
_HARMLESS = frozenset(
    {
        *("VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "VLLM_PROCESS_NAME_PREFIX"),
        *("VLLM_HOST_IP", "VLLM_LOOPBACK_IP", "VLLM_PORT", "VLLM_RPC_BASE_PATH"),
        *("VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL"),
        *("VLLM_ASSETS_CACHE", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_MEDIA_CACHE"),
        *("VLLM_DEBUG_DUMP_PATH", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"),
        *("VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_COLOR", "VLLM_LOGGING_CONFIG_PATH"),
        *("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_PREFIX", "VLLM_LOGGING_STREAM"),
        *("VLLM_LOG_BATCHSIZE_INTERVAL", "VLLM_LOG_MODEL_INSPECTION", "VLLM_LOG_STATS_INTERVAL"),
        *("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "VLLM_DISABLE_LOG_LOGO"),
        *("VLLM_DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "VLLM_USAGE_SOURCE"),
        *("VLLM_USAGE_STATS_SERVER", "VLLM_BUILD_COMMIT", "VLLM_BUILD_PIPELINE"),
        *("VLLM_BUILD_URL", "VLLM_IMAGE_TAG"),
        *("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        *("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"),
        *("KVCACHED_AUTOPATCH", "KVCACHED_IPC_NAME", "KVCACHED_LOG_LEVEL"),
        *("KVCACHED_GPU_UTILIZATION", "KVCACHED_MAX_CACHED_TOKENS"),
        *("KVCACHED_MAX_RESERVED_PAGES", "KVCACHED_MIN_RESERVED_PAGES"),
    }
)
_VALUES = (Enum, Mapping, frozenset, list, set, tuple)
_DOTTED = re.compile(r"([A-Za-z_]\w*)([.:][A-Za-z_]\w*)+")
# Settings of kvpatch's that bring code of their own, whatever their size.
OURS = (HOST_POOL, IDLE, FIRST_LIMIT)


def of(config: Any, facts: Facts) -> dict[str, Any]:
    """Return the combination of a resolved ``VllmConfig``, with the facts of this process."""
    versions = {
        "kvpatch": VERSION,
        "vllm": facts.vllm.text,
        "kvcached": facts.kvcached.text,
        **libraries(),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
    }
    held = flags(config, facts)
    code = {"kvpatch", "vllm", "kvcached", *_packages(held, {*versions, "kvpatch_startup"})}
    return {
        "versions": versions,
        "code": {name: verdicts.digest(name) for name in sorted(code)},
        "device": device(facts),
        "model": model(config),
        "flags": held,
    }


def libraries() -> dict[str, str]:
    """Return the versions of ``LIBRARIES`` that are installed."""
    found = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


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
    return {
        "architecture": str(config.model_config.architecture),
        "shape": _shape(config.model_config.hf_config),
    }


def flags(config: Any, facts: Facts) -> dict[str, Any]:
    """Return the settings that matter: of vLLM's configuration, of variables, and of plugins."""
    found = dict(_held(config, ""))
    found |= settings(config, ["use_v2_model_runner"])  # no field
    found |= variables(facts.environment)
    found |= {one.name: bool(one.read(facts.environment)) for one in OURS}
    entries = metadata.entry_points()
    for group in entries.groups:
        if group.startswith("vllm."):
            found[group] = {one.name: one.value for one in entries.select(group=group)}
    return found


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set and may decide which code runs."""
    return {
        name: value
        for name, value in environment.items()
        if name in _VARIABLES
        or (name.startswith(_PREFIXES) and name not in _HARMLESS and not of_a_service(name))
    }


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


def _held(config: Any, path: str = "", above: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Iterate over a configuration and its parts: their classes and their fields that matter."""
    above = (*above, config)
    for name, value in _fields(config).items():
        where = f"{path}{name}"
        if where == _EXTRA:
            value = without_sizes(value)
        if not _is_record(value):
            yield where, _plain(value, above)
        elif not any(value is one for one in above):
            yield where, _named(type(value))
            yield from _held(value, f"{where}.", above)


def without_sizes(extra: Any) -> Any:
    """Return a connector's extra config without how much it keeps, and where."""
    if isinstance(extra, Mapping):
        return {key: without_sizes(of) for key, of in extra.items() if key not in _SIZES}
    return [without_sizes(one) for one in extra] if isinstance(extra, list | tuple) else extra


def _fields(of: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(of):  # and not what else is attached to it
        found = {field.name: getattr(of, field.name, None) for field in dataclasses.fields(of)}
    else:
        found = vars(of)
    beside = {name for one in type(of).__mro__ for name in _BESIDE.get(one.__name__, ())}
    return {name: value for name, value in found.items() if name not in beside}


def _is_record(value: Any) -> bool:
    """Return whether a value is a configuration, or another object that has its own fields."""
    return (
        bool(getattr(value, "__dict__", None))
        and not isinstance(value, _VALUES)
        and not hasattr(value, "__qualname__")
        and not hasattr(value, "to_dict")
    )


def _plain(value: Any, above: tuple[Any, ...] = ()) -> Any:
    """Return a value in the words of JSON, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(of, above) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, above) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(one, above) for one in value), key=str)
    if isinstance(value, Enum):
        return value.name
    if hasattr(value, "__qualname__"):
        return _named(value)
    if hasattr(value, "to_dict"):
        return _shape(value)
    if _is_record(value) and not any(value is one for one in above):
        return {"": _named(type(value)), **dict(_held(value, above=above))}
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _named(of: Any) -> str:
    return f"{of.__module__}.{of.__qualname__}"


def _shape(hf_config: Any) -> str:
    shape = {key: value for key, value in hf_config.to_dict().items() if key not in _NAMES}
    text = json.dumps(shape, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _packages(value: Any, known: Container[str], name: str = "") -> Iterator[str]:
    """Iterate over the packages of whose code settings name a part, but for those of ``known``."""
    if isinstance(value, Mapping):
        for key, of in value.items():
            yield from _packages(of, known, key)
    elif isinstance(value, list):
        for one in value:
            yield from _packages(one, known, name)
    elif isinstance(value, str) and (_DOTTED.fullmatch(value) or name.endswith("module_path")):
        package = re.split("[.:]", value)[0]
        if package not in known and package not in sys.stdlib_module_names:
            yield package
