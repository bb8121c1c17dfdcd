"""Every environment variable of kvpatch, and those of kvcached and vLLM that it depends on.

Imported in every process that has ``KVPATCH`` set, most of which never import vllm;
it imports nothing but ``os``.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Variable:
    """One environment variable.

    Attributes:
        name: its name in the environment.
        meaning: its effect, for the documentation.
        unset: the effect of leaving it unset, for the documentation.
    """

    __slots__ = ("meaning", "name", "unset")

    def __init__(self, name: str, meaning: str, unset: str) -> None:
        self.name = name
        self.meaning = meaning
        self.unset = unset

    def read(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return its value without surrounding whitespace; empty if unset."""
        return environment.get(self.name, "").strip()

    def is_on(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Return whether its value is one of ``ON_VALUES``."""
        return self.read(environment).lower() in ON_VALUES

    def __str__(self) -> str:
        return self.name


ON_VALUES = ("1", "true", "on")
OFF_VALUES = ("", "0")

SWITCH = Variable("KVPATCH", "`1`, `true` or `on` switches kvpatch on, `0` off", "off")
ALLOW_VLLM = Variable(
    "KVPATCH_ALLOW_VLLM",
    "exact version of one vLLM release to start although not validated",
    "none",
)
LOG = Variable("KVPATCH_LOG", "`debug` logs every gate and patch", "one line per process")
STATUS_DIR = Variable(
    "KVPATCH_STATUS_DIR", "folder of the status pages that `kvpatch status` reads", "/dev/shm"
)
HOST_DEVICE = Variable("KVPATCH_HOST_DEVICE", "size of the host device, for example `2GiB`", "none")
HOST_DEVICE_DIR = Variable(
    "KVPATCH_HOST_DEVICE_DIR", "folder of the host device's ledger", "/dev/shm"
)
DEBUG = Variable(
    "KVPATCH_DEBUG", "`1` checksums and verifies every stored block; for debugging", "off"
)
TIER_PATIENCE = Variable(
    "KVPATCH_TIER_PATIENCE",
    "seconds before an unresponsive secondary tier is treated as a miss",
    "10",
)
OUR_IPC_NAME = Variable("KVPATCH_IPC_NAME", "internal: set by kvpatch for child processes", "none")
REFUSAL_FILE = Variable(
    "KVPATCH_REFUSAL_FILE", "internal: set by kvpatch for child processes", "none"
)
OURS = (
    SWITCH,
    ALLOW_VLLM,
    LOG,
    STATUS_DIR,
    HOST_DEVICE,
    HOST_DEVICE_DIR,
    DEBUG,
    TIER_PATIENCE,
    OUR_IPC_NAME,
    REFUSAL_FILE,
)

KVCACHED_ENABLE = Variable("ENABLE_KVCACHED", "kvcached's own switch; set by kvpatch", "set to 1")
KVCACHED_AUTOPATCH = Variable(
    "KVCACHED_AUTOPATCH", "lets kvcached patch vLLM; set by kvpatch", "set to 1"
)
KVCACHED_SWITCHES = (KVCACHED_ENABLE, KVCACHED_AUTOPATCH)
KVCACHED_CONTIGUOUS = Variable(
    "KVCACHED_CONTIGUOUS_LAYOUT", "all layers of a block are contiguous", "`true` on NVIDIA"
)
KVCACHED_PAGE_SIZE_MB = Variable(
    "KVCACHED_PAGE_SIZE_MB", "page size in MiB, a multiple of 2: what is mapped at once", "2"
)
KVCACHED_GPU_UTILIZATION = Variable(
    "KVCACHED_GPU_UTILIZATION", "fraction of the GPU's memory that may be mapped", "0.95"
)
KVCACHED_MIN_RESERVED_PAGES = Variable(
    "KVCACHED_MIN_RESERVED_PAGES", "fewest pages mapped ahead of use", "5"
)
KVCACHED_MAX_RESERVED_PAGES = Variable(
    "KVCACHED_MAX_RESERVED_PAGES", "most pages mapped ahead of use", "10"
)
KVCACHED_IPC_NAME = Variable(
    "KVCACHED_IPC_NAME",
    "name of the pool in /dev/shm, shared by the ranks of an engine",
    "generated",
)
KVCACHED = (
    *KVCACHED_SWITCHES,
    KVCACHED_CONTIGUOUS,
    KVCACHED_PAGE_SIZE_MB,
    KVCACHED_GPU_UTILIZATION,
    Variable("KVCACHED_PAGE_PREALLOC_ENABLED", "map pages ahead of use, in a thread", "`true`"),
    KVCACHED_MIN_RESERVED_PAGES,
    KVCACHED_MAX_RESERVED_PAGES,
    Variable(
        "KVCACHED_MAX_CACHED_TOKENS", "most tokens kept in the prefix cache on the device", "16000"
    ),
    KVCACHED_IPC_NAME,
    Variable("KVCACHED_LOG_LEVEL", "log level of kvcached", "`INFO`"),
)

VLLM_KV_CACHE_LAYOUT = Variable("VLLM_KV_CACHE_LAYOUT", "KV cache layout, vLLM 0.29 on", "auto")
VLLM_USE_V2_MODEL_RUNNER = Variable("VLLM_USE_V2_MODEL_RUNNER", "selects Runner V2", "by release")
PYTHONHASHSEED = Variable(
    "PYTHONHASHSEED", "seed of the hashes that name blocks, the same for all engines", "by release"
)
