"""A vLLM plugin: in the workers of a server that finds it, a load brings a byte that is wrong.

vLLM loads it in every process, before there is an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ENTRY = "[vllm.general_plugins]\nflipped = harness.engines.flipped:flip\n"


def flip() -> None:
    """Change one byte of each block that a load has brought, before anybody looks."""
    from kvpatch.patches.debug.checksums import AuditedWorker

    end_load = AuditedWorker.end_load

    def wrong(self: Any, job_id: int) -> None:
        for block, place, _ in self._loading.get(job_id, ()):
            rows, _ = self._groups[place.group][0]
            rows[block][0] ^= 1
        end_load(self, job_id)

    AuditedWorker.end_load = wrong  # type: ignore[method-assign]


def install(folder: Path) -> str:
    """Make the distribution that names this plugin; return a path on which it is found."""
    entry = folder / "flipped-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: flipped\nVersion: 0\n")
    (entry / "entry_points.txt").write_text(ENTRY)
    return str(folder)
