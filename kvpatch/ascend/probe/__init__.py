"""``python -m kvpatch.ascend probe``: what the emulator cannot say of a machine with an NPU.

The emulator follows the published documents, so that it cannot show what a device does where they
say nothing. The probe asks the device, in a minute and without an engine, and writes a verdict for
this machine. On an NPU kvpatch starts only where it is right (KVP603).

acl        the calls of the ACL runtime that it makes
questions  what it asks, each in a process of its own
asking     the processes, and what their answers come to
verdict    the file of the verdict, and for what it holds
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvpatch import distributions, environ

needed = distributions.of_npus


def run(environment: Mapping[str, str], folder: Path | None) -> int:
    """Run the probe, with its verdict in a folder or the user's own; return its exit status."""
    command = [sys.executable, "-m", "kvpatch.ascend", "probe"]
    words = [] if folder is None else ["--verdicts", str(folder)]
    off = {environ.SWITCH.name: "0"}
    return subprocess.run([*command, *words], env={**environment, **off}, check=False).returncode
