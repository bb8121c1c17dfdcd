"""The step ``conformance``: what the emulated CUDA device promises, asked of this one.

The program is compiled here, as it needs CUDA's headers: those beside torch, or of ``CUDA_HOME``.
"""

import subprocess
from importlib.util import find_spec
from pathlib import Path

from harness.cuda.device import build
from harness.gpu.seen import Job, Seen

DRIVER, RUNTIME = "libcuda.so.1", "libcudart.so.13"


def run(job: Job, seen: Seen) -> None:
    """Ask the driver, and the runtime that torch has."""
    torch = find_spec("torch")
    site = Path(torch.origin).parents[1] if torch and torch.origin else None
    program = Path(job.output, "conformance")
    build.conformance(program, site)
    beside = sorted(site.glob(f"nvidia/*/lib/{RUNTIME}")) if site else []
    ask(program, DRIVER, str(beside[0]) if beside else RUNTIME, seen)
    program.unlink()


def ask(program: Path, driver: str, runtime: str, seen: Seen) -> None:
    """Note the answer to each check; those of the emulated device alone are asked of no other."""
    done = subprocess.run([program, driver, runtime], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        answer, _, rest = line.partition(" ")
        if answer in ("right", "WRONG"):
            name, _, otherwise = rest.partition(": ")
            seen.check(name, answer == "right", otherwise)
