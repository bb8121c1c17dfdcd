"""Configurations that do not start on an NPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpatch.rules import Rule
from kvpatch.upstream import connectors
from kvpatch.versions import Facts


def _others(config: Any) -> Iterator[str]:
    """Name what engines on an NPU have not been run with."""
    parallel = config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        yield "more than one device is configured"
    model = config.model_config
    if model is not None and not model.enforce_eager:
        yield "graphs are configured"
    if model is not None and model.enable_sleep_mode:
        yield "sleep mode is on"
    if config.speculative_config is not None:
        yield "speculative decoding is configured"
    leaves = connectors.leaves(config.kv_transfer_config)
    if not leaves:
        yield "no KV connector is configured"
    if any(leaf.extra.get("lazy_offload") for leaf in leaves):
        yield "lazy_offload is set"
    for leaf in leaves:
        if leaf.name not in (connectors.SIMPLE, connectors.OFFLOADING):
            yield f"the KV connector {leaf.name} is configured"


def _offloading(config: Any, facts: Facts) -> bool:
    leaves = connectors.leaves(config.kv_transfer_config)
    return facts.device == "npu" and any(leaf.name == connectors.OFFLOADING for leaf in leaves)


RULES = (
    Rule(
        "KVP604",
        "OffloadingConnector on an NPU",
        _offloading,
        "the KV connector OffloadingConnector is configured on an NPU",
        "vllm-ascend's NPUOffloadingSpec does not import on the vLLM that it is paired with "
        "(vllm-project/vllm-ascend#13389)",
        "use SimpleCPUOffloadConnector",
    ),
    Rule(
        "KVP606",
        "on an NPU all but one device in eager mode with SimpleCPUOffloadConnector in eager mode",
        lambda config, facts: facts.device == "npu" and any(_others(config)),
        lambda config, facts: f"{next(_others(config))} on an NPU",
        "engines there are validated on one device, in eager mode and with "
        "SimpleCPUOffloadConnector's eager mode only",
        "configure these",
        with_connector=False,
    ),
)
