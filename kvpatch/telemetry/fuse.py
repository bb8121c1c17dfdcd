"""Keeping an error of counting to itself: what is counted is vLLM's, and goes on."""

from __future__ import annotations

from types import TracebackType

from kvpatch.logs import log
from kvpatch.telemetry.printable import printable

_LONGEST = 300  # characters of an error on a status page


def in_words(error: BaseException) -> str:
    """Return an error in one line."""
    name, message = type(error).__name__, " ".join(str(error).split())
    text = printable(f"{name}: {message}" if message else name)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class Fuse:
    """Switches off what it guards at the first error there: ``with fuse: ...``.

    A class, and not a generator, because an engine enters it in every step.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.off = ""  # the error that switched it off

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Keep an error of the body; the first one is logged, and switches it off."""
        if not isinstance(error, Exception):
            return False
        if not self.off:
            self.off = in_words(error)
            log.warning(
                "kvpatch: %s is off from now on, and vLLM goes on without it, because of an "
                "error of kvpatch's own; report it with your versions: %s",
                self._what,
                self.off,
            )
            log.debug("kvpatch: the error that switched it off", exc_info=error)
        return True
