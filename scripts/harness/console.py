"""What the operator sees while the demo runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from harness.demo.report import Row


class Screen:
    """Lines that stay, and below them one live line when there is a terminal.

    Args:
        name: whose screen it is; a failure begins with it.
    """

    def __init__(self, name: str = "demo") -> None:
        self._name = name
        self._console = Console(highlight=False, soft_wrap=True)
        self._begun = time.monotonic()
        self._status: Status | None = None

    @property
    def seconds(self) -> float:
        """How long the demo has been running."""
        return time.monotonic() - self._begun

    def say(self, text: str, style: str = "") -> None:
        """Print a line with the time."""
        self._console.print(Text(f"[{self.seconds:5.1f} s] ", style="dim") + Text(text, style))

    def live(self, text: str) -> None:
        """Show what is going on right now; nothing in a file or a pipe."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status("", spinner="dots")
            self._status.start()
        self._status.update(Text(text))

    def close(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def figures(self, rows: Sequence[Row]) -> None:
        """Print the table of figures."""
        self.close()
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        for row in rows:
            table.add_row(Text(row.value, "bold"), Text(row.name))
            if row.note:
                table.add_row("", Text(row.note, "dim"))
        self._console.print()
        self._console.print(table)
        self._console.print()

    def verdict(self, failures: Sequence[str]) -> None:
        """Print why the demo passed or failed."""
        if not failures:
            self._console.print(Text("Passed.", "bold green"))
        for failure in failures:
            self.fail(failure)

    def fail(self, text: str) -> None:
        """Print why the demo ends with an error."""
        self.close()
        self._console.print(Text(f"{self._name}: {text}", "red"))
