"""The ACL runtime as tests call it."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_uint64
from ctypes import c_void_p as address_t
from pathlib import Path

PAGE = 2 << 20
PARAMETER, NO_CONTEXT, NOT_SUPPORTED = 107000, 107002, 207000
OUT_OF_MEMORY, BUSY, STREAM_FAILED = 207001, 507000, 507011
TO_DEVICE, TO_HOST = 1, 2
_HOST_CALL = ctypes.CFUNCTYPE(None, address_t)


class Location(Structure):
    _fields_ = (("id", c_uint32), ("type", c_int))


class Properties(Structure):
    """Huge pages in HBM of device 0, unless changed."""

    _fields_ = (
        ("handleType", c_int),
        ("allocationType", c_int),
        ("memAttr", c_int),
        ("location", Location),
        ("reserve", c_uint64),
    )

    def __init__(self, attribute: int = 4, device: int = 0) -> None:
        super().__init__(0, 0, attribute, Location(device, 1), 0)


class Direction(Structure):
    _fields_ = (("to", Location), ("of", Location), ("reserved", c_uint8 * 16))


class Refused(Exception):
    """A call returned an error."""

    def __init__(self, call: str, status: int, why: str) -> None:
        super().__init__(f"{call}: {status}: {why}")
        self.status, self.why = status, why


class ACL:
    """One runtime, by what each call makes."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.library.kvpatch_acl_batches.restype = c_uint64
        self._kept: list[object] = []
        self._undo: list[tuple[str, int]] = []

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self.library, name)(*arguments))

    def ok(self, name: str, *arguments: object) -> None:
        status = self.call(name, *arguments)
        if status:
            why = self.library.aclGetRecentErrMsg()
            raise Refused(name, status, why.decode())

    def made(self, name: str, *arguments: object) -> int:
        out = address_t()
        self.ok(name, byref(out), *arguments)
        assert out.value is not None
        return out.value

    def free(self) -> int:
        """Free MiB of the device."""
        free, total = c_size_t(), c_size_t()
        self.ok("aclrtGetMemInfo", 1, byref(free), byref(total))
        return free.value >> 20

    # -- memory

    def reserve(
        self, size: int = 8 * PAGE, alignment: int = 0, wish: int | None = None, flags: int = 0
    ) -> int:
        arguments = c_size_t(size), c_size_t(alignment), address_t(wish), c_uint64(flags)
        made = self.made("aclrtReserveMemAddress", *arguments)
        self._undo.append(("aclrtReleaseMemAddress", made))
        return made

    def release(self, address: int) -> None:
        self.ok("aclrtReleaseMemAddress", address_t(address))

    def physical(self, size: int = PAGE, properties: Properties | None = None) -> int:
        wanted = properties or Properties()
        made = self.made("aclrtMallocPhysical", c_size_t(size), byref(wanted), c_uint64(0))
        self._undo.append(("aclrtFreePhysical", made))
        return made

    def free_physical(self, handle: int) -> None:
        self.ok("aclrtFreePhysical", address_t(handle))

    def map(
        self, address: int, handle: int, size: int = PAGE, offset: int = 0, flags: int = 0
    ) -> None:
        arguments = c_size_t(size), c_size_t(offset), address_t(handle), c_uint64(flags)
        self.ok("aclrtMapMem", address_t(address), *arguments)
        self._undo.append(("aclrtUnmapMem", address))

    def unmap(self, address: int) -> None:
        self.ok("aclrtUnmapMem", address_t(address))

    def malloc(self, size: int) -> int:
        made = self.made("aclrtMalloc", c_size_t(size), 0)
        self._undo.append(("aclrtFree", made))
        return made

    def pinned(self, size: int) -> int:
        return self.made("aclrtMallocHost", c_size_t(size))

    # -- streams

    def stream(self) -> int:
        return self.made("aclrtCreateStream")

    def synchronize(self, stream: int) -> None:
        self.ok("aclrtSynchronizeStream", address_t(stream))

    def event(self) -> int:
        return self.made("aclrtCreateEventWithFlag", 0)

    def record(self, event: int, stream: int) -> None:
        self.ok("aclrtRecordEvent", address_t(event), address_t(stream))

    def reached(self, event: int) -> bool:
        status = c_int()
        self.ok("aclrtQueryEventStatus", address_t(event), byref(status))
        return bool(status.value)

    @contextmanager
    def held(self, stream: int) -> Iterator[None]:
        """Hold what is put on a stream from now on."""
        go = threading.Event()
        hold = _HOST_CALL(lambda _: (go.wait(), None)[1])
        self._kept.append(hold)
        self.ok("aclrtLaunchHostFunc", address_t(stream), hold, None)
        try:
            yield
        finally:
            go.set()

    # -- copies

    def copy(self, to: int, of: int, size: int, kind: int) -> None:
        arguments = c_size_t(size), address_t(of), c_size_t(size), kind
        self.ok("aclrtMemcpy", address_t(to), *arguments)

    def copy_async(self, to: int, of: int, size: int, kind: int, stream: int) -> None:
        arguments = c_size_t(size), address_t(of), c_size_t(size), kind, address_t(stream)
        self.ok("aclrtMemcpyAsync", address_t(to), *arguments)

    def batch(
        self, copies: list[tuple[int, int, int]], stream: int, kinds: list[int] | int = TO_HOST
    ) -> int | None:
        """Copy (to, of, size) at once; return which one was refused.

        Raises:
            Refused: with the index in ``refused``.
        """
        count = len(copies)
        each = kinds if isinstance(kinds, list) else [kinds]
        directions = (Direction * max(1, len(each)))(
            *(
                Direction(Location(0, kind == TO_DEVICE), Location(0, kind == TO_HOST))
                for kind in each
            )
        )
        starts = (c_size_t * max(1, len(each)))(*range(len(each)))
        to = (address_t * count)(*(one[0] for one in copies))
        of = (address_t * count)(*(one[1] for one in copies))
        sizes = (c_size_t * count)(*(one[2] for one in copies))
        refused = c_size_t()
        try:
            self.ok(
                *("aclrtMemcpyBatchAsync", to, sizes, of, sizes, c_size_t(count)),
                *(directions, starts, c_size_t(len(each)), byref(refused), address_t(stream)),
            )
        except Refused as error:
            error.args = (*error.args, refused.value)
            raise
        return None

    def write(self, address: int, text: bytes) -> None:
        """Write to device memory, as a computation would."""
        ctypes.memmove(address, text, len(text))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def tidy(self) -> None:
        """Undo what a test left; what it undid itself is refused here."""
        self.call("aclrtSynchronizeDevice")
        for name, made in reversed(self._undo):
            self.call(name, address_t(made))


__all__ = ["ACL", "PAGE", "POINTER", "Properties", "Refused", "c_int32"]
