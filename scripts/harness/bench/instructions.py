"""Instructions of the paths that every step takes: scripts/bench instructions [--check].

Seconds drown in noise, and a thread's time too; instructions are the same in every run, so that two
hundredths more are seen. Valgrind counts those of a process that walks a path so many times, and of
one that walks it twice as often. Nothing of vLLM is imported.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import wrapt

from harness import ROOT, console, provenance
from kvpatch import state
from kvpatch.patches.deadlock import around_schedule
from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import Fenced, around_build
from kvpatch.patches.simple_offload.eviction import EvictionOrder
from kvpatch.refusal_report import guard

RESULT = ROOT / "docs/results/instructions.json"
TIMES = 2000
MORE = 0.02  # of a path's instructions, which is a regression
PAGE = 32  # blocks


def _fence() -> tuple[Fence, Any]:
    """A fence with the transfers of a hundred requests in flight, and the connector's scheduler."""
    made = Fence(lambda page: (page * PAGE, (page + 1) * PAGE), workers=1)
    made.plan([(n, Transfer(f"r{n}", tuple(range(128 * n, 128 * n + 128)))) for n in range(100)], 0)
    manager = SimpleNamespace(capture_physical_release_marker=lambda: 1)
    planner = SimpleNamespace()
    state.attach(planner, Fenced(made, manager, scheduler=None))
    return made, planner


def transfer() -> Callable[[], Any]:
    """A store of 16 blocks is planned by a step, and ends."""
    made, planner = _fence()
    jobs, blocks = count(1000), list(range(16))

    def build(*_: Any) -> Any:
        spec = SimpleNamespace(block_ids=blocks)
        return SimpleNamespace(
            store_jobs={next(jobs): SimpleNamespace(req_id="r", src_spec=spec)}, load_jobs={}
        )

    def walk() -> None:
        meta = around_build(build, planner, (planner,), {})
        made.report(next(iter(meta.store_jobs)), 1)

    return walk


def release() -> Callable[[], Any]:
    """Four freed pages are looked at, of which transfers hold two."""
    made, _ = _fence()
    retired = [(1, [0, 1, 1000, 1001])]
    return lambda: made.split(retired, can_plan=True)


def walk_of_lazy_mode() -> Callable[[], Any]:
    """A step of SimpleCPUOffloadConnector looks at what is evicted next, 128 blocks of 10,000."""
    blocks = {
        number: SimpleNamespace(block_id=number, block_hash=number, ref_cnt=0, is_null=False)
        for number in range(1, 10_001)
    }
    full = SimpleNamespace(available_size=lambda: 0)
    pool = SimpleNamespace(_evictable_blocks=blocks, max_cached_blocks=-1, kv_cache_manager=full)
    holds = SimpleNamespace(get_one_block=lambda _: None)
    planner = SimpleNamespace(
        _target_free=128,
        cp_world_size=1,
        cpu_kv_cache_config=SimpleNamespace(kv_cache_groups=[]),
        cpu_block_pool=SimpleNamespace(blocks=[], cached_block_hash_to_block=holds),
        _store_event_to_blocks={},
    )
    order = EvictionOrder(planner, pool)
    return lambda: sum(1 for _ in islice(order.iter_blocks_after(None), 128))


def scheduled() -> Callable[[], Any]:
    """The scheduler has something to run: nothing can be deadlocked."""
    ran = SimpleNamespace(total_num_scheduled_tokens=1)
    scheduler = SimpleNamespace(requests={}, waiting=[], running=[1])
    return lambda: around_schedule(lambda: ran, scheduler, (), {})


def a_patched_call() -> Callable[[], Any]:
    """A wrapper that calls what it wraps, with the guard that reports refusals."""
    wrapper = guard(lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    called: Callable[[], Any] = wrapt.FunctionWrapper(lambda: None, wrapper)
    return called


PATHS = {
    made.__name__: made
    for made in (transfer, release, walk_of_lazy_mode, scheduled, a_patched_call)
}


def counted(path: str, times: int) -> int:
    """Return the instructions of a process that walks a path so many times.

    Raises:
        HarnessError: valgrind did not count them.
    """
    tool = shutil.which("valgrind")
    if tool is None:
        raise console.HarnessError("valgrind is not installed; it is in every distribution")
    words = [tool, "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    done = subprocess.run(
        [*words, sys.executable, "-m", __name__, path, str(times)],
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONMALLOC": "pymalloc"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode or not found:
        raise console.HarnessError(f"{path} was not counted: {done.stderr[-500:]}")
    return int(found[1].replace(",", ""))


def main(arguments: list[str]) -> int:
    """Count every path, and write or check the result; return the exit status."""
    parser = argparse.ArgumentParser("scripts/bench instructions", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the result; 1 if more")
    check = parser.parse_args(arguments).check
    before = json.loads(RESULT.read_text())["instructions"] if check else {}
    head = provenance.header("scripts/bench instructions")
    found = {}
    for name in PATHS:
        found[name] = round((counted(name, 2 * TIMES) - counted(name, TIMES)) / TIMES)
        known = f", {found[name] / before[name] - 1:+.1%}" if name in before else ""
        print(f"{name}: {found[name]:,}{known}", flush=True)
    if check:
        return int(any(found[name] > before[name] * (1 + MORE) for name in before))
    provenance.write({**head, "instructions": found}, RESULT)
    return 0


if __name__ == "__main__":
    step = PATHS[sys.argv[1]]()
    gc.disable()
    for _ in range(int(sys.argv[2])):
        step()
