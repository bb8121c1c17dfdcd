"""Carrying a refusal from one of vLLM's processes to the one the operator started.

An engine or worker that refuses dies with its sentence deep in the log, and the
process the operator started ends with "Engine core initialization failed". The
first sentence is left in a file that only exists after a refusal, and is said last.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from kvpatch import errors
from kvpatch.observing import refusals

_NAME = "KVPATCH_REFUSAL_FILE"  # <folder>/kvpatch-refusal-<pid of the first process>-<token>


def listen() -> None:
    """Take part: as the first process, or as one that vLLM started from it."""
    if _NAME not in os.environ:
        folder = os.environ.get("TMPDIR") or "/tmp"
        os.environ[_NAME] = f"{folder}/kvpatch-refusal-{os.getpid()}-{os.urandom(8).hex()}"
        atexit.register(_clean_up)
    errors.on_refusal = _leave


def _is_first() -> bool:
    return f"/kvpatch-refusal-{os.getpid()}-" in os.environ.get(_NAME, "")


def _clean_up() -> None:
    if _is_first():  # and not a forked child that inherited this
        take()


def _leave(sentence: str) -> None:
    refusals.remember(sentence)
    path = Path(os.environ.get(_NAME, ""))
    if _is_first():
        return  # made by the first process itself, which says it without help
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    except OSError:
        return  # an earlier one is there already, or the log must do
    with os.fdopen(file, "w") as stream:
        stream.write(sentence)


def take() -> str | None:
    """Return the sentence another process left, if there is one, and remove it."""
    path = Path(os.environ.get(_NAME, ""))
    try:
        sentence = path.read_text()
        path.unlink()
    except OSError:
        return None
    return sentence
