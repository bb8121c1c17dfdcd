"""Running a check in an interpreter of its own."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping

from kvpatch.environ import STATUS_DIR

# ``-c`` puts the current folder in front of the path, where anybody's json.py or a checkout of
# vLLM would be imported. ``-P`` exists from Python 3.11 on only.
_WITHOUT_CURRENT_FOLDER = "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0)\n"


def run(
    python: str, code: str, environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in ``python``, with nothing of the current folder, and no status for others."""
    with tempfile.TemporaryDirectory(prefix="kvpatch-doctor-") as folder:
        return subprocess.run(
            [python, "-c", _WITHOUT_CURRENT_FOLDER + code],
            env={**environment, STATUS_DIR.name: folder},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
