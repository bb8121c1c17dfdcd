"""``vllm serve`` in a fork of the server of ``process``, which starts in a few seconds.

It and its engine, and workers if it has several, are in a session of their own.
"""

import json
import os
import sys
from pathlib import Path

from harness.engines.placement import fork_workers, stay_in_this_process


def main(job_path: str) -> None:
    """Serve the job's ``model`` with its ``options``, and stop at its ``point``."""
    job = json.loads(Path(job_path).read_text())
    os.setsid()
    fork_workers()
    stay_in_this_process()
    if point := job.get("point"):
        from harness.engines import kill_points

        kill_points.install(point, job["nth"], Path(job["reached"]))
    sys.argv = ["vllm", "serve", job["model"], *job["options"]]
    from vllm.entrypoints.cli.main import main as vllm

    vllm()
