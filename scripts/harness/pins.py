"""scripts/pins: the hash of every package of scripts/pins.txt, as the package index has it.

After an upgrade: write the versions (``pip freeze --all``), then run this, where the index has the
CPU build of torch. One hash per package: of several, pip prefers the file whose hash the index
tells, which for torch is the CUDA build of PyPI.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from harness import ROOT, console

PINS = ROOT / "scripts/pins.txt"
PINNED = re.compile(r"([A-Za-z0-9._-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})*)")


def pinned(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Return the version and the hashes of each package, by its canonical name.

    Raises:
        HarnessError: a line is neither a comment nor a pinned package.
    """
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = PINNED.fullmatch(line)
            if match is None:
                raise console.HarnessError(f"scripts/pins.txt: {line!r} is no pinned package")
            hashes = frozenset(re.findall("sha256:([0-9a-f]+)", match[3]))
            found[canonicalize_name(match[1])] = (match[2], hashes)
    return found


def downloads(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of each package in a report of pip's."""
    found: dict[str, str] = {}
    for one in report["install"]:
        hashes = one["download_info"]["archive_info"]["hashes"]
        found[canonicalize_name(one["metadata"]["name"])] = hashes["sha256"]
    return found


def renewed(text: str, new: Mapping[str, str]) -> str:
    """Return the lines of scripts/pins.txt with the hash of each package that the index has."""

    def line(pin: re.Match[str]) -> str:
        return f"{pin[1]}=={pin[2]} --hash=sha256:{new[canonicalize_name(pin[1])]}"

    return re.sub(rf"(?m)^{PINNED.pattern}$", line, text)


def ask_index(text: str) -> dict[str, str]:
    """Return the hash of what pip would download here for each package."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text(re.sub(" --hash=.*", "", text))
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--report", str(report), "-r", str(wanted)]
        subprocess.run(command, check=True, env=dict(os.environ, KVPATCH="0"))
        return downloads(json.loads(report.read_text()))


def main() -> int:
    """Renew the hashes."""
    console.parser("scripts/pins", __doc__ or "").parse_args()
    text = PINS.read_text()
    PINS.write_text(renewed(text, ask_index(text)))
    return 0
