"""``scripts/bench profile``: an engine's steps and a large transfer, sampled by py-spy.

Each runs in a process that py-spy starts, which it may then sample without more rights.
Samples are of all threads; those below the profiled function count.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import console, provenance, venvs
from harness.bench.options import RESULTS
from harness.bench.profiled import TRANSFER, steps, transfers
from harness.bench.sizes import KV_HEADS
from harness.model_cache import kept_model
from harness.processes import on_host_device

RATE = 200  # samples per second
OURS = "kvpatch/"

# What runs, the function whose samples count, and a description.
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
    """Run a function of ``profiled`` under py-spy and return the samples.

    Raises:
        SystemExit: it failed, or py-spy did.
    """
    samples = folder / f"{run.__name__}.folded"
    inner = [sys.executable, "-m", "harness.bench.profiled", run.__name__, str(model)]
    spy = ["py-spy", "record", "--format", "raw", "--rate", str(RATE), "--threads"]
    spy += ["--nonblocking", "--output", str(samples), "--"]
    environment = on_host_device(
        folder, KVPATCH="1" if run is steps else "0", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    done = subprocess.run(
        [*spy, *inner, str(seconds)],
        env=venvs.with_bench_tools(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if not samples.exists():
        sys.exit(f"py-spy ended {done.returncode}:\n{done.stdout[-3000:]}")
    return samples.read_text()


def stacks(text: str, inside: str) -> list[tuple[list[str], int]]:
    """Return the stacks below the function ``inside``, and how often each was seen.

    Args:
        text: what py-spy wrote.
        inside: a part of the frame that the stacks are to go through.
    """
    found = []
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        at = next((at for at, frame in enumerate(frames) if inside in frame), None)
        if at is not None:
            found.append((frames[at:], int(count)))
    return found


def shortened(frame: str) -> str:
    """Return a frame as a reader wants it: function and file, without a folder of ours.

    py-spy writes ``function (path/file.py:line)``.
    """
    name, _, place = frame.partition(" (")
    path = place.rstrip(")").rpartition(":")[0] or place.rstrip(")")
    for root in ("site-packages/", OURS):
        if root in path:
            kept = path[path.rindex(root) :]
            return f"{name} ({kept.removeprefix('site-packages/')})"
    return f"{name} ({path.rpartition('/')[2]})" if path else name


def _ours(frame: str) -> bool:
    return "(kvpatch/" in shortened(frame)


def profile(name: str, what: str, found: list[tuple[list[str], int]], top: int = 12) -> Any:
    """Return what stacks show, as a result file holds it.

    Raises:
        ValueError: there is not one sample.
    """
    samples = sum(count for _, count in found)
    if not samples:
        raise ValueError(f"no sample of {name}")
    itself: Counter[str] = Counter()
    ours = ours_itself = 0
    for frames, count in found:
        itself[shortened(frames[-1])] += count
        ours += count if any(_ours(frame) for frame in frames) else 0
        ours_itself += count if _ours(frames[-1]) else 0
    return {
        "name": name,
        "what": what,
        "samples": samples,
        "kvpatch_share": round(ours / samples, 4),
        "kvpatch_self_share": round(ours_itself / samples, 4),
        "top": [[frame, round(count / samples, 4)] for frame, count in itself.most_common(top)],
    }


def main(arguments: list[str]) -> int:
    """Profile and write the result file."""
    parser = console.parser("scripts/bench profile", __doc__ or "")
    parser.add_argument("--seconds", type=float, default=30, help="of each (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "profile.json", metavar="FILE")
    chosen = parser.parse_args(arguments)

    screen = console.Screen("bench")
    head = provenance.header(" ".join(["scripts/bench profile", *arguments]))
    model = kept_model(7, screen.say, KV_HEADS)
    found, samples = [], {}
    with tempfile.TemporaryDirectory(prefix="kvpatch-bench-") as folder:
        for name, (run, inside, what) in PROFILES.items():
            if run not in samples:
                screen.say(f"{run.__name__}: {chosen.seconds:.0f} s under py-spy")
                samples[run] = record(run, model, Path(folder), chosen.seconds)
            found.append(profile(name, what, stacks(samples[run], inside)))
            screen.say(f"{name}: {found[-1]['samples']} samples")
    screen.close()
    provenance.write({**head, "profiles": found}, chosen.output)
    print(f"written to {chosen.output}")
    return 0
