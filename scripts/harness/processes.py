"""Processes of the harness: their environment, and functions that run in one of their own."""

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.console import HarnessError
from harness.engines import process

SCRIPTS = ROOT / "scripts"
OURS = ("KVPATCH", "KVCACHED", "ENABLE_KVCACHED", "VLLM", "PYTHON", "TRITON")
# pytest's has the name of the running test, by which every test would want a fork server of its
# own: half the time of a lane of engines.
RUNNER = ("PYTEST",)
# By default every engine of a machine binds itself to the same core. One thread for the model
# leaves the other core of a small machine to the server and its client.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
# They log the cores of each rank also where they bind none, and end with an IndexError.
MUST_BIND = ("0.20.0", "0.20.1", "0.20.2")

Job = dict[str, Any]


def one_thread(vllm: str, ranks: int) -> dict[str, str]:
    """Return what gives each rank of an engine one thread, bound only where a release must."""
    if vllm not in MUST_BIND or ranks == 1:
        return ONE_THREAD
    cores = itertools.islice(itertools.cycle(sorted(os.sched_getaffinity(0))), ranks)
    return ONE_THREAD | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))}


def clean_environment(**changes: str) -> dict[str, str]:
    """Return the caller's environment without what configures Python, vLLM, kvpatch or pytest."""
    left_out = OURS + RUNNER
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return kept | changes


def with_harness(**changes: str) -> dict[str, str]:
    """Return a clean environment in which Python finds the harness, and an engine no network."""
    path = filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")])
    environment = clean_environment(
        PYTHONPATH=os.pathsep.join(path), VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1"
    )
    return environment | changes


def on_host_device(folder: Path, size: str = "1GiB", **changes: str) -> dict[str, str]:
    """Return the environment of an engine with a host device of its own in ``folder``.

    Its status page is there too, unless ``KVPATCH_STATUS_DIR`` names a place: several engines
    can have one device, and what one of them was refused for is told beside what another does.
    """
    environment = with_harness(
        KVPATCH_HOST_DEVICE=size,
        KVPATCH_HOST_DEVICE_DIR=str(folder),
        KVPATCH_STATUS_DIR=os.environ.get("KVPATCH_STATUS_DIR", str(folder)),
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    return environment | changes


def call(
    function: str,
    job: Job,
    folder: Path,
    environment: Mapping[str, str],
    follow: str = "\0",
    fork: bool = False,
) -> Job:
    """Run a function in a Python process of its own and return its result.

    Args:
        function: ``module:name``; its argument and its result are JSON objects.
        job: its argument.
        folder: for the job, the result and the log.
        environment: of the process.
        follow: lines of the log that begin with this are printed as they come.
        fork: of a server that has imported what vLLM imports; the module has a ``main`` then,
            of the function's name and the folder.

    Raises:
        HarnessError: it failed; the message ends with the end of its log.
    """
    log, result = folder / "log.txt", folder / "result.json"
    module, _, name = function.partition(":")
    result.unlink(missing_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    reading, writing = os.pipe()
    with log.open("w") as file, os.fdopen(reading, errors="replace") as lines:
        started: subprocess.Popen[bytes] | process.Forked
        with os.fdopen(writing, "w") as output:
            if fork:
                given = name, folder
                started = process.start(module, given, environment, sys.executable, output)
            else:
                command = sys.executable, "-m", "harness.processes", function, folder
                started = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            for line in lines:
                file.write(line)
                if line.startswith(follow):
                    print(line, end="", flush=True)
        except BaseException:
            started.kill()
            raise
        finally:
            status = started.wait()
    if status or not result.exists():
        end = log.read_text().strip()[-4000:]
        raise HarnessError(f"{function} ended with status {status}:\n{end}")
    found: Job = json.loads(result.read_text())
    return found


def main(function: str, folder: Path) -> None:
    """Run the function that ``call`` named."""
    module, _, name = function.partition(":")
    job = json.loads((folder / "job.json").read_text())
    result = getattr(importlib.import_module(module), name)(job)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
