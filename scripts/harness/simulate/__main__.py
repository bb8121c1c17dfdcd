"""python -m harness.simulate: a seeded simulation, see ``harness.simulate``.

python -m harness.simulate --seed 7 --kind eager    one world, replayed by its number
python -m harness.simulate --seeds 100              seeds 1 to 100
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import console, processes
from harness.model_cache import kept_model
from kvpatch.environ import HOST_POOL

STEPS = 200


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
    parser.add_argument("--seed", type=int, default=1, help="the first (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="operations of a world (default: %(default)s)"
    )
    parser.add_argument(
        "--kind",
        help="offloading, tiers, eager or lazy; pooled, pooled eager or pooled lazy",
    )
    options = parser.parse_args()
    return console.run(console.Screen("simulate"), lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Run the seeds."""
    found = simulate(**vars(options))
    for failed in found["failed"]:
        print("\n".join(failed["log"][-12:]))
        print(f"simulate: seed {failed['seed']}: {failed['what']}")
    print(f"simulate: {found['kinds']}, {found['counts']}")
    return int(bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
