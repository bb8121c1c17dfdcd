"""The last refusals of a user, for ``kvpatch status``: a few lines in shared memory."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from kvpatch.telemetry import status_page as page

KEPT = 5
_NAME = "refusals"


def remember(sentence: str) -> None:
    """Add a refusal; if that is not possible, it is still on stderr."""
    try:
        path = page.own_folder() / _NAME
        kept = recent()
        if kept and (kept[-1]["sentence"], kept[-1]["pid"]) == (sentence, os.getpid()):
            return  # the same refusal, raised again as the error of the import
        kept.append({"sentence": sentence, "pid": os.getpid(), "at": time.time()})
        made = path.with_name(f"{_NAME}.{os.getpid()}")
        made.write_text(json.dumps(kept[-KEPT:]))
        made.chmod(0o600)
        made.replace(path)
    except OSError:
        return


def recent() -> list[dict[str, Any]]:
    """Return the last refusals of this user, newest last: sentence, pid, at."""
    try:
        kept = json.loads((page.folder_of(os.getuid()) / _NAME).read_text())
    except (OSError, ValueError):
        return []
    return kept if isinstance(kept, list) else []
