"""Tables of the pages in docs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], figures: bool = False) -> list[str]:
    """Return the lines of a table; with ``figures`` all columns but the first are numbers."""
    rule = ["---"] + ["---:" if figures else "---"] * (len(head) - 1)
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *cells)]
