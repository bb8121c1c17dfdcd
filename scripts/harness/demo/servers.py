"""The two servers of the demo."""

from __future__ import annotations

from harness.serve import SPARE_PAGES, Kind, arguments

BLOCK_TOKENS = 32
# 14336 tokens, 112 MiB: two or three of the eight conversations fit.
KV_BLOCKS = 448
TIER_GIB = "0.5"
# With Triton there, if only its interpreter, vLLM takes the runner that it takes on a GPU.
AS_ON_A_GPU = {"TRITON_INTERPRET": "1"}

_ARGUMENTS = arguments(KV_BLOCKS, BLOCK_TOKENS, longest=8192, together=2)
PLAIN = Kind("plain vLLM", "plain", _ARGUMENTS, {"KVPATCH": "0", **AS_ON_A_GPU})
KVPATCH = Kind(
    "vLLM with kvpatch",
    "kvpatch",
    _ARGUMENTS | {"kv-offloading-size": TIER_GIB},
    {"KVPATCH": "1", **SPARE_PAGES, **AS_ON_A_GPU},
)
