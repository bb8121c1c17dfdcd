"""Computes on the emulated NPU in every process that imports torch_npu.

No package inside of kvpatch, because importing that switches its patches on.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import wrapt

_started = False


def start(library: str) -> None:
    """Remember what to load, and when: torch_npu and vllm-ascend load their own kernels first."""
    global _started
    if _started:
        return  # Python reads startup files of a folder that is added twice, twice
    _started = True
    wrapt.register_post_import_hook(lambda _: _compute(library), "torch_npu")
    # Imported by the first name; the extension calls itself by the second.
    for name in ("vllm_ascend.vllm_ascend_C", "camem_allocator"):
        wrapt.register_post_import_hook(_compute_for_ascend, name)
    wrapt.register_post_import_hook(_map_slots, "vllm.v1.worker.block_table")


def _compute(library: str) -> None:
    import torch

    from . import operators

    torch.ops.load_library(library)
    torch.ops.kvpatch_npu.install()
    operators.install("npu")
    if find_spec("torch_npu.op_plugin.atb") is not None:
        importlib.import_module("torch_npu.op_plugin.atb._atb_ops")
        operators.install("atb")


def _compute_for_ascend(_: Any) -> None:
    from . import operators

    operators.install("_C_ascend")


def _map_slots(module: Any) -> None:
    from . import operators

    # Triton for NPUs is not there either; without any, vLLM's kernel is a function.
    module._compute_slot_mapping_kernel = operators.SlotMapping()
