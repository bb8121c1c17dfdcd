"""The part of the simulation that runs in a process with kvpatch in force."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.simulate import world as worlds
from harness.simulate.play import play


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Play seeds until one fails, the time is over, or there are no more."""
    worlds.install()
    begun = time.monotonic()
    seeds = range(job["seed"], job["seed"] + job["seeds"])
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    operations = 0
    failed: list[dict[str, Any]] = []
    for seed in seeds:
        if job["seconds"] and time.monotonic() - begun > job["seconds"]:
            break
        played = play(seed, job["steps"], job["model"], Path(job["folder"]), job["kind"])
        operations += played.operations
        total.update(played.counts)
        kinds[played.mode.kind] += 1
        if played.invariant is not None:
            failed.append(asdict(played))
            print(f"simulate seed {seed} ({played.mode}): {played.what}", flush=True)
            if not job["go_on"]:
                break
    again = job["again"]
    replayed = None
    if again is not None:
        arguments = again, job["steps"], job["model"], Path(job["folder"]), job["kind"]
        replayed = play(*arguments) == play(*arguments)
    return {
        "seeds": sum(kinds.values()),
        "kinds": dict(kinds),
        "operations": operations,
        "counts": dict(total),
        "seconds": round(time.monotonic() - begun, 1),
        "failed": failed,
        "replayed": replayed,
    }


def mutate(job: dict[str, Any]) -> dict[str, Any]:
    """Break one component at a time, and play seeds until the world has found each."""
    worlds.install()
    from harness.simulate.mutations import MUTATIONS

    begun = time.monotonic()
    names = job["mutations"] or list(MUTATIONS)
    found: dict[str, Any] = {
        name: {"component": MUTATIONS[name].component, "seed": None, "steps": 0} for name in names
    }
    for seed in range(job["seed"], job["seed"] + job["seeds"]):
        for name in [name for name in names if found[name]["seed"] is None]:
            if job["seconds"] and time.monotonic() - begun > job["seconds"]:
                return found
            mutation = MUTATIONS[name]
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


def explore(job: dict[str, Any]) -> dict[str, Any]:
    """Let hypothesis choose the operations."""
    worlds.install()
    from harness.simulate import machine

    return machine.explore(
        job["seed"],
        job["seeds"],
        job["steps"],
        job["model"],
        Path(job["folder"]),
        job["kind"],
    )
