"""The last refusals of a user, for ``kvpatch status``: a few lines in shared memory.

A refusal is raised in any case; nothing here may put another error in its place.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from kvpatch import private
from kvpatch.logs import log
from kvpatch.telemetry import schema
from kvpatch.telemetry import status_page as page
from kvpatch.telemetry.printable import printable

KEPT = 5
# Characters of one sentence; a quoted error of torch or pydantic may have 10,000. At most four
# bytes each, so that all of them fit in ``page.SIZE``.
LONGEST = 2000
_NAME = "refusals"


def remember(sentence: str) -> None:
    """Add a refusal; if that is not possible, it is still on stderr."""
    try:
        _remember(_shortened(printable(sentence)))
    except Exception as error:
        log.debug("kvpatch: a refusal was not kept for kvpatch status: %r", error)


def _shortened(sentence: str) -> str:
    # Its end is what to do, and the code.
    if len(sentence) <= LONGEST:
        return sentence
    return f"{sentence[: LONGEST - 503]}...{sentence[-500:]}"


def _remember(sentence: str) -> None:
    folder = page.own_folder()
    kept = recent()
    if kept and (kept[-1]["sentence"], kept[-1]["pid"]) == (sentence, os.getpid()):
        return  # the same refusal, raised again as the error of the import
    kept.append({"sentence": sentence, "pid": os.getpid(), "at": time.time()})
    # A process of another container may have the same pid.
    made = folder / f"{_NAME}.{os.getpid()}.{os.urandom(4).hex()}"
    private.create(made, json.dumps(kept[-KEPT:], ensure_ascii=False).encode())
    try:
        made.replace(folder / _NAME)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def recent() -> list[dict[str, Any]]:
    """Return the last refusals of this user, newest last, of a file that nobody else made."""
    try:
        folder = page.checked(page.folder_of(os.getuid()), os.getuid())
        return schema.refusals(json.loads(page.contents(folder / _NAME)))[-KEPT:]
    except (OSError, page.Unreadable, ValueError, RecursionError):
        return []
