"""Tables of the pages in docs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LEFT, RIGHT, CENTER = "---", "---:", ":-:"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = LEFT) -> list[str]:
    """Return the lines of a table; ``align`` is of all columns but the first."""
    rule = [LEFT] + [align] * (len(head) - 1)
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *cells)]
