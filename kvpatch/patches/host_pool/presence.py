"""Whether the operator asked for a host pool, and for which."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvpatch import environ
from kvpatch.environ import HOST_POOL


def wanted() -> bool:
    """Whether engines of this process have their CPU tier in a host pool."""
    return bool(HOST_POOL.read())


def size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the size of the pool in bytes; 0 without one."""
    return _read(environment)[0]


def home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the pool."""
    from kvpatch.pool import ledger  # here, because without a pool nothing of it is imported

    return ledger.home(_read(environment)[1])


def _read(environment: Mapping[str, str]) -> tuple[int, str]:
    text = HOST_POOL.read(environment)
    return environ.pool(text) if text else (0, "")
