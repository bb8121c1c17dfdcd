"""Sleep mode beside a CPU tier: level 1 keeps what the tier has, and what only the device had."""

from __future__ import annotations

from kvpatch.patch import WITH_SLEEP, Feature, Patch
from kvpatch.upstream.targets import ENGINE_CORE

_SINCE = "0.32"
_HOOKS = "kvpatch.patches.sleep.asleep"
_ASKED = "vllm-project/vllm#57810 (sleep that keeps the connector's cache)"
_UNTIL = "vLLM keeps the connector's cache in a sleep of level 1"

FEATURE = Feature(
    name="sleep",
    summary="a sleep of level 1 keeps the CPU tier, stores what only the device has, and gives the "
    "KV cache's memory back",
    since=_SINCE,
    optional=True,
    rules="kvpatch.patches.sleep.rules:RULES",
    seams=(
        Patch(
            id="sleep.sleep",
            target=f"{ENGINE_CORE}.sleep",
            why="a sleep drops what only the device has, although the same weights come back",
            upstream=_ASKED,
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_sleep",
            parameters=("self", "level", "mode"),
            since=_SINCE,
            only_with=WITH_SLEEP,
        ),
        Patch(
            id="sleep.reset",
            target=f"{ENGINE_CORE}._reset_caches",
            why="a sleep of level 1 resets the connector's cache too",
            upstream=_ASKED,
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_reset",
            parameters=("self", "reset_connector"),
            since=_SINCE,
            only_with=WITH_SLEEP,
        ),
        Patch(
            id="sleep.step",
            target="vllm.v1.engine.core:EngineCoreProc._process_engine_step",
            why="storing takes several steps of the engine, after which it falls asleep",
            upstream=_ASKED,
            until=_UNTIL,
            wrapper=f"{_HOOKS}:after_engine_step",
            parameters=("self",),
            since=_SINCE,
            only_with=WITH_SLEEP,
        ),
        Patch(
            id="sleep.calls",
            target=f"{ENGINE_CORE}.collective_rpc",
            why="weights that are replaced after a sleep leave the blocks that it kept",
            upstream=_ASKED,
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_call",
            parameters=("self", "method"),
            since=_SINCE,
            only_with=WITH_SLEEP,
        ),
        Patch(
            id="sleep.wake_up",
            target=f"{ENGINE_CORE}.wake_up",
            why="an engine that woke up has the limit of one that gave its memory back",
            upstream=_ASKED,
            until=_UNTIL,
            wrapper=f"{_HOOKS}:around_wake_up",
            parameters=("self", "tags"),
            since=_SINCE,
            only_with=WITH_SLEEP,
        ),
    ),
)
