"""The part of the simulation that runs in a process with kvpatch in force."""

import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import processes
from harness.simulate import world as worlds
from harness.simulate.play import play


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Play seeds, and one of them twice more if the job asks for that."""
    worlds.install()
    world = job["steps"], job["model"], Path(job["folder"]), job["kind"]
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    for seed in range(job["seed"], job["seed"] + job["seeds"]):
        played = play(seed, *world)
        total.update(played.counts)
        kinds[played.mode.kind] += 1
        if played.what:
            failed.append(asdict(played))
            print(f"simulate seed {seed} ({played.mode}): {played.what}", flush=True)
    again = job.get("again")
    return {
        "kinds": dict(kinds),
        "counts": dict(total),
        "failed": failed,
        "replayed": None if again is None else play(again, *world) == play(again, *world),
    }


def mutate(job: dict[str, Any]) -> dict[str, str]:
    """Break one component at a time, and play seeds until the world has found each.

    Returns:
        What was found of each mutation, nothing of those that no seed found.
    """
    worlds.install()
    from harness.simulate.mutations import MUTATIONS

    pooled = job["kind"] in worlds.POOLED
    found = {
        name: "" for name, one in MUTATIONS.items() if (one.kinds[0] in worlds.POOLED) == pooled
    }
    for turn in range(job["seeds"]):
        for name in [name for name, what in found.items() if not what]:
            mutation = MUTATIONS[name]
            seed = job["seed"] + turn if turn else mutation.first
            kind = mutation.kinds[seed % len(mutation.kinds)]
            with mutation.force():
                played = play(seed, job["steps"], job["model"], Path(job["folder"]), kind)
            if played.what:
                found[name] = f"seed {seed} of {kind}: {played.what}"
                print(f"simulate mutation: {name}: {found[name]}", flush=True)
    return found


def main(function: str, folder: str) -> None:
    """Run one of these functions, in a fork; no thread of vLLM's is waited for."""
    processes.main(f"{__name__}:{function}", Path(folder))
    sys.stdout.flush()
    os._exit(0)
