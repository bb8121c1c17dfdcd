"""Every environment variable of kvpatch, and those of kvcached and vLLM that it depends on.

Imported in every process that has ``KVPATCH`` set, most of which never import vllm;
it imports nothing but ``os``.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Variable:
    """One environment variable, and what it does, set and unset, for the documentation."""

    __slots__ = ("meaning", "name", "parse", "unset")

    def __init__(
        self, name: str, meaning: str, unset: str, parse: Callable[[str], object] | None = None
    ) -> None:
        self.name = name
        self.meaning = meaning
        self.unset = unset
        self.parse = parse  # None if every value is one

    def read(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return its value without surrounding whitespace; empty if unset."""
        return environment.get(self.name, "").strip()

    def is_on(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Return whether its value is one of ``ON_VALUES``."""
        return self.read(environment).lower() in ON_VALUES

    def is_off(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Return whether its value is one of ``OFF_VALUES``, of which one is to leave it unset."""
        return self.read(environment).lower() in OFF_VALUES

    def __str__(self) -> str:
        return self.name


ON_VALUES = ("1", "true", "on", "yes")
OFF_VALUES = ("", "0", "false", "off", "no")  # and in the startup files, which import nothing
_SECONDS = {"": 1}
_TIMES = {"": 1, "s": 1, "min": 60, "h": 3600}
# G, GB and GiB are one thing, as to kvctl, docker and vLLM's own sizes of memory.
_BYTES = {"": 1, "b": 1} | {
    letter + more: 1 << power
    for letter, power in (("k", 10), ("m", 20), ("g", 30), ("t", 40))
    for more in ("", "b", "i", "ib")
}


def boolean(text: str) -> bool:
    """Return whether ``text`` means on; ValueError if neither on nor off."""
    if text.lower() not in ON_VALUES + OFF_VALUES:
        raise ValueError("it means neither on nor off; use 1 or 0")
    return text.lower() in ON_VALUES


def seconds(text: str) -> float:
    """Return a number of seconds above 0, without a unit, or raise ValueError."""
    return _time(text, _SECONDS, "it is not a number of seconds; use for example 10 or 0.5")


def duration(text: str) -> float:
    """Return seconds above 0, of a number with a unit or without, or raise ValueError."""
    return _time(text, _TIMES, "it is not a duration; use for example 30s or 5min")


def size(text: str) -> int:
    """Return bytes above 0, of a number with a unit or without, or raise ValueError."""
    number = _number(text, _BYTES)
    if number >= 1 << 62:
        raise ValueError("no machine has as much memory; use for example 2GiB or 512MiB")
    return int(_above_zero(int(number), "it is not a size; use for example 2GiB or 512MiB"))


def memory(text: str) -> int:
    """Return the bytes of an engine's memory, or raise ValueError; 64 is 64 bytes, and none."""
    found = size(text)
    if found < 1 << 20:
        raise ValueError("it is less than 1 MiB; use for example 2GiB or 512MiB")
    return found


def whole(text: str) -> int:
    """Return a whole number, read as kvcached reads its settings, or raise ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("it is not a whole number; use for example 8") from None


def number(text: str) -> float:
    """Return a number, read as kvcached reads its settings, or raise ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("it is not a number; use for example 60") from None


def page_size(text: str) -> int:
    """Return kvcached's page size in MiB; ValueError if it has no such page."""
    size = whole(text)
    if size <= 0 or size % 2:
        raise ValueError("it is not a multiple of 2; use for example 2 or 64")
    return size


def fraction(text: str) -> float:
    """Return a number above 0, up to 1, or raise ValueError."""
    try:
        part = float(text)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise ValueError("it is not a share between 0 and 1; use for example 0.95")
    return part


class Share:
    """A size in bytes, or a part, above 0 and up to 1, of another size; the other one is 0."""

    __slots__ = ("part", "size")

    def __init__(self, size: int, part: float) -> None:
        self.size = size
        self.part = part

    def of(self, whole: int) -> int:
        """Return its bytes, of ``whole`` bytes."""
        return self.size or int(whole * self.part)


def share(text: str) -> Share:
    """Return a size, or a part: ``8GiB`` or ``25%``, or raise ValueError."""
    number, percent, rest = text.partition("%")
    if not percent:
        return Share(size(text), 0.0)
    part = 0.0 if rest else _number(number, {"": 1}) / 100
    if not 0 < part <= 1:
        raise ValueError("it is neither a size nor a part of one; use for example 8GiB or 25%")
    return Share(0, part)


def pool(text: str) -> tuple[int, str]:
    """Return the size in bytes and the name of a pool: ``64GiB``, or ``64GiB@name``."""
    amount, at, name = text.partition("@")
    if at and not (name.isascii() and name.isalnum() and len(name) <= 32):
        raise ValueError("its name is not of letters and digits; use for example 64GiB@chat")
    return size(amount), name


def engines_pool(text: str) -> tuple[int, str]:
    """Return a pool with room for a part of a CPU tier; its limit may be lower later."""
    found = pool(text)
    if found[0] < 1 << 20:  # 64 is 64 bytes
        raise ValueError("no part of a CPU tier is as small; use for example 64GiB")
    return found


def _time(text: str, units: Mapping[str, float], otherwise: str) -> float:
    found = _above_zero(_number(text, units), otherwise)
    if found > 1 << 30:  # what waits takes no more than some hundred years
        raise ValueError(f"it is more than 30 years; {otherwise.partition('; ')[2]}")
    return found


def _above_zero(number: float, otherwise: str) -> float:
    if number <= 0:
        raise ValueError(otherwise)
    return number


def _number(text: str, units: Mapping[str, float]) -> float:
    import re  # here, because this module is imported in every process

    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    return float(match[1]) * units.get(match[2].lower(), 0) if match else 0


SWITCH = Variable(
    "KVPATCH",
    "`1`, `true`, `on` or `yes` switches kvpatch on; `0`, `false`, `off` or `no` off",
    "off",
)
ALLOW_VLLM = Variable(
    "KVPATCH_ALLOW_VLLM",
    "exact version of one vLLM release to start although not validated",
    "none",
)
LOG = Variable("KVPATCH_LOG", "`debug` logs every gate and patch", "one line per engine")
STATUS_DIR = Variable(
    "KVPATCH_STATUS_DIR", "folder of the status pages that `kvpatch status` reads", "/dev/shm"
)
HOST_DEVICE = Variable("KVPATCH_HOST_DEVICE", "size of the host device, for example `2GiB`", "none")
HOST_DEVICE_DIR = Variable(
    "KVPATCH_HOST_DEVICE_DIR", "folder of the host device's ledger", "/dev/shm"
)
DEBUG = Variable(
    "KVPATCH_DEBUG", "`1` checksums and verifies every stored block; for debugging", "off", boolean
)
VERDICTS = Variable(
    "KVPATCH_VERDICTS",
    "folder of verdict files of `kvpatch verify`, besides the user's own",
    "the user's own",
)
TIER_PATIENCE = Variable(
    "KVPATCH_TIER_PATIENCE",
    "seconds before an unresponsive secondary tier is treated as a miss",
    "10",
    seconds,
)
TIER_SIZE = Variable(
    "KVPATCH_TIER_SIZE",
    "size of the block files that your engines keep in the folder of a tier `fs`, for example "
    "`500GiB`, or `50%` of its file system; the oldest by their last use go first",
    "until the disk is full",
    share,
)
HOST_POOL = Variable(
    "KVPATCH_HOST_POOL",
    "size of the host memory that the CPU tiers of your engines share, for example `64GiB`; "
    "`64GiB@name` for one of several pools",
    "each engine has its own tier, all of it",
    engines_pool,
)
HOST_POOL_FLOOR = Variable(
    "KVPATCH_HOST_POOL_FLOOR",
    "size of the host pool that this engine may have, and keep, whatever other engines need",
    "others may take what is colder than their own",
    memory,
)
IDLE = Variable(
    "KVPATCH_IDLE",
    "time without requests, for example `30s`, after which an engine stores its KV cache in the "
    "CPU tier and gives its memory back",
    "never",
    duration,
)
FIRST_LIMIT = Variable(
    "KVPATCH_FIRST_LIMIT",
    "memory of the device that an engine may map until somebody sets another limit, for example "
    "`8GiB`, or `25%` of the KV cache that it starts with",
    "all of its KV cache",
    share,
)
OUR_IPC_NAME = Variable("KVPATCH_IPC_NAME", "internal: set by kvpatch for child processes", "none")
REFUSAL_FILE = Variable(
    "KVPATCH_REFUSAL_FILE", "internal: set by kvpatch for child processes", "none"
)
VERIFY = Variable(
    "KVPATCH_VERIFY", "internal: set by `kvpatch verify` for the command that it starts", "none"
)
VERIFIED = Variable("KVPATCH_VERIFIED", "internal: set by kvpatch for child processes", "none")
OURS = (
    SWITCH,
    ALLOW_VLLM,
    LOG,
    STATUS_DIR,
    HOST_DEVICE,
    HOST_DEVICE_DIR,
    DEBUG,
    VERDICTS,
    TIER_PATIENCE,
    TIER_SIZE,
    HOST_POOL,
    HOST_POOL_FLOOR,
    IDLE,
    FIRST_LIMIT,
    OUR_IPC_NAME,
    REFUSAL_FILE,
    VERIFY,
    VERIFIED,
)


def of_a_service(name: str) -> bool:
    """Return whether Kubernetes makes a variable of this name, of a service."""
    import re

    ports = r"PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
    return bool(re.fullmatch(rf"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|{ports})", name))


def unknown(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Iterate over variables with kvpatch's prefix that are none of its own, and what is meant."""
    prefix = f"{SWITCH}_"
    ours = [one.name for one in OURS]
    found = [name for name in environment if name.startswith(prefix) and name not in ours]
    if not found:
        return
    import difflib

    told = [one.name[len(prefix) :] for one in OURS[1:] if not one.meaning.startswith("internal")]
    for name in sorted(found):
        if not of_a_service(name):
            near = difflib.get_close_matches(name[len(prefix) :].upper(), told, n=1, cutoff=0.7)
            yield name, f"{prefix}{near[0]}" if near else ""


KVCACHED_ENABLE = Variable("ENABLE_KVCACHED", "kvcached's own switch; set by kvpatch", "set to 1")
KVCACHED_AUTOPATCH = Variable(
    "KVCACHED_AUTOPATCH", "lets kvcached patch vLLM; set by kvpatch", "set to 1"
)
KVCACHED_SWITCHES = (KVCACHED_ENABLE, KVCACHED_AUTOPATCH)
KVCACHED_CONTIGUOUS = Variable(
    "KVCACHED_CONTIGUOUS_LAYOUT", "all layers of a block are contiguous", "`true` on NVIDIA"
)
KVCACHED_PAGE_SIZE_MB = Variable(
    "KVCACHED_PAGE_SIZE_MB",
    "page size in MiB, a multiple of 2: what is mapped at once",
    "2",
    page_size,
)
KVCACHED_GPU_UTILIZATION = Variable(
    "KVCACHED_GPU_UTILIZATION", "fraction of the GPU's memory that may be mapped", "0.95", fraction
)
KVCACHED_MIN_RESERVED_PAGES = Variable(
    "KVCACHED_MIN_RESERVED_PAGES", "fewest pages mapped ahead of use", "5", whole
)
KVCACHED_MAX_RESERVED_PAGES = Variable(
    "KVCACHED_MAX_RESERVED_PAGES", "most pages mapped ahead of use", "10", whole
)
KVCACHED_IPC_NAME = Variable(
    "KVCACHED_IPC_NAME",
    "name of the pool in /dev/shm, shared by the ranks of an engine; each engine of a data "
    "parallel server adds `-dp` and its rank",
    "generated",
)
KVCACHED_MAX_CACHED_TOKENS = Variable(
    "KVCACHED_MAX_CACHED_TOKENS",
    "most tokens kept in the prefix cache on the device",
    "16000; while `kvpatch balance` runs, what fits the limit",
    whole,
)
KVCACHED = (
    *KVCACHED_SWITCHES,
    KVCACHED_CONTIGUOUS,
    KVCACHED_PAGE_SIZE_MB,
    KVCACHED_GPU_UTILIZATION,
    Variable(
        "KVCACHED_PAGE_PREALLOC_ENABLED",
        "map pages ahead of use, in a thread; without it a limit that `kvctl` writes is not read, "
        "and `kvpatch limit` is the way to set one",
        "`true`",
    ),
    KVCACHED_MIN_RESERVED_PAGES,
    KVCACHED_MAX_RESERVED_PAGES,
    KVCACHED_MAX_CACHED_TOKENS,
    Variable(
        "KVCACHED_MAX_CACHED_BLOCKS", "not used by kvcached 0.1.6, which reads it", "1000", whole
    ),
    Variable(
        "KVCACHED_IPC_TIMEOUT",
        "seconds in which a worker has to answer; 0 for no limit",
        "60",
        number,
    ),
    KVCACHED_IPC_NAME,
    Variable("KVCACHED_LOG_LEVEL", "log level of kvcached", "`INFO`"),
)

VLLM_KV_CACHE_LAYOUT = Variable("VLLM_KV_CACHE_LAYOUT", "KV cache layout, vLLM 0.29 on", "auto")
VLLM_USE_V2_MODEL_RUNNER = Variable("VLLM_USE_V2_MODEL_RUNNER", "selects Runner V2", "by release")
VLLM_USE_RUST_FRONTEND = Variable(
    "VLLM_USE_RUST_FRONTEND", "serves over a program that is no Python; refused", "off"
)
PYTHONHASHSEED = Variable(
    "PYTHONHASHSEED", "seed of the hashes that name blocks, the same for all engines", "by release"
)
