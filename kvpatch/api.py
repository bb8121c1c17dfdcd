"""What a program may ask kvpatch: ``kvpatch.status()``, and ``kvpatch.Refusal``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpatch.telemetry import reader


@dataclass(frozen=True)
class Process:
    """One process with kvpatch on, as its status page has it."""

    pid: int
    state: str  # ``runs``, or why not, in the words of docs/watching.md
    line: str = ""  # the state in one sentence; empty for a process that runs
    roles: tuple[str, ...] = ()  # ``frontend``, ``engine-core``, ``worker``; several in one process
    elastic: bool | None = None  # whether its KV cache is on kvcached's memory; None without one
    features: dict[str, str] = field(default_factory=dict)  # each, and whether ``applied``
    engine: dict[str, Any] = field(default_factory=dict)  # as ``kvpatch status --json`` prints it


def status(pid: int | None = None) -> list[Process]:
    """Return this user's processes with kvpatch on, undisturbed; or one, even an unknown one."""
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
