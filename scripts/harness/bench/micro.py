"""``scripts/bench micro``: what grows with an installation, timed by pytest-benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, console, provenance, venvs
from harness.bench.options import SCRATCH

LANE = ROOT / "tests/bench"


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of pytest-benchmark's report, in the form of a result file.

    Raises:
        ValueError: a test has no name, size or unit.
    """
    found = []
    for one in report["benchmarks"]:
        about, stats = one["extra_info"], one["stats"]
        if not {"name", "many", "of"} <= about.keys():
            raise ValueError(f"{one['name']} does not say what it timed")
        found.append(
            {
                **{key: about[key] for key in ("name", "many", "of")},
                "median_s": stats["median"],
                "least_s": stats["min"],
                "rounds": stats["rounds"],
            }
        )
    return sorted(found, key=lambda row: (row["name"], row["many"]))


def main(arguments: list[str]) -> int:
    """Time the parts and write the result file."""
    parser = console.parser("scripts/bench micro", __doc__ or "")
    parser.add_argument("--output", type=Path, default=SCRATCH / "micro.json", metavar="FILE")
    parser.add_argument("-k", dest="only", default="", help="as pytest's -k")
    chosen = parser.parse_args(arguments)
    head = provenance.header(" ".join(["scripts/bench micro", *arguments]))
    with tempfile.TemporaryDirectory(prefix="kvpatch-bench-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", str(LANE), "-q", "-k", chosen.only]
        command += ["-p", "no:xdist", "-p", "no:cacheprovider", f"--benchmark-json={report}"]
        # At least so many rounds, and no more than a second for each size.
        command += ["--benchmark-min-rounds=20", "--benchmark-max-time=0.5"]
        command += ["--benchmark-warmup=on", "--benchmark-disable-gc"]
        done = subprocess.run(command, cwd=ROOT, env=venvs.with_bench_tools(), check=False)
        if done.returncode:
            return done.returncode
        found = rows(json.loads(report.read_text()))
    provenance.write({**head, "rows": found}, chosen.output)
    print(f"written to {chosen.output}")
    return 0
