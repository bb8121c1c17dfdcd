"""Aligned columns of text, at full width even if the output is not a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 10_000  # lines are not wrapped here, but by the terminal or a pager


def columns(lines: Iterable[tuple[str, ...]]) -> str:
    """Return lines of cells with aligned columns."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for line in lines:
        table.add_row(*map(Text, line))
    # Without a height, rich ignores the width on a dumb terminal.
    console = Console(width=WIDTH, height=1, color_system=None, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
