"""A limit at birth: an engine that has just started does not take the device before anybody can say
how much of it is its own.

Without ``KVPATCH_FIRST_LIMIT`` none of it is applied.
"""

from __future__ import annotations

from kvpatch.patch import Feature, Patch
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import ENGINE_CORE

_CODE = "kvpatch.patches.first_limit"

FEATURE = Feature(
    name="first-limit",
    summary="with `KVPATCH_FIRST_LIMIT`, an engine has a limit before its first request",
    since=FLOOR,
    optional=True,
    wanted=f"{_CODE}.presence:wanted",
    rules=f"{_CODE}.rules:RULES",
    seams=(
        Patch(
            id="first_limit.engine",
            target=f"{ENGINE_CORE}.__init__",
            why="engines that start side by side may each map all of the device, until somebody "
            "limits them",
            upstream="vllm-project/aibrix#2770 (no limit at birth)",
            until="kvcached reads a first limit from its environment",
            wrapper=f"{_CODE}.birth:around_engine_start",
            parameters=("self", "vllm_config"),
            since="0.16",
        ),
    ),
)
