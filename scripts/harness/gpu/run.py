"""``scripts/gpu run``: every step in a process of its own, within its limit, its result at once.

A step that fails, ends or hangs is a row like others; what it had seen by then is in its file.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import processes, provenance
from harness.gpu import seen, steps, unpack

SETTLE = 20.0  # seconds in which a step that is asked to end may clear up
# Every engine of the host device runs on one core.
SLOWER = 4
_PR_SET_CHILD_SUBREAPER = 36
Say = Callable[[str], None]


def main(options: argparse.Namespace, say: Say) -> int:
    """Run the steps; return 1 if something was wrong, 3 if not everything was seen."""
    pythons = options.python or ([] if options.host else unpack.environments(options.kit))
    pythons = [path.absolute() for path in pythons or [Path(sys.executable)]]
    try:
        every = steps.of(len(pythons))
        wanted = steps.chosen(every, options.steps) if options.steps else every
        seen.arguments(options.words)
        for path in pythons:
            if not path.exists():
                raise ValueError(f"there is no {path}")
    except ValueError as error:
        print(f"scripts/gpu run: {error}", file=sys.stderr)
        return 2
    if options.list:
        for step in wanted:
            print(f"{step.name:13} {step.asks}{' (needs CUDA)' if step.cuda else ''}")
        return 0
    gpu = "none" if options.host else device()
    if gpu is None:
        print("scripts/gpu run: no NVIDIA GPU here; --host runs on the host device")
        return 3
    output = options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    head = provenance.header("scripts/gpu run", gpu)
    rows: list[dict[str, Any]] = []
    for step in wanted:
        job = seen.Job(
            step.name, str(output), options.host, options.model, options.tier_gib, options.words
        )
        row: dict[str, Any] = {"step": step.name, "asks": step.asks}
        if step.cuda and options.host:
            row |= {"state": seen.NEEDS_CUDA, "seconds": 0}
        else:
            limit = options.seconds or step.seconds * (SLOWER if options.host else 1)
            say(f"{step.name}: {step.asks}? (at most {limit:.0f} s)")
            row |= one(step, job, pythons[step.python], limit)
        rows.append(row)
        say(line(row))
        provenance.write(head | together(rows), output / "gpu.json")
    print("\n".join(line(row) for row in rows))
    say(f"results: {output / 'gpu.json'}")
    states = [row["state"] for row in rows]
    return 1 if seen.WRONG in states else 3 if seen.UNSEEN in states else 0


def one(step: steps.Step, job: seen.Job, python: Path, limit: float) -> dict[str, Any]:
    """Run one step, and end every process that it leaves; return its row."""
    job.path.unlink(missing_ok=True)
    asked = job.logs() / f"{step.name}.job.json"
    asked.write_text(json.dumps(asdict(job)))
    begun = time.monotonic()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    log = job.logs() / f"{step.name}.log"
    command = [str(python), "-m", "harness.gpu.step", step.function, str(asked)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            # Not the checkout's, whose kvpatch an engine would find before the installed one.
            cwd=job.logs(),
            env=processes.with_harness(KVPATCH="0"),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    ended = ""
    try:
        status = process.wait(limit)
        ended = "" if status == 0 else f"ended with status {status}: {last(log)}"
    except subprocess.TimeoutExpired:
        ended = f"not ended within {limit:.0f} s: {last(log)}"
    finally:
        end(process)
    content: dict[str, Any] = {"right": [], "wrong": [], "missing": [], "facts": {}}
    with suppress(OSError, ValueError):
        content = json.loads(job.path.read_text())
    if ended:
        content["missing"].append(ended)
    took = {"state": seen.state(content), "seconds": round(time.monotonic() - begun)}
    provenance.write(took | content, job.path)
    return took | content


def end(process: subprocess.Popen[bytes]) -> None:
    """End a step with all its descendants, in their own ways first."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SETTLE)
    # Those of a step that is gone are children of this process now.
    while left := list(descendants(os.getpid())):
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    process.poll()


def descendants(root: int) -> Iterator[int]:
    """Yield the processes below one, without psutil."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it may end meanwhile
                # The name before it may have spaces and parentheses.
                state = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(state[1])
    for pid, parent in parents.items():
        while parent not in (root, 0):
            parent = parents.get(parent, 0)
        if parent == root:
            yield pid


def last(log: Path) -> str:
    """Return the last line of a log."""
    lines = [one for one in log.read_text(errors="replace").splitlines() if one.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def together(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what pages are rendered from: verdicts of ``kvpatch verify``, copies, and rows."""
    facts = [row.get("facts", {}) for row in rows]
    return {
        # One that did not start has no combination, and is a row.
        "verdicts": [one["verdict"] for one in facts if one.get("verdict", {}).get("combination")],
        "rows": [copy for one in facts for copy in one.get("copies", ())],
        "steps": rows,
    }


def line(row: dict[str, Any]) -> str:
    """Return a row for the terminal."""
    words = [*row.get("wrong", ()), *row.get("missing", ())][:1] or [
        f"{len(row.get('right', ()))} compared"
    ]
    said = "" if row["state"] == seen.NEEDS_CUDA else f", {row['seconds']} s: {words[0]}"
    return f"{row['step']:13} {row['state']}{said}"


def device() -> str | None:
    """Return the name of the first GPU and its driver's version; None where there is none."""
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(OSError):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    # A container may have the device without its tools.
    return "NVIDIA, of a name that is not known" if Path("/dev/nvidiactl").exists() else None
