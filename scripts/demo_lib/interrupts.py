"""Signals that end the demo, and the moments when they have to wait."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """Turns the first signal into ``Interrupted``; later ones change nothing.

    What must not be torn apart (starting a process and remembering it, cleaning up)
    runs under ``deferred``: a signal that arrives there is raised at its end.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._pending: int | None = None
        self._raised = False

    def install(self) -> None:
        """Take the signals over, also where the shell had them ignored."""
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
