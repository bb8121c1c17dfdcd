"""Figures as a reader wants them, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

MIB = 1 << 20


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return lines


def mib(size: float) -> str:
    """Return bytes in MiB."""
    return f"{size / MIB:,.0f} MiB"


def percent(part: float, whole: float) -> str:
    """Return a share, or a dash when there is no whole."""
    return f"{part / whole:.1%}" if whole else "-"


def rate(size: float, seconds: float) -> str:
    """Return bytes a second in GB/s, or a dash when nothing was timed."""
    return f"{size / seconds / 1e9:.2f}" if seconds > 0 and size > 0 else "-"


def three(values: Iterable[dict[str, float] | None]) -> str:
    """Return mean / P50 / P99, each the median over the repeats."""
    given = [value for value in values if value]
    if not given:
        return "-"
    return " / ".join(
        f"{statistics.median(value[name] for value in given):,.1f}"
        for name in ("mean", "p50", "p99")
    )
