"""The steps that are runs of ``kvpatch verify``."""

import shutil
import time
from pathlib import Path
from typing import Any

from harness.gpu import model
from harness.gpu.seen import Job, Seen, vllm
from harness.serve import workspace
from kvpatch.verify import report, run

# As large as the default, an engine of the host device would take minutes to be filled; and as
# many to be compiled, which a GPU's is.
ON_HOST = ("--max-model-len", "4096", "--max-num-seqs", "8", "--enforce-eager")


def offloading(job: Job, seen: Seen) -> None:
    """Verify OffloadingConnector."""
    _verify(job, seen)


def simple(job: Job, seen: Seen) -> None:
    """Verify SimpleCPUOffloadConnector."""
    _verify(job, seen, VLLM_USE_SIMPLE_KV_OFFLOAD="1")


def _verify(job: Job, seen: Seen, **environment: str) -> None:
    small = model.small(job)
    options = ["--kv-offloading-size", f"{job.tier_gib:g}", *(ON_HOST if job.host else ())]
    options += job.options
    with workspace() as folder:
        command = (*vllm(), "serve", small, *options)
        asked = run.Options(command, job.environment(folder, **environment), folder)
        try:
            result = run.run(asked, lambda line: print(line, flush=True))
        finally:
            for log in folder.glob("*.log"):
                shutil.copy(log, job.logs() / f"{job.step}-{log.name}")
    # Of this machine are neither the environment's place nor the model's.
    words = ["vllm", "serve", Path(small).name, *options]
    content: dict[str, Any] = report.content(result, words, time.strftime("%Y-%m-%d"), plain=True)
    seen.right += result.judgement.right
    seen.wrong += result.judgement.wrong
    seen.missing += result.judgement.missing
    seen.note(verdict=content)
