"""A large primary tier is several files from vLLM 0.33 on, and they belong to one engine too."""

from __future__ import annotations

from typing import Any

from kvpatch import claims, state
from kvpatch.patch import argument
from kvpatch.upstream import connectors
from kvpatch.upstream.vllm_api import region_path

PARTS = 32  # at most, by _REGION_SEGMENTS in vLLM's kv_offload/cpu/spec.py


def around_kv_caches(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let the parts of the primary tier go with the claim on their engine_id.

    The workers remove their names when all have opened them; those of one that was killed between
    would stay, and the next engine with this engine_id would not start.
    """
    transfer = argument(args, kwargs, 0, "vllm_config").kv_transfer_config
    held = state.find(instance, claims.Held)
    if held is not None and held.claims and connectors.offloading(transfer):
        first = region_path(transfer.engine_id).name
        held.claims[-1].cover(*(f"{first}.{part}" for part in range(1, PARTS)))
    return wrapped(*args, **kwargs)
