"""What of ``scripts/gpu run`` is known to work before a machine with a GPU is there."""

import json
import subprocess
import sys

from harness import ROOT
from harness.gpu.steps import STEPS


def test_the_first_gpu_minutes_run_on_the_host_device(tmp_path):
    options = ["--host", "--tier-gib", "0.5", "--output", tmp_path]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gpu", "run", *options, "--", "--seed=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3000,
        check=False,
    )
    logs = sorted((tmp_path / "logs").glob("*.log"))
    said = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
    assert done.returncode == 0, done.stdout + said
    found = json.loads((tmp_path / "gpu.json").read_text())
    states = {row["step"]: row["state"] for row in found["steps"]}
    assert states == {one.name: "needs CUDA" if one.cuda else "right" for one in STEPS}
    assert [one["verdict"] for one in found["verdicts"]] == ["right", "right"]
    assert all("--seed=0" in one["command"] for one in found["verdicts"])
    assert {row["direction"] for row in found["rows"]} == {"store", "load"}
    assert all(row["gb_per_second"] > 0 for row in found["rows"])
