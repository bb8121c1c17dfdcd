"""KV layouts from vLLM 0.29 on: which of them kvcached's memory can have.

A layout names the order of layers, blocks, heads, tokens and channels in memory.
kvcached maps blocks, so that the user chooses between two things it can do, blocks whose
layers lie together and a pool a layer, and vLLM's name for it must agree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

ASKED = "VLLM_KV_CACHE_LAYOUT"
CONTIGUOUS = "KVCACHED_CONTIGUOUS_LAYOUT"

# By kvcached's switch. NHD and HND are vLLM's older names of two of them.
LAYOUTS = {
    True: ("BLNHC", "BLHNC"),
    False: ("LBNHC", "LBHNC", "NHD", "HND"),
}


def contiguous(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether kvcached lays a block's layers together; read as kvcached reads it.

    On ROCm kvcached's own default is the other one.
    """
    said = environment.get(CONTIGUOUS)
    if said is not None:
        return said.lower() == "true"
    from kvcached import utils

    return bool(utils.CONTIGUOUS_LAYOUT)


def disagree(environment: Mapping[str, str] = os.environ) -> str:
    """Return the layout that was asked for when kvcached cannot have it, or nothing."""
    asked = environment.get(ASKED, "")
    return "" if not asked or asked in LAYOUTS[contiguous(environment)] else asked


def said(vllm_config: Any) -> str:
    """Return what the status line says of the layout; nothing before vLLM 0.29."""
    resolved = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if resolved is None:
        return ""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    preferred = get_kv_connector_cache_layout(vllm_config)
    if preferred in (None, resolved):
        return f"KV layout {resolved}"
    return f"KV layout {resolved} (the connector prefers {preferred})"
