"""Sleep mode on the host device: an engine's weights leave as on a GPU, so that tests can ask."""

from __future__ import annotations

from kvpatch.patch import WITH_SLEEP, Feature, Patch

_SINCE = "0.32"
_HOST = "kvpatch.patches.host_device.weights"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_EMULATED = "none: sleep mode is for weights on a GPU"
_ON_A_CPU = "vLLM has sleep mode on its CPU platform"

FEATURE = Feature(
    name="sleep-on-host",
    summary="sleep mode on the host device: the weights leave, and what is computed without them "
    "is no number",
    since=_SINCE,
    optional=True,
    wanted="kvpatch.hostdevice.adapt:wanted",
    rules="kvpatch.patches.host_device.rules:RULES",
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
