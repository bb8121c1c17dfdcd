"""scripts/gpu: the stages that need a GPU, with vLLM, kvcached and kvpatch installed for it.

    scripts/gpu                       all stages; with the Python that has vLLM
    scripts/gpu roundtrips copies     some
    scripts/gpu --dry                 roundtrips and copies on the host device, small

Each stage writes gpu-STAGE.json when it ends; scripts/docs renders those in docs/results.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from harness import console, processes, provenance
from harness.gpu import arms

STAGES = ("roundtrips", "copies", "arms")
SKIPPED = """\
skipped: this machine has no NVIDIA GPU. The stages copy between real GPU memory and the
host; scripts/gpu --dry runs them on the host device."""


def has_gpu() -> bool:
    """Return whether the driver lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "GPU " in listed.stdout


def measure(stage: str, dry: bool, folder: Path, output: Path) -> bool:
    """Run a stage in both layouts and write its result; return whether every row was right."""
    rows: list[dict[str, Any]] = []
    device = ""
    for contiguous in ("true", "false"):
        print(f"{stage}, contiguous layout: {contiguous}", flush=True)
        own = {"KVPATCH": "1", "KVCACHED_CONTIGUOUS_LAYOUT": contiguous}
        environment = (
            processes.on_host_device(folder, **own) if dry else arms.engine_environment(**own)
        )
        job = {"stage": stage, "dry": dry}
        # kvcached's threads do not end.
        found = processes.call(
            "harness.gpu.stages:run", job, folder, environment, wait_for_threads=False
        )
        device = found["device"]
        rows += found["rows"]
    provenance.write(provenance.header(f"scripts/gpu {stage}", device) | {"rows": rows}, output)
    for row in rows:
        print(json.dumps(row), flush=True)
    return not any(wrong(row) for row in rows)


def wrong(row: dict[str, Any]) -> bool:
    """Return whether a row of the round trips shows wrong bytes or wrong unmapping."""
    mapped = row.get("mapped_bytes")
    if mapped and not mapped["after"] < mapped["under the copy"] == mapped["before"]:
        return True
    return bool(row.get("equal", 0) != row.get("blocks", 0))


def run(options: argparse.Namespace) -> int:
    """Run the chosen stages; return 1 when one showed wrong bytes."""
    right = True
    with tempfile.TemporaryDirectory(prefix="kvpatch-gpu-") as name:
        for stage in options.stages or STAGES[: 2 if options.dry else 3]:
            output = options.output / f"gpu-{stage}.json"
            if stage == "arms":
                arms.run(options.repeats, Path(name), output)
            else:
                right &= measure(stage, options.dry, Path(name), output)
    return int(not right)


def main() -> int:
    """Run the command line."""
    parser = console.parser("scripts/gpu", __doc__ or "")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--dry", action="store_true", help="on the host device, small")
    parser.add_argument("--repeats", type=int, default=5, help="of the arms (default: 5)")
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), metavar="DIR")
    options = parser.parse_args()
    for stage in options.stages:
        if stage not in STAGES[: 2 if options.dry else 3]:
            parser.error(f"{stage} is not one of {', '.join(STAGES)}, or not of a dry run")
    if not options.dry and not has_gpu():
        print(SKIPPED)
        return 0
    console.make_folders(parser, options.output)
    return console.run(console.Screen("gpu"), lambda: run(options))
