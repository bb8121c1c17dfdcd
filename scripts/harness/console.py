"""The terminal of a long command: its options, its output, its signals and its exit status.

The standard library alone, but for ``Screen``: ``--help`` runs before any set-up.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status


class HarnessError(Exception):
    """The command cannot continue; the message gives the reason and the remedy."""


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """Turns the first signal into ``Interrupted``; later ones change nothing.

    What must not be torn apart (starting a process and recording it, cleaning up)
    runs under ``deferred``: a signal that arrives there is raised at its end.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._pending: int | None = None
        self._raised = False

    def install(self) -> None:
        """Handle the signals, even where the shell had them ignored."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold signals back until the block has ended."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._pending is not None:
                self._raise(self._pending)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._raised:
            return
        if self._depth:
            self._pending = signum
        else:
            self._raise(signum)

    def _raise(self, signum: int) -> None:
        self._pending = None
        self._raised = True
        raise Interrupted(signum)


interrupts = Interrupts()


@dataclass(frozen=True)
class Row:
    """One figure of a table, for a terminal or a report."""

    name: str
    value: str
    note: str = ""


class Screen:
    """Lines that stay, and below them one live line when there is a terminal.

    Args:
        name: of the command; a failure begins with it.
    """

    def __init__(self, name: str) -> None:
        from rich.console import Console

        self._name = name
        self._console = Console(highlight=False, soft_wrap=True, markup=False)
        self._begun = time.monotonic()
        self._status: Status | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._begun

    def say(self, text: str, style: str = "") -> None:
        """Print a line with the time."""
        self._console.print(f"[{self.seconds:5.1f} s] ", style="dim", end="")
        self._console.print(text, style=style)

    def live(self, text: str) -> None:
        """Show the current step; nothing in a file or a pipe."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status("", spinner="dots")
            self._status.start()
        self._status.update(text)

    def close(self) -> None:
        """Remove the live line."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def figures(self, rows: Sequence[Row]) -> None:
        """Print a table of figures."""
        from rich.table import Table

        self.close()
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(justify="right", no_wrap=True, style="bold")
        table.add_column()
        for row in rows:
            table.add_row(row.value, row.name)
            if row.note:
                table.add_row("", row.note, style="dim")
        self._console.print()
        self._console.print(table)
        self._console.print()

    def verdict(self, failures: Sequence[str]) -> None:
        """Print that the command passed, or why it failed."""
        if not failures:
            self._console.print("Passed.", style="bold green")
        for failure in failures:
            self.fail(failure)

    def fail(self, text: str) -> None:
        """Print the error that ends the command."""
        self.close()
        self._console.print(f"{self._name}: {text}", style="red")


def run(screen: Screen, work: Callable[[], int]) -> int:
    """Run ``work`` with signals handled, close the screen, and return the exit status."""
    interrupts.install()
    try:
        return work()
    except HarnessError as error:
        screen.fail(str(error))
        return 1
    except Interrupted as interrupted:
        screen.fail(f"Interrupted by {interrupted}; every process it started has been stopped.")
        return 128 + interrupted.signum
    finally:
        screen.close()


def parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return the parser of a command, whose texts keep their lines."""
    return argparse.ArgumentParser(
        prog=command,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def make_folders(options: argparse.ArgumentParser, *folders: Path | None) -> None:
    """Make the folders that options name; a bad one ends the command with status 2."""
    for folder in folders:
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            options.error(f"{folder} cannot be used as a folder ({error.strerror})")
