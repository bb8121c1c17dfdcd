"""scripts/bench-startup: what kvpatch adds to the start of Python and to ``import vllm``.

Off: whole runs of ``python -c pass`` in a bare environment, with and without kvpatch's startup
files, in turns.

On: an import of vllm takes seconds and varies by more than kvpatch costs, so that its parts are
timed, inside processes that import vllm with kvcached patched in: kvpatch's modules, its gates
before vllm, and its patches, of which those that make the host device are taken off: no machine
with a GPU has them. Modules that an engine imports anyway, and those of the standard library that
an import of vllm loads in any case, are loaded before the clock of a part starts.

Run it on a quiet machine: .venv/bin/python scripts/bench-startup. It prints the result and
writes it to docs/results/startup.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from harness import ROOT, console, provenance
from harness.processes import clean_environment, on_host_device
from kvpatch import patches, supported
from kvpatch.versions import installed

RESULT = ROOT / "docs/results/startup.json"
# Beside the standard library, what vLLM and kvcached import of their own accord: whoever comes
# first pays, and nobody adds it.
ANYWAY = ("packaging.specifiers", "wrapt")

# What every process imports; the targets' modules stand in the environment.
IMPORTS = """
import importlib, json, os, sys, time
import vllm
for name in os.environ["BENCH_MODULES"].split():
    importlib.import_module(name)
"""
STANDARD = (
    IMPORTS
    + """
assert set(os.environ["BENCH_ANYWAY"].split()) <= set(sys.modules)
names = [name for name in sys.modules if name.partition(".")[0] in sys.stdlib_module_names]
print('\\n' + json.dumps([name for name in names if not name.startswith("__")]))
"""
)
PARTS = """
import importlib, os, time
for name in os.environ["BENCH_ANYWAY"].split():
    importlib.import_module(name)
parts = {}
def timed(module, name, before=lambda: None, part=None):
    original = getattr(module, name)
    def call(*arguments, **options):
        before()
        begun = time.perf_counter()
        try:
            return original(*arguments, **options)
        finally:
            spent, of = time.perf_counter() - begun, part(arguments[0]) if part else name
            parts[of] = parts.get(of, 0) + spent
    setattr(module, name, call)
begun = time.perf_counter()
import kvpatch
from kvpatch import activation
parts["modules"] = time.perf_counter() - begun
def targets():
    for name in os.environ["BENCH_MODULES"].split():
        importlib.import_module(name)
timed(activation, "before_vllm")
timed(activation, "apply_features", targets)
def whose(first):
    rows = getattr(first, "patches", first)  # a feature, or its rows in this release
    on_host = any(row.id.startswith(("host_copies.", "host_device")) for row in rows)
    return "host_device" if on_host else "others"
timed(activation.gate, "check_feature", part=whose)
timed(activation.transaction, "apply_all", part=whose)
"""
WITH_PARTS = PARTS + IMPORTS + "print('\\n' + json.dumps(parts))"


def bare_environment(folder: Path, startup: bool) -> Path:
    """Make a virtual environment with nothing in it but, perhaps, kvpatch; return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/*/site-packages")
    if startup:
        for path in (ROOT / "kvpatch/startup").glob("kvpatch*"):
            shutil.copy(path, site)
        (site / "kvpatch").symlink_to(ROOT / "kvpatch")
    return folder / "bin/python"


def off(repetitions: int) -> dict[str, object]:
    """Time whole runs of ``python -c pass``, with and without the startup files in turns."""
    with tempfile.TemporaryDirectory() as folder:
        pythons = [
            bare_environment(Path(folder) / "bare", startup=False),
            bare_environment(Path(folder) / "stub", startup=True),
        ]
        differences = []
        for repetition in range(repetitions + 5):
            took = []
            for python in pythons:
                begun = time.perf_counter()
                command = [str(python), "-c", "pass"]
                os.waitpid(os.posix_spawn(python, command, clean_environment()), 0)
                took.append(time.perf_counter() - begun)
            if repetition >= 5:  # the first ones compile and fill caches
                differences.append(took[1] - took[0])
    added = statistics.median(differences)
    return {"repetitions": repetitions, "added_by_stub_ms": round(added * 1e3, 3)}


def target_modules() -> str:
    """Return the modules that kvpatch's targets live in, for what is installed."""
    release = supported.release_of(installed("vllm")[0])
    every = (patch for _, rows in patches.at(release) for patch in rows)
    names = {patch.target.partition(":")[0] for patch in every}
    there = {name for name in names if importlib.util.find_spec(name.partition(".")[0])}
    return " ".join(sorted(there))


def imported(code: str, environment: dict[str, str]) -> Any:
    """Run ``code`` in a process of its own and return what it printed last, as JSON."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def on(repetitions: int) -> dict[str, object]:
    """Time kvpatch's part of imports of vllm with kvcached."""
    with tempfile.TemporaryDirectory() as device:
        common = {
            "BENCH_ANYWAY": " ".join(ANYWAY),
            "BENCH_MODULES": target_modules(),
            "ENABLE_KVCACHED": "1",
            "KVCACHED_AUTOPATCH": "1",
        }
        folder = Path(device)
        standard = imported(STANDARD, on_host_device(folder, KVPATCH="0", **common))
        common["BENCH_ANYWAY"] = " ".join((*ANYWAY, *standard))
        own = []
        for repetition in range(repetitions + 1):
            spent = imported(WITH_PARTS, on_host_device(folder, **common))
            if repetition:
                of_features = spent["apply_features"] - spent["host_device"]
                own.append(spent["modules"] + spent["before_vllm"] + of_features)
            print(f"  {repetition} of {repetitions}", end="\r", file=sys.stderr, flush=True)
    return {"repetitions": repetitions, "added_ms": round(statistics.median(own) * 1e3, 3)}


def main() -> int:
    """Measure, print and write the result."""
    parser = console.parser("scripts/bench-startup", __doc__ or "")
    parser.add_argument("--off", type=int, default=400, help="repetitions (default: %(default)s)")
    parser.add_argument("--on", type=int, default=12, help="repetitions (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    command = f"scripts/bench-startup --off {arguments.off} --on {arguments.on}"
    result = provenance.header(command) | {
        "off": off(arguments.off),
        "on": on(arguments.on),
    }
    provenance.write(result, arguments.output)
    print(json.dumps(result, indent=1))
    return 0
