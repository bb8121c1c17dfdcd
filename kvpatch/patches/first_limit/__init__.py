"""A limit at birth: an engine that has just started does not take all of the device."""

from __future__ import annotations

from kvpatch.rows import Row, feature
from kvpatch.supported import FLOOR
from kvpatch.upstream.targets import ENGINE_CORE

FEATURE = feature(
    __name__,
    summary="with `KVPATCH_FIRST_LIMIT`, an engine has a limit before its first request",
    since=FLOOR,
    wanted="presence:wanted",
    rules="rules:RULES",
    optional=True,
    seams=(
        Row(
            "first_limit.engine",
            f"{ENGINE_CORE}.__init__",
            "birth:around_engine_start(self, vllm_config)",
            "engines that start side by side may each map all of the device, until somebody "
            "limits them",
            "vllm-project/aibrix#2770 (no limit at birth)",
            "kvcached reads a first limit from its environment",
        ),
    ),
)
