"""Configurations in which vLLM may take memory from an engine that has a KV connector."""

from __future__ import annotations

from typing import Any

from kvpatch.rules import Rule
from kvpatch.versions import Facts


def _settings(config: Any) -> list[str]:
    """Return the settings, in words, with which vLLM can take memory from a running engine."""
    names = {"enable_sleep_mode": "sleep mode", "enable_cumem_allocator": "the cumem allocator"}
    return [said for name, said in names.items() if getattr(config.model_config, name, False)]


def _on_a_gpu(config: Any, facts: Facts) -> bool:
    return facts.device != "cpu" and bool(_settings(config))


RULES = (
    Rule(
        "KVP341",
        "offloading with sleep mode, or with vLLM's cumem allocator, on a GPU",
        _on_a_gpu,
        lambda config, facts: f"a KV connector is configured with {_settings(config)[0]}",
        "kvcached's memory is not in the pool that vLLM empties and restores, and the blocks of "
        "the CPU tier are not validated after a wake-up, which may bring other weights",
        "remove --enable-sleep-mode and --enable-cumem-allocator, or run it without a KV connector",
    ),
)
