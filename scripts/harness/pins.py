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

from harness import ROOT, console

PINS = ROOT / "scripts/pins.txt"
PINNED = re.compile(r"([A-Za-z0-9._-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})*)")


def canonical(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Return the version and the hashes of each package, by its canonical name.

    Raises:
        HarnessError: a line is neither a comment nor a pinned package.
    """
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = PINNED.fullmatch(line)
            if match is None:
                raise console.HarnessError(f"scripts/pins.txt: {line!r} is no pinned package")
            hashes = frozenset(re.findall("sha256:([0-9a-f]+)", match[3]))
            found[canonical(match[1])] = (match[2], hashes)
    return found


def downloads(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of each package in a report of pip's."""
    return {
        canonical(one["metadata"]["name"]): one["download_info"]["archive_info"]["hashes"]["sha256"]
        for one in report["install"]
    }


def renewed(text: str, new: Mapping[str, str]) -> str:
    """Return the lines of scripts/pins.txt with the hash of each package that the index has."""
    lines = []
    for line in text.splitlines():
        match = PINNED.fullmatch(line)
        if match is None:
            lines.append(line)
            continue
        lines.append(f"{match[1]}=={match[2]} --hash=sha256:{new[canonical(match[1])]}")
    return "\n".join(lines) + "\n"


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
