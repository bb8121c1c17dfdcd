"""The step ``probe``: what the driver's memory calls do and take, without vLLM.

kvcached maps and unmaps pages while an engine runs, and the host pool registers and deregisters
extents of a file in ``/dev/shm``.
"""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from harness import pinned
from harness.gpu.seen import Job, Seen

PAGE = 2 << 20  # kvcached's
PAGES = 512
EXTENT = 64 << 20  # the host pool's
EXTENTS = 16
BLOCKS = (64 << 10, 512 << 10, 2 << 20)  # bytes of one in a copy
SPIN = 1_700_000_000  # cycles: about a second
_PUNCH = 0x1 | 0x2  # FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE
# Of CUdevice_attribute.
ATTRIBUTES = {"virtual memory": 102, "handles as file descriptors": 103, "host registration": 99}
Times = dict[str, list[float]]


def run(job: Job, seen: Seen) -> None:
    """Ask everything; what fails does not keep the rest from being asked."""
    seen.note(
        device=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        memory=torch.cuda.mem_get_info(),
        shm_bytes=os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize,
    )
    for ask in (pages, ceilings, extents, launches, deregistering):
        try:
            ask(seen)
        except Exception as error:
            first = str(error).partition("\n")[0]
            seen.miss(f"{ask.__name__}: {type(error).__name__}: {first[:300]}")


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("security", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ON_DEVICE = _Location(1, 0)
_PINNED, _READ_AND_WRITE = 1, 3


class Driver:
    """The driver's calls; one that fails raises, and says its number."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function, with numbers as 64 bits.

        Raises:
            RuntimeError: it did not return 0.
        """
        wide = [ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments]
        status = getattr(self._library, name)(*wide)
        if status:
            raise RuntimeError(f"{name} returned {status}")


def pages(seen: Seen) -> None:
    """Create, map and unmap pages of one range; each takes microseconds."""
    torch.zeros(1, device="cuda")  # makes the context
    cuda = Driver()
    value = ctypes.c_int()
    for name, number in ATTRIBUTES.items():
        cuda("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), ctypes.c_int(0))
        seen.note(**{name: value.value})
    properties = _Properties(type=_PINNED, location=_ON_DEVICE)
    access = _Access(_ON_DEVICE, _READ_AND_WRITE)
    granularity = ctypes.c_size_t()
    cuda(
        "cuMemGetAllocationGranularity",
        *(ctypes.byref(granularity), ctypes.byref(properties), ctypes.c_int(0)),
    )
    seen.note(granularity=granularity.value)
    start = ctypes.c_uint64()
    cuda("cuMemAddressReserve", ctypes.byref(start), PAGES * PAGE, 0, 0, 0)
    free = torch.cuda.mem_get_info()[0]
    times: Times = {}
    handles = [ctypes.c_uint64() for _ in range(PAGES)]
    places = [start.value + number * PAGE for number in range(PAGES)]
    for handle, at in zip(handles, places, strict=True):
        with timed(times, "create"):
            cuda("cuMemCreate", ctypes.byref(handle), PAGE, ctypes.byref(properties), 0)
        with timed(times, "map"):
            cuda("cuMemMap", at, PAGE, 0, handle, 0)
        with timed(times, "access"):
            cuda("cuMemSetAccess", at, PAGE, ctypes.byref(access), 1)
    taken = free - torch.cuda.mem_get_info()[0]
    for handle, at in zip(handles, places, strict=True):
        with timed(times, "unmap"):
            cuda("cuMemUnmap", at, PAGE)
        with timed(times, "release"):
            cuda("cuMemRelease", handle)
    left = free - torch.cuda.mem_get_info()[0]
    seen.note(page_us=shown(times, 1e6), mapped_bytes=taken, bytes_after_release=left)
    seen.check("mapped pages take the device's memory", taken >= PAGES * PAGE // 2, str(taken))
    seen.check("released pages are free", left <= PAGE, f"{left} bytes are not")


def ceilings(seen: Seen) -> None:
    """Copy pinned memory at once, and in blocks of some sizes."""
    rates = {}
    for size in (1 << 30, *BLOCKS):
        for way in ("store", "load"):
            asked = {"bytes": size, "blocks": (1 << 30) // size, "way": way}
            rates[f"{way}, {size} bytes"] = round(pinned.copy(asked)["gb_per_second"], 2)
    seen.note(pinned_gb_per_second=rates)
    seen.check("pinned memory is copied", min(rates.values()) > 0)


class Pool:
    """A sparse file in ``/dev/shm``, as the host pool has it."""

    def __init__(self) -> None:
        path = Path(f"/dev/shm/kvpatch-probe-{os.getpid()}")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        os.ftruncate(self._file, EXTENTS * EXTENT)
        self._memory = mmap.mmap(self._file, EXTENTS * EXTENT)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.extents = whole.view(EXTENTS, EXTENT)
        self._libc = ctypes.CDLL(None, use_errno=True)

    @property
    def bytes(self) -> int:
        """What the kernel has for it."""
        return os.fstat(self._file).st_blocks * 512

    def allocate(self, extent: int) -> None:
        """Let the kernel have an extent's memory."""
        os.posix_fallocate(self._file, extent * EXTENT, EXTENT)

    def register(self, extent: int, count: int = 1) -> None:
        """Register extents with CUDA, in one range."""
        place = self.extents[extent].data_ptr()
        _done("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(place, count * EXTENT, 0))

    def deregister(self, extent: int) -> None:
        """Deregister an extent."""
        place = self.extents[extent].data_ptr()
        _done("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(place))

    def punch(self, extent: int) -> None:
        """Give an extent's memory back."""
        begin, size = ctypes.c_long(extent * EXTENT), ctypes.c_long(EXTENT)
        if self._libc.fallocate(self._file, _PUNCH, begin, size):
            raise OSError(ctypes.get_errno(), "no hole was punched")


def _done(name: str, status: Any) -> None:
    if int(status):
        raise RuntimeError(f"{name} returned {int(status)}")


def extents(seen: Seen) -> None:
    """Register, fill, deregister and punch extents; each takes milliseconds."""
    _extents(seen, Pool(), "idle")


def _extents(seen: Seen, pool: Pool, when: str) -> None:
    times: Times = {}
    device = torch.randint(0, 255, (EXTENT,), dtype=torch.uint8, device="cuda")
    wanted, stream = device.cpu(), torch.cuda.Stream()
    right = True
    for number in range(EXTENTS):
        with timed(times, "allocate"):
            pool.allocate(number)
        with timed(times, "register"):
            pool.register(number)
        with timed(times, "copy"), torch.cuda.stream(stream):
            pool.extents[number].copy_(device, non_blocking=True)
            stream.synchronize()
        right &= torch.equal(pool.extents[number], wanted)
    full = pool.bytes
    for number in range(EXTENTS):
        with timed(times, "deregister"):
            pool.deregister(number)
        with timed(times, "punch"):
            pool.punch(number)
    left, zeros = pool.bytes, not pool.extents.any()
    seen.note(**{f"extent_ms, {when}": shown(times, 1e3)})
    seen.check(f"what is copied into an extent is there, {when}", right)
    held = f"{left} of {full} bytes are held"
    seen.check(f"an extent that was deregistered and punched is free, {when}", left == 0, held)
    seen.check(f"and has zeros, {when}", zeros)


def launches(seen: Seen) -> None:
    """Launch kernels as an engine's steps do, alone and while extents come and go."""
    square = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    times: Times = {}
    ends = threading.Event()
    when = "alone"

    def launch() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not ends.is_set():
                with timed(times, when):
                    for _ in range(20):
                        square @ square
                    torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        time.sleep(1.5)
        when = "while extents come and go"
        _extents(seen, Pool(), "under launches")
    finally:
        ends.set()
        thread.join()
    seen.note(launches_ms=shown(times, 1e3))


def deregistering(seen: Seen) -> None:
    """Deregister an extent that a running kernel does not use."""
    pool = Pool()
    pool.allocate(0)
    pool.register(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SPIN)
    times: Times = {}
    with timed(times, "deregister"):
        pool.deregister(0)
    with timed(times, "the kernel ends after"):
        torch.cuda.synchronize()
    for number in range(EXTENTS):
        pool.allocate(number)
    with timed(times, "register 1 GiB at once"):
        pool.register(0, EXTENTS)
    pool.deregister(0)
    seen.note(beside_a_kernel_ms=shown(times, 1e3))


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    """Note the seconds of a block."""
    begun = time.perf_counter()
    yield
    times.setdefault(name, []).append(time.perf_counter() - begun)


def shown(times: Times, unit: float) -> dict[str, dict[str, float]]:
    """Return the median, the 99th percentile and the most of each, in a unit of a second."""
    found = {}
    for name, seconds in times.items():
        high = quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
        each = {"p50": median(seconds), "p99": high, "max": max(seconds)}
        found[name] = {word: round(value * unit, 3) for word, value in each.items()}
    return found
