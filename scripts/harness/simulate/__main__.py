"""python -m harness.simulate: a seeded simulation, see ``harness.simulate``.

python -m harness.simulate --seed 7 --steps 300     one world, replayed by its number
python -m harness.simulate --seeds 100              seeds 1 to 100
python -m harness.simulate --minutes 10 --report docs/results/simulation.json
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import console, processes, provenance
from harness.model_cache import kept_model
from harness.simulate.invariants import INVARIANTS
from kvpatch.environ import HOST_POOL

STEPS = 200
MUTATION_SEEDS = 60  # within which a mutation is found; most are in the first few


def environment(folder: Path, kind: str | None = None) -> dict[str, str]:
    """Return the environment of a process with kvpatch in force and nothing that runs by itself.

    Args:
        folder: of the host device.
        kind: of its worlds; those with a host pool are in a process of their own.
    """
    return processes.on_host_device(
        folder,
        KVPATCH="1",
        KVCACHED_IPC_NAME=f"{folder.name}-pool",  # the default is of the group of processes
        KVPATCH_TIER_PATIENCE="10",
        KVCACHED_MAX_RESERVED_PAGES="1",
        KVCACHED_MIN_RESERVED_PAGES="0",
        KVCACHED_PAGE_PREALLOC_ENABLED="false",
        KVCACHED_LOG_LEVEL="CRITICAL",
        VLLM_LOGGING_LEVEL="CRITICAL",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        PYTHONHASHSEED="0",
        TORCHDYNAMO_DISABLE="1",  # as engines have it, whose fork server this shares
        **processes.ONE_THREAD,
        **({HOST_POOL.name: f"1MiB@simulated{os.getpid()}"} if "pooled" in (kind or "") else {}),
    )


def simulate(function: str = "run", **job: Any) -> dict[str, Any]:
    """Run a function of ``harness.simulate.inside`` in a process of its own."""
    model = str(kept_model(7, lambda text: None))
    defaults = {"seed": 1, "seeds": 1, "steps": STEPS, "kind": None, "model": model}
    # In memory: the files are small, and a machine's disk is no part of the simulation.
    with tempfile.TemporaryDirectory(prefix="kvpatch-simulate-", dir="/dev/shm") as name:
        folder = Path(name)
        return processes.call(
            f"harness.simulate.inside:{function}",
            defaults | job | {"folder": name},
            folder,
            environment(folder, job.get("kind")),
            follow="simulate ",
            fork=True,
        )


def main() -> int:
    """Run what the command line asks for; 0 when every invariant held."""
    parser = console.parser("python -m harness.simulate", __doc__ or "")
    parser.add_argument("--seed", type=int, help="the first seed, and the only one if given alone")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--steps", type=int, default=STEPS, help="operations of a world")
    parser.add_argument("--minutes", type=float, help="as many seeds as this takes")
    parser.add_argument(
        "--kind",
        help="offloading, tiers, eager or lazy; pooled, pooled eager or pooled lazy",
    )
    parser.add_argument("--go-on", action="store_true", help="after a seed that fails")
    parser.add_argument("--report", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--mutate", action="store_true", help="break each component once")
    parser.add_argument("--only", action="append", help="with --mutate: these mutations")
    options = parser.parse_args()
    return console.run(console.Screen("simulate"), lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Run the seeds and write the result."""
    asked = {"seed": options.seed or 1, "steps": options.steps, "kind": options.kind}
    if options.mutate:
        broken = simulate("mutate", seeds=options.seeds or 20, mutations=options.only, **asked)
        return int(any(one["seed"] is None for one in broken.values()))
    seconds = (options.minutes or 0) * 60
    with ThreadPoolExecutor() as pool:
        breaking = None
        if options.report:
            breaking = pool.submit(simulate, "mutate", seeds=MUTATION_SEEDS, seconds=seconds)
        found = simulate(
            seeds=options.seeds or (10**9 if options.minutes else 1),
            seconds=seconds,
            go_on=options.go_on or bool(options.report),
            **asked,
        )
        broken = breaking.result() if breaking is not None else {}
    for failed in found["failed"]:
        print("\n".join(failed["log"][-12:]))
        print(
            f"simulate: seed {failed['seed']}: {failed['what']}\nreplay: python -m "
            f"harness.simulate --seed {failed['seed']} --steps {options.steps}"
            + (f" --kind {options.kind}" if options.kind else "")
        )
    print(f"simulate: {found['seeds']} worlds, {found['operations']} operations, {found['counts']}")
    missed = [name for name, one in broken.items() if one["seed"] is None]
    if options.report:
        write(options, found, broken)
    return int(bool(found["failed"] or missed))


def write(options: argparse.Namespace, found: dict[str, Any], broken: dict[str, Any]) -> None:
    """Write the result file."""
    command = f"python -m harness.simulate --minutes {options.minutes:g} --steps {options.steps}"
    head = provenance.header(f"{command} --report {options.report}")
    violated = Counter(one["invariant"] for one in found["failed"])
    held = {name: {"what": what, "violations": violated[name]} for name, what in INVARIANTS.items()}
    result = {
        "seeds": [1, found["seeds"]],
        "operations": found["operations"],
        "engine_steps": found["counts"]["steps"],
        "seconds": found["seconds"],
        "worlds": found["kinds"],
        "happened": found["counts"],
        "invariants": held,
        "failed": [
            {key: one[key] for key in ("seed", "invariant", "what")} for one in found["failed"]
        ],
        "mutations": broken,
    }
    provenance.write(head | result, options.report)


if __name__ == "__main__":
    sys.exit(main())
