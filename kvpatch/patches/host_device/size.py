"""The size of the host device, before vllm is imported."""

from __future__ import annotations

from kvpatch.hostdevice import ledger
from kvpatch.versions import Facts


def require(facts: Facts) -> None:
    """Refuse a vLLM for CPUs whose host device has no size."""
    if facts.vllm.for_cpus:
        ledger.require_size(facts.environment)
