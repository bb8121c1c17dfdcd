"""Aligned columns of text, also where the output is not a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def columns(lines: Sequence[tuple[str, ...]]) -> str:
    """Return lines of cells with the columns under each other."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
