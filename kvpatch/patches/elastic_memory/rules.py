"""Configurations whose KV cache cannot be on kvcached's memory."""

from __future__ import annotations

from typing import Any

from kvpatch.rules import Rule


def _machines(config: Any) -> int:
    return int(getattr(config.parallel_config, "nnodes_within_dp", 1))


RULES = (
    Rule(
        "KVP312",
        "HiSparse",
        lambda config, facts: (
            getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None
        ),
        "HiSparse is configured",
        "it allocates KV cache outside kvcached's memory",
        "remove the HiSparse configuration",
        with_connector=False,
    ),
    Rule(
        "KVP378",
        "an engine whose ranks are on several machines (`--nnodes`)",
        lambda config, facts: _machines(config) > 1,
        lambda config, facts: f"the ranks of this engine are on {_machines(config)} machines",
        "kvcached tells the ranks what to map by sockets in /tmp, which are one machine's",
        "start all ranks of an engine on one machine",
        with_connector=False,
    ),
)
