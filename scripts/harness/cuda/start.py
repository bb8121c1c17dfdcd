"""Starts of vLLM's CUDA builds, as far as they come without a GPU.

vLLM detects the GPU of a driver that can use none, kvcached's patches and kvpatch's are applied,
and every combination of the matrix is configured: it must be accepted or refused as ``kvpatch
matrix`` says. Then a worker initialises its device, where CUDA itself says what is missing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness import ROOT, connectors, console, provenance
from harness.cuda import environment
from harness.engines.runs import Run, engine_arguments, model_of, weights_of
from harness.matrix import axes, cells, derive
from kvpatch.matrix.verdicts import LAYOUTS, NONE, Cell

RESULT = ROOT / "docs/results/gpu-start.json"
INSIDE = Path(__file__).with_name("inside.py")
GIB = 1 << 30
LIMIT = 900  # seconds of all jobs of a process
SMALL: dict[str, Any] = {"max_model_len": 2048, "enforce_eager": True}
# What is refused on a GPU only: by code, the changes to an engine with OffloadingConnector.
ON_A_GPU: dict[str, dict[str, Any]] = {
    "KVP339": {"engine": {"kv_transfer_config": connectors.simple(600 * GIB, lazy=False)}},
    "KVP341": {"engine": {"enable_sleep_mode": True}},
    "KVP344": {"environment": {"KVPATCH_HOST_POOL": "2GiB"}},
    "KVP374": {"engine": {"data_parallel_size": 2}},
}
_REFUSED_BY_VLLM = "validation error for VllmConfig"
# What only engines on a CPU have, in the arguments of the harness's runs.
_OF_CPU = ("attention_backend", "compilation_config")

SHOWN = ("vllm", "torch", "platform", "kernels", "failed")  # of a start
Job = dict[str, Any]


def job(folder: Path, step: str = "configuration", **changes: Job) -> Job:
    """Return a job: an engine with OffloadingConnector and a tier of 1 GiB, and what it is to do.

    Args:
        step: the name of a function of ``inside``.
        changes: to its ``engine`` and ``environment``.
    """
    engine = SMALL | {"kv_transfer_config": connectors.offloading(GIB)}
    return {
        "model": str(model_of("llama")),
        "engine": engine | changes.get("engine", {}),
        "environment": changes.get("environment", {}),
        "folder": str(folder),
        "step": step,
    }


def of_cell(cell: Cell, folder: Path) -> Job:
    """Return the job that configures a cell of the matrix, as its engine on a CPU is."""
    run = run_of(cell, folder)
    engine = {name: of for name, of in engine_arguments(run).items() if name not in _OF_CPU}
    if cell.model == "hybrid":
        engine["dtype"] = "bfloat16"
    made = job(folder)
    made["model"] = str(weights_of(run))
    made["engine"] = engine
    runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(cell.runner == "V2"))}
    made["environment"] = dict(run.environment) | runner
    return made


def run_of(cell: Cell, folder: Path) -> Run:
    """Return what the engine of a cell is, without what it is asked."""
    changes = cells.changes(cell) | cells.trial_of(cell).changes
    if cell.connector == "Multi":
        changes |= {"inside": (cells.OWN[0],)}
    if cell.connector == "tiering fs":
        changes |= {"tiers": (str(folder / "disk"),)}
    kind = cells.MODELS[cell.model]
    run = Run(vllm=cell.vllm, runner=cell.runner.lower(), **{"model": kind, **changes})
    return cells.with_chunks(cells.of_kind(run, kind), cell)


def started(
    version: str, jobs: dict[str, Job], folder: Path, driver: bool = True, **changes: str
) -> dict[str, Any]:
    """Import a release with kvpatch in one process, and run jobs in forks of it.

    Returns:
        ``log``, and unless it ended early ``start`` and ``jobs``, as ``inside`` has written them.
    """
    python = environment.made(version)
    changes = {"LD_LIBRARY_PATH": str(environment.driver_of(version)) if driver else ""} | changes
    given = environment.variables(version, folder, **changes)
    found, log = environment.through(INSIDE, jobs, python, given, LIMIT)
    return {**found, "log": log}


def representatives(version: str) -> list[Cell]:
    """Return the cells of a release that start on a GPU, or are refused there.

    All without a feature, and those with one in one layout and on one runner.
    """
    every = [cell for cell in axes.cells(version) if derive.missing(cell) is None]
    runner = max(cell.runner for cell in every)
    return [
        cell
        for cell in every
        if axes.feature_of(cell).device != "cpu"
        and (cell.feature == NONE or (cell.layout, cell.runner) == (LAYOUTS[0], runner))
    ]


def said_of(cell: Cell) -> str:
    """Return what a process says of a cell, as the matrix has it."""
    refused = derive.refusal(cell)
    if refused is None:
        return cell.runner
    own = json.loads((weights_of(run_of(cell, Path())) / "config.json").read_text())
    (architecture,) = own["architectures"]
    sentence = str(refused).replace(axes.model_of(cell).architecture, architecture)
    return f"kvpatch.refusal.Refusal: {sentence}"


def differing(version: str, folder: Path, chosen: Sequence[Cell]) -> dict[str, str]:
    """Configure cells of a release; return those that start or are refused as nobody has said.

    Args:
        folder: for the jobs. A process has one layout, and so there are two.

    Returns:
        By the name of the cell, what the matrix says and what was seen.
    """
    wrong = {}
    for layout, contiguous in cells.LAYOUTS.items():
        of_layout = {repr(cell): cell for cell in chosen if cell.layout == layout}
        found = started(
            version,
            {name: of_cell(cell, folder) for name, cell in of_layout.items()},
            folder,
            KVCACHED_CONTIGUOUS_LAYOUT=str(contiguous).lower(),
            KVPATCH_STAND_IN_GPUS="4",
        )
        for name, cell in of_layout.items():
            job_of = found["jobs"][name]
            seen, said = job_of.get("reached", job_of.get("ended")), said_of(cell)
            # vLLM may refuse itself, and first, what the matrix has as refused.
            refused_first = said != cell.runner and _REFUSED_BY_VLLM in seen
            if seen != said and not refused_first:
                wrong[name] = f"{said}\n  but: {seen}"
    return wrong


def looked_at(version: str, folder: Path) -> dict[str, Any]:
    """Start a release; return its row of the result file."""
    found = started(version, {"device": job(folder, "device")}, folder)
    if "jobs" not in found:
        return {"vllm": version, "ended": found["log"].rstrip().splitlines()[-1]}
    chosen = representatives(version)
    refused = [cell for cell in chosen if derive.refusal(cell)]
    return {
        **{name: found["start"][name] for name in SHOWN},
        "patches": len(found["patches"]),
        "device": found["jobs"]["device"].get("ended", ""),
        "accepted": len(chosen) - len(refused),
        "refused": len(refused),
        "differing": differing(version, folder, chosen),
    }


def main() -> int:
    """Look at releases and record each at once; 1 where one is not as the matrix says."""
    parser = console.parser("python -m harness.cuda.start", __doc__ or "")
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="of vLLM")
    wrong = False
    for version in parser.parse_args().releases:
        with tempfile.TemporaryDirectory() as folder:
            row = looked_at(version, Path(folder))
        print(json.dumps(row, indent=1), flush=True)
        wrong |= "ended" in row or bool(row["differing"])
        earlier = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
        rows = {one["vllm"]: one for one in [*earlier, row]}
        in_order = sorted(rows.values(), key=lambda one: Version(one["vllm"]))
        head = provenance.header("python -m harness.cuda.start RELEASE...")
        provenance.write(head | {"rows": in_order}, RESULT)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
