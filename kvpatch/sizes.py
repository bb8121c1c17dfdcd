"""Sizes of memory for people."""

from __future__ import annotations


def readable(size: int) -> str:
    """Return ``size`` bytes in the largest unit that leaves a whole number or one digit."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if amount == int(amount) else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
