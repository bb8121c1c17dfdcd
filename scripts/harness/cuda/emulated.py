"""vLLM's CUDA build with kvpatch's wheel on an emulated CUDA device, without a GPU.

    scripts/cuda serve MODEL --kv-offloading-size 1 --enforce-eager
    scripts/cuda --vllm 0.32.0 --delays "copies last:7" serve MODEL ...
    scripts/cuda kvpatch doctor

The environment is made first (``scripts/environment cuda-VERSION``), with the device in it. At the
end it says how much the device had to complain of: work that was not ordered after what it needs,
or that touched memory which was not there. The exit status is then 1.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from harness import console, releases, venvs
from harness.cuda import device, environment
from harness.cuda.device import build

MODULES = {"serve": "vllm.entrypoints.cli.main", "kvpatch": "kvpatch"}
# The caller's own settings; KVPATCH is the harness's, which runs without kvpatch.
_OF_CALLER = ("KVPATCH_", "KVCACHED_", "VLLM_")
PLUGINS = "EMU_PLUGINS"  # the environment variable with a path for vLLM's plug-ins
DELAYS = ("none", "random", "copies last", "compute last")


def device_of(version: str) -> Path:
    """Return the folder with the device of a release's environment."""
    return environment.FOLDER / version / "device"


def made(version: str) -> Path:
    """Return the Python of a release's environment, with the device beside it."""
    python, site = environment.made(version), environment.site_of(version)
    sources = sorted(Path(device.__file__).parent.glob("*.*"))
    stamp = (
        environment.digest([*sources, build.NVML]) + (python.parents[1] / "made-from").read_text()
    )
    venvs.made(device_of(version), stamp, lambda: build.build(device_of(version), site))
    for name in build.STARTUP:
        shutil.copyfile(device_of(version) / name, site / name)
    return python


def environ(version: str, folder: Path, size: str = "1GiB", **changes: str) -> dict[str, str]:
    """Return the environment of a process on the device.

    The device's runtime is loaded first, so that it is in the place of the real one, with which
    ``tests/gpu-start`` sees how a start without a device ends.

    Args:
        folder: for the device's ledger and its complaints; processes with the same have one device.
    """
    here = device_of(version)
    own = {
        "EMU_DEVICE": size,
        "EMU_DEVICE_DIR": str(folder),
        "EMU_LIBRARIES": str(here),
        "EMU_COMPLAINTS": str(complaints_of(folder)),
        "LD_LIBRARY_PATH": str(here),
        "LD_PRELOAD": f"{here / 'libcudart.so.13'} {here / 'libnccl.so.2'}",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "OMP_NUM_THREADS": "1",
    }
    return environment.variables(version, folder, **own | changes)


def complaints_of(folder: Path) -> Path:
    """Return the file with what the device of a folder had to complain of."""
    return folder / "complaints"


def run(python: Path, words: list[str], environment_of: Mapping[str, str]) -> int:
    """Run ``serve``, ``kvpatch`` or a Python program of an environment; return its exit status."""
    first, *rest = words
    command = ["-m", MODULES[first]] if first in MODULES else [first]
    given = words if first == "serve" else rest
    signal.signal(signal.SIGINT, lambda *_: None)  # it has the same, and ends in its own way
    with subprocess.Popen([python, "-P", *command, *given], env=environment_of) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        return process.wait()


def main() -> int:
    """Run ``scripts/cuda``."""
    parser = console.parser("scripts/cuda", __doc__ or "")
    parser.add_argument("--vllm", default=releases.newest_built(), help="the release")
    parser.add_argument("--device", default="4GiB", metavar="SIZE", help="its memory")
    parser.add_argument("--devices", default="1", metavar="N", help="how many of that size")
    parser.add_argument(
        "--delays", default="none:0", metavar="KIND:SEED", help=f"one of {', '.join(DELAYS)}"
    )
    parser.add_argument("--plain", action="store_true", help="without kvpatch and kvcached")
    parser.add_argument("words", nargs="...", metavar="serve MODEL ... | kvpatch ... | FILE ...")
    asked = parser.parse_args()
    if not asked.words:
        parser.error("there is nothing to run")
    kind, _, seed = asked.delays.partition(":")
    if kind not in DELAYS:
        parser.error(f"{kind} is none of {', '.join(DELAYS)}")
    python = made(asked.vllm)
    own = {name: value for name, value in os.environ.items() if name.startswith(_OF_CALLER)}
    own |= {"EMU_DELAY": kind, "EMU_SEED": seed or "0", "KVPATCH_STAND_IN_GPUS": asked.devices}
    own["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "0")
    if PLUGINS in os.environ:
        own["PYTHONPATH"] = os.environ[PLUGINS]
    if asked.plain:
        own |= {"KVPATCH": "0", "ENABLE_KVCACHED": "false"}
    # A process that outlives its server may still write there.
    with tempfile.TemporaryDirectory(prefix="kvpatch-cuda-", ignore_cleanup_errors=True) as name:
        status = run(python, asked.words, environ(asked.vllm, Path(name), asked.device, **own))
        found = complaints_of(Path(name))
        lines = found.read_text().splitlines() if found.exists() else []
    for line in lines[:20]:
        print(line, file=sys.stderr)
    print(f"the emulated device had {len(lines)} complaints", file=sys.stderr)
    return status or int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
