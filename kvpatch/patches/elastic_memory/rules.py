"""Configurations whose KV cache cannot be on kvcached's memory."""

from __future__ import annotations

from kvpatch.rules import Rule

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
)
