"""Sleep mode on the host device: an engine's weights leave as on a GPU, so that tests can ask."""

from __future__ import annotations

from kvpatch.patch import WITH_SLEEP
from kvpatch.rows import Row, feature

_SINCE = "0.32"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_EMULATED = "none: sleep mode is for weights on a GPU"
_ON_A_CPU = "vLLM has sleep mode on its CPU platform"

FEATURE = feature(
    __name__,
    summary="sleep mode on the host device: the weights leave, and what is computed without them "
    "is no number",
    since=_SINCE,
    upstream=_EMULATED,
    until=_ON_A_CPU,
    only_with=WITH_SLEEP,
    wanted="kvpatch.hostdevice.adapt:wanted",
    rules="kvpatch.patches.host_device.rules:RULES",
    optional=True,
    seams=(
        Row(
            "host_device_sleep.available",
            "vllm.platforms.interface:Platform.is_sleep_mode_available",
            "kvpatch.patches.host_device.weights:available",
            "vLLM refuses sleep mode on its CPU platform",
        ),
        Row(
            "host_device_sleep.weights_leave",
            f"{_CPU_WORKER}.sleep",
            "kvpatch.patches.host_device.weights:leave(self, level)",
            "a worker on a CPU ignores it",
        ),
        Row(
            "host_device_sleep.weights_return",
            f"{_CPU_WORKER}.wake_up",
            "kvpatch.patches.host_device.weights:come_back(self, tags)",
            "a worker on a CPU ignores it",
        ),
        Row(
            "host_device_sleep.nothing_discarded",
            f"{_CPU_WORKER}.discard",
            "kvpatch.patches.host_device.weights:discard(self, tags)",
            "a worker on a CPU refuses it, when the caches have been dropped",
        ),
    ),
)
