"""The process of one step: python -m harness.gpu.step FUNCTION JOB.json."""

import importlib
import json
import sys
import traceback
from pathlib import Path

from harness import provenance
from harness.console import HarnessError
from harness.gpu.seen import Job, Seen


def main(function: str, job_path: str) -> None:
    """Run a step; whatever it raises is something that was not seen."""
    job = Job(**json.loads(Path(job_path).read_text()))
    seen = Seen(job.path)
    seen.note(versions=provenance.versions())
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(job, seen)
    except Exception as error:
        traceback.print_exc()
        # The last line: before it are those of a server's log.
        lines = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, HarnessError) else f"{type(error).__name__}: "
        seen.miss(f"{kind}{lines[-1][:600]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
