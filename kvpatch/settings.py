"""Every environment variable of kvpatch, and the ones of others that it depends on."""

from __future__ import annotations

from typing import NamedTuple


class Setting(NamedTuple):
    """One environment variable: its name, what it does, and what it is when unset."""

    name: str
    what: str
    unset: str


OURS = (
    Setting("KVPATCH", "`1`, `true` or `on` switches kvpatch on, `0` off", "off"),
    Setting("KVPATCH_ALLOW_VLLM", "the exact version of one vLLM to let through, untested", "none"),
    Setting(
        "KVPATCH_LOG", "`debug` logs every gate and patch as it is passed", "one line a process"
    ),
    Setting("KVPATCH_STATUS_DIR", "where engines publish what `kvpatch status` shows", "/dev/shm"),
    Setting("KVPATCH_HOST_DEVICE", "the size of the host device, for example `2GiB`", "none"),
    Setting("KVPATCH_HOST_DEVICE_DIR", "where the host device's ledger lies", "/dev/shm"),
    Setting("KVPATCH_DEBUG", "`1` sums and checks every stored block; for finding faults", "off"),
    Setting(
        "KVPATCH_TIER_PATIENCE",
        "seconds that requests wait for a tier's disk before it is passed over",
        "10",
    ),
    Setting("KVPATCH_IPC_NAME", "set by kvpatch for child processes; leave it alone", "none"),
    Setting("KVPATCH_REFUSAL_FILE", "set by kvpatch for child processes; leave it alone", "none"),
)

KVCACHED = (
    Setting("ENABLE_KVCACHED", "kvcached's own switch; kvpatch sets it", "set to 1"),
    Setting("KVCACHED_AUTOPATCH", "lets kvcached patch vLLM; kvpatch sets it", "set to 1"),
    Setting("KVCACHED_CONTIGUOUS_LAYOUT", "a block's layers lie side by side", "`true` on NVIDIA"),
    Setting(
        "KVCACHED_PAGE_SIZE_MB", "MiB that are mapped and given back at once, a multiple of 2", "2"
    ),
    Setting("KVCACHED_GPU_UTILIZATION", "the share of the GPU that may be mapped", "0.95"),
    Setting("KVCACHED_PAGE_PREALLOC_ENABLED", "map some pages ahead, in a thread", "`true`"),
    Setting("KVCACHED_MIN_RESERVED_PAGES", "fewest pages that are mapped ahead", "5"),
    Setting("KVCACHED_MAX_RESERVED_PAGES", "most pages that are mapped ahead", "10"),
    Setting("KVCACHED_MAX_CACHED_TOKENS", "prompt tokens kept for reuse before pages go", "16000"),
    Setting(
        "KVCACHED_IPC_NAME", "the pool's name in /dev/shm, shared by an engine's ranks", "made"
    ),
    Setting("KVCACHED_LOG_LEVEL", "kvcached's own log", "`INFO`"),
)
