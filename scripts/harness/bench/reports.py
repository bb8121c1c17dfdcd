"""Reports of parts that are measured one by one, each with what it depends on."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from harness import provenance

Result = dict[str, Any]


def measure(
    command: str,
    parts: Mapping[str, Callable[[], Result]],
    only: Collection[str] | None,
    report: Path,
    echo: bool = True,
) -> None:
    """Run parts, and write what each found as soon as it did.

    Args:
        command: by which they are run.
        parts: all that the report can have.
        only: those that are run; None for all.
        report: whose other parts are kept.
        echo: print what each found.
    """
    head = provenance.header(command)
    before = json.loads(report.read_text()) if report.exists() else {}
    runs = before.get("runs", {})  # none of a report that was measured at once
    result = head | {name: before[name] for name in runs} | {"runs": runs}
    for part in only or parts:
        result[part] = parts[part]()
        result["runs"][part] = head
        if echo:
            print(json.dumps({part: result[part]}), flush=True)
        provenance.write(result, report)


def word(met: bool) -> str:
    """Return the verdict on a goal."""
    return "met" if met else "missed"
