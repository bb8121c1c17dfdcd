"""``scripts/bench profile``: a scheduler's steps and a large transfer, looked at by py-spy.

Each runs in a process of its own that py-spy starts, so that it may look into it without
more rights. The samples are of all threads; only those below the function that is meant
are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness.bench import folded, provenance
from harness.bench.options import RESULTS, ROOT
from harness.bench.profiled import TRANSFER, steps, transfers
from harness.bench.sizes import KV_HEADS

SCRIPTS = ROOT / "scripts"
RATE = 200  # samples a second


# What is run, what py-spy is to count, and what it is.
PROFILES: dict[str, tuple[Callable[[str, float], None], str, str]] = {
    "a step of the engine": (
        steps,
        "step (vllm/v1/engine/core.py",
        "Prompts that are stored, evicted, loaded and freed all the time, on elastic memory with "
        "OffloadingConnector; model included.",
    ),
    "the scheduler's part of a step": (
        steps,
        "schedule (vllm/v1/core/sched/scheduler.py",
        "The same, of `Scheduler.schedule` alone.",
    ),
    "a large transfer": (
        transfers,
        "back_and_forth (",
        f"{TRANSFER:,} blocks stored and loaded on the host device, by the thread that submits.",
    ),
}


def record(run: Callable[[str, float], None], model: Path, folder: Path, seconds: float) -> str:
    """Run something under py-spy and return its samples.

    Raises:
        SystemExit: it failed, or py-spy did.
    """
    samples = folder / f"{run.__name__}.folded"
    inner = [sys.executable, "-m", "bench_lib.profiled"]
    spy = ["py-spy", "record", "--format", "raw", "--rate", str(RATE), "--threads"]
    spy += ["--nonblocking", "--output", str(samples), "--"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVPATCH", "KVCACHED", "ENABLE_KVCACHED", "VLLM"))
    } | {
        "KVPATCH": "1" if run is steps else "0",
        "KVPATCH_HOST_DEVICE": "1GiB",
        "KVPATCH_HOST_DEVICE_DIR": str(folder),
        "KVPATCH_STATUS_DIR": str(folder),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(
        [*spy, *inner, run.__name__, str(model), str(seconds)],
        cwd=SCRIPTS,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if not samples.exists():
        sys.exit(f"py-spy ended {done.returncode}:\n{done.stdout[-3000:]}")
    return samples.read_text()


def main(arguments: list[str]) -> int:
    """Profile, print what was on top, and write it down."""
    parser = argparse.ArgumentParser(prog="scripts/bench profile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="of each (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "profile.json", metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep py-spy's samples there")
    chosen = parser.parse_args(arguments)

    from harness.model_cache import kept_model
    from harness.console import Screen

    screen = Screen("bench")
    head = provenance.header(" ".join(["scripts/bench profile", *arguments]), ROOT)
    model = kept_model(7, screen, KV_HEADS)
    found, samples = [], {}
    with tempfile.TemporaryDirectory(prefix="kvpatch-bench-") as folder:
        for name, (run, inside, what) in PROFILES.items():
            if run not in samples:
                screen.say(f"{run.__name__}: {chosen.seconds:.0f} s under py-spy")
                samples[run] = record(run, model, Path(folder), chosen.seconds)
                if chosen.keep:
                    chosen.keep.mkdir(parents=True, exist_ok=True)
                    (chosen.keep / f"{run.__name__}.folded").write_text(samples[run])
            found.append(folded.profile(name, what, folded.stacks(samples[run], inside)))
            screen.say(f"{name}: {found[-1]['samples']} samples")
    screen.close()
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps({**head, "profiles": found}, indent=1) + "\n")
    print(f"written to {chosen.output}")
    return 0
