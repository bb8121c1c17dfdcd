"""Human-readable sizes of memory."""

from __future__ import annotations


def readable(size: int) -> str:
    """Return ``size`` bytes in the largest fitting unit, with at most one decimal digit."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if amount == int(amount) else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
