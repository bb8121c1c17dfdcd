"""Configurations of SimpleCPUOffloadConnector that are refused."""

from __future__ import annotations

from typing import Any

from kvpatch.patches.offloading.connector_rules import ROUND_TRIP
from kvpatch.rules import Rule
from kvpatch.supported import in_ranges, validated
from kvpatch.upstream import connectors
from kvpatch.versions import Facts, Span

SIMPLE = Span("0.19")
DROPS_LAZY_COPIES = Span("0.29", "0.30")
# By ``Facts.device``: CUDA and ROCm, the host device, and NPUs where an engine starts at all
# (KVP601 to KVP603).
DEVICES = ("cuda", "cpu", "npu")
VALIDATED_BACKENDS = (None, "cpu")  # kv_offload_backend


def _values(config: Any, key: str) -> list[Any]:
    leaves = connectors.leaves(config.kv_transfer_config)
    return [leaf.extra.get(key) for leaf in leaves if leaf.name == connectors.SIMPLE]


def _is_simple(config: Any, facts: Facts) -> bool:
    leaves = connectors.leaves(config.kv_transfer_config)
    return any(leaf.name == connectors.SIMPLE for leaf in leaves)


def _other_backends(config: Any) -> list[str]:
    every = _values(config, "kv_offload_backend")
    return [str(backend) for backend in every if backend not in VALIDATED_BACKENDS]


def _eager_windows(config: Any, facts: Facts) -> bool:
    model = config.model_config
    return (
        _is_simple(config, facts)
        and not all(_values(config, "lazy_offload"))
        and not config.scheduler_config.disable_hybrid_kv_cache_manager
        and model is not None
        and model.get_sliding_window() is not None
    )


RULES = (
    Rule(
        "KVP315",
        "a `kv_offload_backend` of SimpleCPUOffloadConnector other than `cpu`",
        lambda config, facts: bool(_other_backends(config)),
        lambda config, facts: f"the kv_offload_backend {_other_backends(config)[0]} is configured",
        ROUND_TRIP,
        "remove kv_offload_backend from kv_connector_extra_config",
    ),
    Rule(
        "KVP392",
        "SimpleCPUOffloadConnector with the prefix cache disabled",
        lambda config, facts: (
            _is_simple(config, facts) and not config.cache_config.enable_prefix_caching
        ),
        "SimpleCPUOffloadConnector is configured with the prefix cache disabled",
        "vLLM switches it off then: it stores nothing, and says so in a warning only",
        "remove --no-enable-prefix-caching, or use OffloadingConnector",
    ),
    Rule(
        "KVP352",
        "`num_cpu_blocks` of SimpleCPUOffloadConnector, which vLLM 0.33 reads",
        lambda config, facts: any(value is not None for value in _values(config, "num_cpu_blocks")),
        "num_cpu_blocks is set in kv_connector_extra_config",
        "only a CPU tier that is sized in bytes is validated",
        "remove num_cpu_blocks, and set cpu_bytes_to_use",
    ),
    Rule(
        "KVP316",
        "`lazy_offload` on vLLM 0.29",
        lambda config, facts: any(_values(config, "lazy_offload")),
        "lazy_offload is set in kv_connector_extra_config",
        "SimpleCPUOffloadConnector of vLLM 0.29 counts copies of idle steps as done without "
        "making them",
        "remove lazy_offload, or install another vLLM",
        only_in=DROPS_LAZY_COPIES,
    ),
    Rule(
        "KVP317",
        f"SimpleCPUOffloadConnector, except on vLLM {in_ranges(validated(SIMPLE))}",
        _is_simple,
        "SimpleCPUOffloadConnector is configured on this release",
        f"it is validated on vLLM {in_ranges(validated(SIMPLE))} only",
        "use OffloadingConnector, or one of these releases",
        unless_validated=SIMPLE,
    ),
    Rule(
        "KVP327",
        "SimpleCPUOffloadConnector in eager mode before vLLM 0.22, for models with a sliding "
        "window and the hybrid KV cache manager (on with `--kv-offloading-size`)",
        _eager_windows,
        "SimpleCPUOffloadConnector is configured in eager mode for sliding windows whose blocks "
        "are freed",
        "before vLLM 0.22 it stops storing a request at the first block that has left its window "
        "and was freed, and some prompts are never loaded from the CPU tier",
        "set --disable-hybrid-kv-cache-manager or lazy_offload, or install vLLM 0.22.1",
        only_in=Span("0", "0.22"),
    ),
    Rule(
        "KVP318",
        "SimpleCPUOffloadConnector on devices other than CUDA, ROCm and the host device",
        lambda config, facts: _is_simple(config, facts) and facts.device not in DEVICES,
        "the KV connector SimpleCPUOffloadConnector is configured",
        "its block copies are not validated on this device",
        "use OffloadingConnector",
    ),
)
