"""A terminal that is drawn over in place, and left at a key."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from typing import Any

_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_OTHER, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_QUIT = b"qQ\x04"  # and end of file


class Screen:
    """The terminal's second screen: lines are written over those before, and cut to its size."""

    def __enter__(self) -> Screen:
        self._before: list[Any] | None = None
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        sys.stdout.write(_OTHER)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.write(_BACK)
        sys.stdout.flush()
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def draw(self, text: str) -> None:
        """Show ``text`` instead of what is there."""
        size = shutil.get_terminal_size()
        lines = [line[: size.columns] for line in text.splitlines()[: size.lines - 1]]
        sys.stdout.write(_HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in lines) + _BELOW)
        sys.stdout.flush()

    def quits(self, seconds: float) -> bool:
        """Wait for ``seconds``, or until the operator quits; return whether he does."""
        if self._before is None:
            time.sleep(seconds)
            return False
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0]:
                keys = os.read(sys.stdin.fileno(), 64)  # not a stream, which keeps what it read
                if not keys or any(key in _QUIT for key in keys):
                    return True
        return False
