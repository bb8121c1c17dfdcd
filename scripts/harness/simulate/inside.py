"""The part of the simulation that runs in a process with kvpatch in force."""

import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import processes
from harness.simulate import world as worlds
from harness.simulate.play import play


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Play seeds until one fails, the time is over, or there are no more."""
    worlds.install()
    begun, limit = time.monotonic(), job.get("seconds")
    world = job["steps"], job["model"], Path(job["folder"]), job["kind"]
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    operations = 0
    failed: list[dict[str, Any]] = []
    for seed in range(job["seed"], job["seed"] + job["seeds"]):
        if limit and time.monotonic() - begun > limit:
            break
        played = play(seed, *world)
        operations += played.operations
        total.update(played.counts)
        kinds[played.mode.kind] += 1
        if played.invariant is not None:
            failed.append(asdict(played))
            print(f"simulate seed {seed} ({played.mode}): {played.what}", flush=True)
            if not job.get("go_on"):
                break
    again = job.get("again")
    return {
        "seeds": sum(kinds.values()),
        "kinds": dict(kinds),
        "operations": operations,
        "counts": dict(total),
        "failed": failed,
        "replayed": None if again is None else play(again, *world) == play(again, *world),
    }


def mutate(job: dict[str, Any]) -> dict[str, Any]:
    """Break one component at a time, and play seeds until the world has found each.

    The job may name a seed to play first, by mutation: one that is known to find it.
    """
    worlds.install()
    from harness.simulate import mutations

    known = mutations.POOLED_MUTATIONS if job["kind"] in worlds.POOLED else mutations.MUTATIONS
    names = job.get("mutations") or list(known)
    found: dict[str, Any] = {
        name: {"component": known[name].component, "seed": None, "steps": 0} for name in names
    }
    first = job.get("first", {})
    for turn in range(job["seeds"]):
        for name in [name for name in names if found[name]["seed"] is None]:
            seed = first.get(name, job["seed"]) if turn == 0 else job["seed"] + turn
            mutation = known[name]
            kind = mutation.kinds[seed % len(mutation.kinds)]
            with mutation.force():
                played = play(seed, job["steps"], job["model"], Path(job["folder"]), kind)
            found[name]["steps"] += played.counts.get("steps", 0)
            if played.invariant is not None:
                found[name] |= {
                    "seed": seed,
                    "kind": kind,
                    "invariant": played.invariant,
                    "what": played.what,
                }
                print(f"simulate mutation: {name}: {found[name]}", flush=True)
    return found


def main(function: str, folder: str) -> None:
    """Run one of these functions, in a fork; no thread of vLLM's is waited for."""
    processes.main(f"{__name__}:{function}", Path(folder))
    sys.stdout.flush()
    os._exit(0)
