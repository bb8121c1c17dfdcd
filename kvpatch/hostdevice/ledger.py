"""The device's memory: its size, the usage per process, and the hold on copies.

The ledger file is written by kvcached's extension through ``include/cuda.h``, which
defines its layout; here it is only read.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvpatch import private
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR, size
from kvpatch.process import start_ticks
from kvpatch.refusal import Refusal

_PAGE = 2 << 20
_MAGIC = 0x3144564854415650
_HEADER = struct.Struct("=Qq")
_SLOT = struct.Struct("=qqq")
_SLOTS = 128


def device_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the size of the device in bytes, whole 2 MiB pages; ValueError if unset or no size."""
    text = HOST_DEVICE.read(environment)
    try:
        pages = size(text) // _PAGE
    except ValueError:
        pages = 0
    if pages == 0:
        raise ValueError(f'{HOST_DEVICE}="{text}" is not a size; use for example 2GiB or 512MiB')
    return pages * _PAGE


def require_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the size of the device in bytes, or raise Refusal."""
    try:
        return device_size(environment)
    except ValueError as error:
        raise Refusal(
            "this machine has no GPU and the host device has no size",
            str(error),
            f"set {HOST_DEVICE}=2GiB, or set KVPATCH=0",
            code="KVP502",
        ) from error


def ledger_path(index: int = 0) -> Path:
    """Return the ledger file of device ``index`` of this user."""
    folder = Path(HOST_DEVICE_DIR.read() or "/dev/shm")
    return folder / f"kvpatch-host-device-{os.getuid()}-{index}"


def usage(index: int = 0) -> dict[int, int]:
    """Return the bytes each running process has mapped, by pid; Unsafe if it is another user's."""
    data = _read(index)
    if len(data) < _HEADER.size + _SLOTS * _SLOT.size or _HEADER.unpack_from(data)[0] != _MAGIC:
        return {}
    used = {}
    for slot in range(_SLOTS):
        pid, started, size = _SLOT.unpack_from(data, _HEADER.size + slot * _SLOT.size)
        if pid and start_ticks(pid) == started:
            used[pid] = size
    return used


def memory(index: int = 0) -> tuple[int, int]:
    """Return (free, total) bytes of device ``index``, as ``torch.cuda.mem_get_info`` does."""
    total = device_size()
    return max(0, total - sum(usage(index).values())), total


def size_in_use(index: int = 0) -> int | None:
    """Return the device size of the running processes, or None if there are none."""
    return int(_HEADER.unpack_from(_read(index))[1]) if usage(index) else None


def _read(index: int) -> bytes:
    path = ledger_path(index)
    if not os.path.lexists(path):
        return b""
    # Without the lock, as one read of slots that are each written in place: kvcached's extension
    # waits for it while it holds the GIL, which a thread that has the lock needs to go on.
    with private.opened(path, closed=False) as file:
        return os.pread(file, _HEADER.size + _SLOTS * _SLOT.size, 0)


def _hold_path() -> Path:
    return ledger_path().with_suffix(".hold")


@contextmanager
def _hold(kind: int) -> Iterator[None]:
    with private.opened(_hold_path(), closed=False) as file:
        os.fchmod(file, 0o600)  # whoever can open it can lock it
        fcntl.flock(file, kind)
        yield


@contextmanager
def copy_permit() -> Iterator[None]:
    """Wait until the device's copies are not held, and prevent a hold inside the block."""
    with _hold(fcntl.LOCK_SH):
        yield


@contextmanager
def hold_copies() -> Iterator[None]:
    """Prevent copies from starting, in any process, though not from being queued: for tests."""
    with _hold(fcntl.LOCK_EX):
        yield
