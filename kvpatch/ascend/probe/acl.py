"""The calls of the ACL runtime that the probe makes: virtual memory, copies, one stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

PAGE = 2 << 20  # of kvcached, and the size of an NPU's huge pages
TO_DEVICE, TO_HOST = 1, 2
_HOST, _DEVICE = 0, 1  # kinds of a place
_HBM, _HUGE_PAGES = 1, 4  # kinds of memory
_STARTED_BEFORE = 100002


class Place(Structure):
    """A host or device."""

    _fields_ = (("id", c_uint32), ("type", c_int))


class Properties(Structure):
    """What physical memory is wanted."""

    _fields_ = (
        ("handleType", c_int),
        ("allocationType", c_int),
        ("memAttr", c_int),
        ("location", Place),
        ("reserve", c_uint64),
    )


class Direction(Structure):
    """Where the copies of a batch go."""

    _fields_ = (("to", Place), ("of", Place), ("reserved", c_uint8 * 16))


class Refused(Exception):
    """A call returned an error."""


class ACL:
    """The runtime in one process, on one device: an OSError, or Refused, if it cannot be used."""

    def __init__(self, library: Path, device: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.device = device
        if self._status("aclInit", None) not in (0, _STARTED_BEFORE):
            raise Refused("aclInit failed")
        self.do("aclrtSetDevice", device)

    def _status(self, name: str, *arguments: object) -> int:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise Refused(f"this CANN has no {name}") from None
        return int(function(*arguments))

    def do(self, name: str, *arguments: object) -> None:
        """Make a call; Refused if it returned an error, or there is no such call."""
        status = self._status(name, *arguments)
        if status:
            why = (self._library.aclGetRecentErrMsg() or b"").decode(errors="replace")
            raise Refused(f"{name} returned {status}: {' '.join(why.split())[:300]}")

    def _made(self, name: str, *arguments: object) -> int:
        made = c_void_p()
        self.do(name, byref(made), *arguments)
        return made.value or 0

    def free(self) -> int:
        """Return the free bytes of the device."""
        left, total = c_size_t(), c_size_t()
        self.do("aclrtGetMemInfo", _HBM, byref(left), byref(total))
        return left.value

    def reserve(self, size: int) -> int:
        """Reserve addresses."""
        wanted = c_size_t(size), c_size_t(0), c_void_p(None), c_uint64(0)
        return self._made("aclrtReserveMemAddress", *wanted)

    def release(self, address: int) -> None:
        """Give reserved addresses back."""
        self.do("aclrtReleaseMemAddress", c_void_p(address))

    def physical(self, size: int = PAGE) -> int:
        """Allocate physical memory; return its handle."""
        wanted = Properties(0, 0, _HUGE_PAGES, Place(self.device, _DEVICE), 0)
        return self._made("aclrtMallocPhysical", c_size_t(size), byref(wanted), c_uint64(0))

    def free_physical(self, handle: int) -> None:
        """Free physical memory."""
        self.do("aclrtFreePhysical", c_void_p(handle))

    def map(self, address: int, handle: int, size: int = PAGE) -> None:
        """Map physical memory at reserved addresses."""
        where = c_size_t(size), c_size_t(0), c_void_p(handle), c_uint64(0)
        self.do("aclrtMapMem", c_void_p(address), *where)

    def unmap(self, address: int) -> None:
        """Unmap the mapping that begins at an address."""
        self.do("aclrtUnmapMem", c_void_p(address))

    def pinned(self, size: int) -> int:
        """Allocate pinned memory of the host, which the process keeps."""
        return self._made("aclrtMallocHost", c_size_t(size))

    def stream(self) -> int:
        """Make a stream."""
        return self._made("aclrtCreateStream")

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""
        self.do("aclrtSynchronizeStream", c_void_p(stream))

    def copy(self, to: int, of: int, size: int, kind: int) -> None:
        """Copy, and wait for it."""
        given = c_size_t(size), c_void_p(of), c_size_t(size), kind
        self.do("aclrtMemcpy", c_void_p(to), *given)

    def copy_later(self, to: int, of: int, size: int, kind: int, stream: int) -> None:
        """Put a copy on a stream."""
        given = c_size_t(size), c_void_p(of), c_size_t(size), kind, c_void_p(stream)
        self.do("aclrtMemcpyAsync", c_void_p(to), *given)

    def batch(self, copies: Sequence[tuple[int, int, int]], kind: int, stream: int) -> None:
        """Put copies (to, of, size) on a stream with one call, as vllm-ascend does."""
        count = len(copies)
        to = (c_void_p * count)(*(one[0] for one in copies))
        of = (c_void_p * count)(*(one[1] for one in copies))
        sizes = (c_size_t * count)(*(one[2] for one in copies))
        places = Place(0, _HOST), Place(self.device, _DEVICE)
        direction = Direction(*(places[::-1] if kind == TO_DEVICE else places))
        first, refused = c_size_t(0), c_size_t()
        self.do(
            *("aclrtMemcpyBatchAsync", to, sizes, of, sizes, c_size_t(count), byref(direction)),
            *(byref(first), c_size_t(1), byref(refused), c_void_p(stream)),
        )

    def write(self, address: int, text: bytes) -> None:
        """Write to memory of the device."""
        given = ctypes.create_string_buffer(text, len(text))
        self.copy(address, ctypes.addressof(given), len(text), TO_DEVICE)

    def read(self, address: int, size: int) -> bytes:
        """Read memory of the device."""
        made = ctypes.create_string_buffer(size)
        self.copy(ctypes.addressof(made), address, size, TO_HOST)
        return made.raw

    @staticmethod
    def put(address: int, text: bytes) -> None:
        """Write to memory of the host."""
        ctypes.memmove(address, text, len(text))

    @staticmethod
    def get(address: int, size: int) -> bytes:
        """Read memory of the host."""
        return ctypes.string_at(address, size)
