"""Sleep mode beside a CPU tier: level 1 keeps what the tier has, and what only the device had.

``release_kv_cache_memory`` needs no sleep mode, and drops all caches.
"""

from __future__ import annotations

from kvpatch.patch import WITH_SLEEP
from kvpatch.rows import Row, feature
from kvpatch.upstream.targets import ENGINE_CORE

_SINCE = "0.32"
_ASKED = "vllm-project/vllm#57810 (sleep that keeps the connector's cache)"
_UNTIL = "vLLM keeps the connector's cache in a sleep of level 1"

FEATURE = feature(
    __name__,
    summary="a sleep of level 1 keeps the CPU tier, stores what only the device has, and gives "
    "the KV cache's memory back",
    since=_SINCE,
    upstream=_ASKED,
    until=_UNTIL,
    only_with=WITH_SLEEP,
    rules="rules:RULES",
    optional=True,
    seams=(
        Row(
            "sleep.sleep",
            f"{ENGINE_CORE}.sleep",
            "asleep:around_sleep(self, level, mode)",
            "a sleep drops what only the device has, although the same weights come back",
        ),
        Row(
            "sleep.release",
            f"{ENGINE_CORE}.release_kv_cache_memory",
            "asleep:around_release",
            "the pages that it promises to release are not in the allocator that vLLM asks",
            "vllm-project/vllm, `CuMemAllocator.discard`",
            "vLLM asks whoever has mapped a KV cache for its pages",
        ),
        Row(
            "sleep.reset",
            f"{ENGINE_CORE}._reset_caches",
            "asleep:around_reset(self, reset_connector)",
            "a sleep of level 1 resets the connector's cache too",
        ),
        Row(
            "sleep.step",
            "vllm.v1.engine.core:EngineCoreProc._process_engine_step",
            "asleep:after_engine_step",
            "storing takes several steps of the engine, after which it falls asleep",
        ),
        Row(
            "sleep.calls",
            f"{ENGINE_CORE}.collective_rpc",
            "asleep:around_call(self, method)",
            "weights that are replaced after a sleep leave the blocks that it kept",
        ),
        Row(
            "sleep.wake_up",
            f"{ENGINE_CORE}.wake_up",
            "asleep:around_wake_up(self, tags)",
            "an engine that woke up has the limit of one that gave its memory back",
        ),
    ),
)
