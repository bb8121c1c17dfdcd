"""``vllm serve`` in a fork of the server of ``process``, which starts in a few seconds.

    python -m harness.engines.served JOB.json

On a CPU vLLM starts the engine and its workers as fresh Pythons, and on a GPU as forks of itself,
which is what they are here. All of them are in a session of their own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def fork_workers() -> None:
    """Let vLLM fork its engines and workers on a CPU too, which is half a minute for each."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def forked(cls: Any, config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(forked)


def main(job_path: str) -> None:
    """Serve the job's ``model`` with its ``options``, and stop at its ``point``."""
    job = json.loads(Path(job_path).read_text())
    os.setsid()
    fork_workers()
    if point := job.get("point"):
        from harness.engines import kill_points

        kill_points.install(point, job["nth"], Path(job["reached"]))
    sys.argv = ["vllm", "serve", job["model"], *job["options"]]
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main(*sys.argv[1:])
