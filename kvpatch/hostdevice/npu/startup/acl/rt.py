"""Calls of the runtime."""

from __future__ import annotations

import ctypes

_runtime = ctypes.CDLL("libascendcl.so")


def memcpy(to: int, room: int, source: int, size: int, kind: int) -> int:
    """Copy bytes, between host and device as ``kind`` says; return ACL's status."""
    status: int = _runtime.aclrtMemcpy(
        ctypes.c_void_p(to),
        ctypes.c_size_t(room),
        ctypes.c_void_p(source),
        ctypes.c_size_t(size),
        ctypes.c_int(kind),
    )
    return status
