"""What a program may ask kvpatch: ``kvpatch.status()``, and ``kvpatch.Refusal``.

Imported when it is asked for, and not with kvpatch, which every process does that has it on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpatch.telemetry import reader


@dataclass(frozen=True)
class Process:
    """One process with kvpatch on, as its status page has it.

    Attributes:
        pid: the process.
        state: ``runs``, or why not, in the words of docs/watching.md.
        line: the state in one sentence; empty for a process that runs.
        roles: ``frontend``, ``engine-core``, ``worker``; several in one process.
        elastic: whether its KV cache is on kvcached's memory; None if it has none.
        features: each feature of kvpatch, and whether it is ``applied``.
        engine: what an engine publishes, as ``kvpatch status --json`` prints it; else empty.
    """

    pid: int
    state: str
    line: str = ""
    roles: tuple[str, ...] = ()
    elastic: bool | None = None
    features: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


def status(pid: int | None = None) -> list[Process]:
    """Return this user's processes with kvpatch on, on this machine, without disturbing them.

    Args:
        pid: one process; it is in the list even if nothing is known of it.
    """
    seen = reader.all_of(everyone=False) if pid is None else [reader.one(pid)]
    return [_process(one) for one in seen]


def _process(seen: reader.Seen) -> Process:
    content = seen.page.content if seen.page else {}
    return Process(
        pid=seen.pid,
        state=seen.state.value,
        line=seen.line,
        roles=tuple(content.get("roles", ())),
        elastic=content.get("elastic"),
        features=dict(content.get("features", {})),
        engine=dict(content.get("engine") or {}),
    )
