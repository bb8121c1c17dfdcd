"""The ACL runtime as tests call it: as the probe does, and with what is refused."""

import ctypes
import threading
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint64
from ctypes import c_void_p as address_t

import pytest

from kvpatch.ascend.probe import acl
from kvpatch.ascend.probe.acl import PAGE, TO_DEVICE, TO_HOST, Direction, Place

PARAMETER, NO_CONTEXT, NOT_SUPPORTED = 107000, 107002, 207000
OUT_OF_MEMORY, BUSY, STREAM_FAILED = 207001, 507000, 507011
_HOST_CALL = ctypes.CFUNCTYPE(None, address_t)


class Properties(acl.Properties):
    """Huge pages in HBM of device 0, unless changed."""

    def __init__(self, attribute=4, device=0):
        super().__init__(0, 0, attribute, Place(device, 1), 0)


class Refused(acl.Refused):
    """A call returned an error."""

    def __init__(self, call, status, why):
        super().__init__(f"{call}: {status}: {why}")
        self.status = status


def refused(status, why):
    return pytest.raises(Refused, match=f"{status}: .*{why}")


class ACL(acl.ACL):
    """One runtime on device 0, by what each call makes."""

    def __init__(self, library):
        self._kept = []
        self._undo = []
        super().__init__(library, device=0)
        self.library = self._library
        self.library.kvpatch_acl_batches.restype = c_uint64

    def do(self, name, *arguments):
        status = self._status(name, *arguments)
        if status:
            raise Refused(name, status, self._library.aclGetRecentErrMsg().decode())

    def free(self):
        """Free MiB of the device."""
        return super().free() >> 20

    # -- memory

    def _undone_by(self, name, made):
        self._undo.append((name, made))
        return made

    def reserve(self, size=8 * PAGE, alignment=0, wish=None, flags=0):
        given = c_size_t(size), c_size_t(alignment), address_t(wish), c_uint64(flags)
        made = self._made("aclrtReserveMemAddress", *given)
        return self._undone_by("aclrtReleaseMemAddress", made)

    def physical(self, size=PAGE, properties=None):
        wanted = properties or Properties()
        made = self._made("aclrtMallocPhysical", c_size_t(size), byref(wanted), c_uint64(0))
        return self._undone_by("aclrtFreePhysical", made)

    def map(self, address, handle, size=PAGE, offset=0, flags=0):
        given = c_size_t(size), c_size_t(offset), address_t(handle), c_uint64(flags)
        self.do("aclrtMapMem", address_t(address), *given)
        self._undone_by("aclrtUnmapMem", address)

    def malloc(self, size):
        return self._undone_by("aclrtFree", self._made("aclrtMalloc", c_size_t(size), 0))

    # As a computation would.
    write = staticmethod(acl.ACL.put)
    read = staticmethod(acl.ACL.get)

    # -- streams

    def event(self):
        return self._made("aclrtCreateEventWithFlag", 0)

    def record(self, event, stream):
        self.do("aclrtRecordEvent", address_t(event), address_t(stream))

    def reached(self, event):
        status = c_int()
        self.do("aclrtQueryEventStatus", address_t(event), byref(status))
        return bool(status.value)

    @contextmanager
    def held(self, stream):
        """Hold what is put on a stream from now on."""
        go = threading.Event()
        hold = _HOST_CALL(lambda _: (go.wait(), None)[1])
        self._kept.append(hold)
        self.do("aclrtLaunchHostFunc", address_t(stream), hold, None)
        try:
            yield
        finally:
            go.set()

    # -- copies

    def batch(self, copies, stream, kinds=(TO_HOST,)):
        """Copy (to, of, size) at once; ``kinds`` are of the first copies, and those behind them.

        Raises:
            Refused: with the index of the copy that was refused as its last argument.
        """
        to, of, sizes = zip(*copies, strict=True)
        addresses, counts = address_t * len(copies), c_size_t * len(copies)
        directions = [
            Direction(Place(0, kind == TO_DEVICE), Place(0, kind == TO_HOST)) for kind in kinds
        ]
        some = max(1, len(kinds))
        index = c_size_t()
        try:
            self.do(
                *("aclrtMemcpyBatchAsync", addresses(*to), counts(*sizes)),
                *(addresses(*of), counts(*sizes), c_size_t(len(copies))),
                *((Direction * some)(*directions), (c_size_t * some)(*range(len(kinds)))),
                *(c_size_t(len(kinds)), byref(index), address_t(stream)),
            )
        except Refused as error:
            error.args = (*error.args, index.value)
            raise

    def tidy(self):
        """Undo what a test left; what it undid itself is refused here."""
        self._status("aclrtSynchronizeDevice")
        for name, made in reversed(self._undo):
            self._status(name, address_t(made))
