"""Sleep mode beside a CPU tier: level 1 keeps what the tier has, and what only the device had.

On the host device an engine's weights leave as on a GPU, so that all of it can be tested.
"""

from __future__ import annotations

from kvpatch.patch import WITH_SLEEP, Feature, Patch
from kvpatch.upstream.targets import ENGINE_CORE

_SINCE = "0.32"
_HOOKS = "kvpatch.patches.sleep.asleep"
_HOST = "kvpatch.patches.sleep.weights"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_ASKED = "vllm-project/vllm#57810 (sleep that keeps the connector's cache)"
_UNTIL = "vLLM keeps the connector's cache in a sleep of level 1"
_EMULATED = "none: sleep mode is for weights on a GPU"
_ON_A_CPU = "vLLM has sleep mode on its CPU platform"

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

ON_HOST = Feature(
    name="sleep-on-host",
    summary="sleep mode on the host device: the weights leave, and what is computed without them "
    "is no number",
    since=_SINCE,
    optional=True,
    wanted="kvpatch.patches.host_device.presence:wanted",
    seams=(
        Patch(
            id="sleep.available",
            target="vllm.platforms.interface:Platform.is_sleep_mode_available",
            why="vLLM refuses sleep mode on its CPU platform",
            upstream=_EMULATED,
            until=_ON_A_CPU,
            wrapper=f"{_HOST}:available",
            parameters=("self",),
            since=_SINCE,
            only_with=WITH_SLEEP,
        ),
        Patch(
            id="sleep.weights_leave",
            target=f"{_CPU_WORKER}.sleep",
            why="a worker on a CPU ignores it",
            upstream=_EMULATED,
            until=_ON_A_CPU,
            wrapper=f"{_HOST}:leave",
            parameters=("self", "level"),
            since=_SINCE,
            only_with=WITH_SLEEP,
        ),
        Patch(
            id="sleep.weights_return",
            target=f"{_CPU_WORKER}.wake_up",
            why="a worker on a CPU ignores it",
            upstream=_EMULATED,
            until=_ON_A_CPU,
            wrapper=f"{_HOST}:come_back",
            parameters=("self", "tags"),
            since=_SINCE,
            only_with=WITH_SLEEP,
        ),
    ),
)
