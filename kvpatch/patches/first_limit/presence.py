"""Whether the operator asked for a limit at birth."""

from __future__ import annotations

from kvpatch.environ import FIRST_LIMIT


def wanted() -> bool:
    """Whether engines of this process have a first limit."""
    return bool(FIRST_LIMIT.read())
