"""Configurations that do not start on an NPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpatch.rules import Rule
from kvpatch.supported import release_of
from kvpatch.upstream import connectors
from kvpatch.versions import Facts, Span

# Releases of vLLM whose vllm-ascend cannot import NPUOffloadingSpec, which vllm-ascend#13389 mends
# after 0.25.1rc1; a release of vllm-ascend that has it ends the range.
WITHOUT_SPEC = Span("0.23")


def _others(config: Any, facts: Facts) -> Iterator[str]:
    """Name what the engine on an NPU did not run with; OffloadingConnector is KVP604."""
    if facts.device == "npu" and not _offloading(config, facts):
        from kvpatch.patches.ascend import ran  # few starts need it

        yield from ran.differences(config, facts)


def _offloading(config: Any, facts: Facts) -> bool:
    leaves = connectors.leaves(config.kv_transfer_config)
    return (
        facts.device == "npu"
        and release_of(facts.vllm) in WITHOUT_SPEC
        and any(leaf.name == connectors.OFFLOADING for leaf in leaves)
    )


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
        "on an NPU all but what an engine ran with, see [Ascend NPUs](ascend.md#what-starts)",
        lambda config, facts: any(_others(config, facts)),
        lambda config, facts: f"on an NPU {next(_others(config, facts))}",
        "engines there are validated with the settings of the one that ran only",
        "configure these, which docs/ascend.md lists",
        with_connector=False,
    ),
)
