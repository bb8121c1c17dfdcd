"""scripts/bench-suspend: what a suspension gives, on served engines.

    .venv/bin/python scripts/bench-suspend
    .venv/bin/python scripts/bench-suspend --report bench-results/suspend.json

Servers on the host device with a small model: an engine of each connector, suspended and resumed
with more and more on the device (``suspend``); and one whose tier has all that its device has,
from the order of a lower limit to the last page that is back, by the command and by a controller
that runs (``limit``). A part that is not measured again is kept.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, console
from harness.bench import reports
from harness.engines.runs import Device, Run, block_bytes, prompts
from harness.engines.serving import eventually, watched
from harness.serve import Server
from kvpatch import claims, control

RESULT = ROOT / "docs/results/suspend.json"
MIB = 1 << 20
BLOCK = block_bytes(Run())
LOADED = "vllm:external_prefix_cache_hits_total"
ON_THE_DEVICE = "vllm:prefix_cache_hits_total"
KINDS = {"offloading": Run(), "eager": Run(simple="eager"), "lazy": Run(simple="lazy")}
COUNTS = (6, 18, 54)  # prompts of 20 blocks on the device
STEPS = 64  # tokens of an answer by which a step is measured
FILL = 124  # prompts, of 620 MiB, on a device before a limit is lowered
LEAST = 160 * MIB  # that limit: what 8 requests that run need, and half as much
Result = dict[str, Any]


@dataclass
class Machine:
    """Starts servers; each has a kvcached name, by which its engine is found."""

    folder: Path
    stack: ExitStack
    count: Iterator[int] = field(default_factory=itertools.count)

    def device(self, size: int) -> Device:
        """A device of its own."""
        folder = self.folder / f"device{next(self.count)}"
        folder.mkdir()
        return Device(folder, size=str(size))

    def start(self, run: Run, device: Device, **environment: str) -> tuple[Server, str]:
        """Start a server; return it and its name."""
        name = f"bench-{os.getpid()}-{next(self.count)}"
        more = {"KVCACHED_IPC_NAME": name, "KVCACHED_MAX_CACHED_TOKENS": "-1", **environment}
        served = watched(run.within(more), device, self.folder / name, served_model_name=name)
        return self.stack.enter_context(served), name


def hits(server: Server) -> int:
    """Tokens of prompts so far that were on the device, or came from the tier."""
    metrics = server.metrics()
    return int(metrics.total(LOADED) + metrics.total(ON_THE_DEVICE))


def suspend(machine: Machine, repeats: int) -> Result:
    """Suspend and resume with more and more on the device."""
    found: Result = {}
    for kind, base in KINDS.items():
        blocks = COUNTS[-1] * 22
        run = replace(base, blocks=blocks, cpu_blocks=blocks + 100)
        with ExitStack() as stack:
            here = replace(machine, stack=stack)
            server, name = here.start(run, here.device(1 << 30))
            found[kind] = suspended(server, name, repeats)
    return found


def suspended(server: Server, name: str, repeats: int) -> Result:
    """What every suspension of an engine took and gave."""
    rounds = []
    step = []
    for number in range(repeats * len(COUNTS)):
        count = COUNTS[number % len(COUNTS)]
        server.reset_caches()
        some = prompts(count, seed=100 + number)
        first = [server.complete(prompt)["tokens"] for prompt in some]
        began = time.perf_counter()
        server.complete(prompts(1, length=32, max_tokens=STEPS, seed=1)[0])
        step.append((time.perf_counter() - began) / STEPS)
        engine = control.find(name)
        before = engine.said["mapped"]
        began = time.perf_counter()
        answer = engine.suspend(timeout=60)
        took = time.perf_counter() - began
        # The page of block 0, which vLLM reads and is never given back.
        page = answer.limit
        control.find(name).resume()
        known = hits(server)
        again = [server.complete(prompt)["tokens"] for prompt in some]
        asked = count * 640
        eventually(lambda: hits(server) - known >= asked, 5)  # noqa: B023
        rounds.append(
            {
                "prompts": count,
                "given_back": round((before - answer.mapped) / max(1, before - page), 4),
                "seconds": round(took, 4),
                "served": round((hits(server) - known) / asked, 4),
                "wrong_tokens": sum(one != other for one, other in zip(first, again, strict=True)),
            }
        )
    of_counts = [
        (
            count * 20 * BLOCK,
            statistics.median(one["seconds"] for one in rounds if one["prompts"] == count),
        )
        for count in COUNTS
    ]
    fit = statistics.linear_regression(*zip(*of_counts, strict=True))
    return {
        "rounds": rounds,
        "step_seconds": round(statistics.median(step), 5),
        "seconds_per_gib": round(fit.slope * (1 << 30), 3),
        "seconds_without_bytes": round(fit.intercept, 4),
    }


def limit(machine: Machine, repeats: int) -> Result:
    """Lower a limit, idle and busy, by the command and by a controller that runs."""
    blocks = FILL * 24 + 400
    run = replace(Run(), blocks=blocks, cpu_blocks=2 * blocks, together=8)
    found: Result = {"runs": {}}
    with ExitStack() as stack:
        here = replace(machine, stack=stack)
        server, name = here.start(run, here.device(1 << 30))
        some = prompts(FILL, seed=200)
        begun = time.perf_counter()
        server.complete(prompts(1, length=32, max_tokens=STEPS, seed=1)[0])
        found["step_ms"] = _ms((time.perf_counter() - begun) / STEPS)
        clients = stack.enter_context(ThreadPoolExecutor(8))
        command = [str(Path(sys.executable).with_name("kvpatch")), "limit", name, str(LEAST)]
        # The first time is a warm-up.
        for number, busy in enumerate([False, *[False, True] * repeats]):
            for by in ("command", "controller"):
                engine = control.find(name)
                engine.limit(blocks * BLOCK)
                list(clients.map(server.complete, some))
                running = [
                    clients.submit(server.complete, prompt)
                    for prompt in prompts(8, length=64, max_tokens=700, seed=number)
                    if busy
                ]
                time.sleep(1)
                told = (
                    partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
                    if by == "command"
                    else partial(engine.limit, LEAST)
                )
                seen = timeline(engine.name, told)
                for one in running:
                    one.result()
                if number:
                    found["runs"].setdefault(f"{'busy' if busy else 'idle'}, {by}", []).append(seen)
    return found


def timeline(name: str, told: Callable[[], object]) -> Result:
    """Return when what was seen in an engine's pool, in milliseconds since it was told a limit."""
    begun = time.perf_counter()
    before = size, used = _pool(name)
    at: dict[str, float] = {}
    told_by = threading.Thread(target=told)
    told_by.start()
    while "last page" not in at and time.perf_counter() - begun < 30:
        now = time.perf_counter() - begun
        limit, mapped = _pool(name)
        if limit != size:
            at.setdefault("limit in the pool", now)
        if mapped < used:
            at.setdefault("first page", now)
        if mapped <= LEAST:
            at["last page"] = now
        time.sleep(0.0005)
    told_by.join()
    at["told"] = time.perf_counter() - begun
    return {"mapped_mib": before[1] // MIB, **{what: _ms(when) for what, when in at.items()}}


def _pool(name: str) -> tuple[int, int]:
    """Return the limit of an engine and what it has mapped, as kvcached has them in /dev/shm."""
    content = (claims.BASE / name).read_bytes()
    limit, used, ahead = (
        int.from_bytes(content[at : at + 8], sys.byteorder, signed=True) for at in (0, 8, 16)
    )
    return limit, used + ahead


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


PARTS = {"suspend": suspend, "limit": limit}


def main() -> int:
    """Measure, print and write the result."""
    parser = console.parser("scripts/bench-suspend", __doc__ or "")
    parser.add_argument("--only", choices=PARTS, action="append", help="again for more parts")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each size (default: %(default)s)"
    )
    parser.add_argument("--report", type=Path, default=RESULT)
    options = parser.parse_args()
    return console.run(console.Screen("bench-suspend"), lambda: measure(options))


def measure(options: argparse.Namespace) -> int:
    """Measure, and write what was found."""
    command = f"scripts/bench-suspend --repeats {options.repeats}"
    with tempfile.TemporaryDirectory(prefix="kvpatch-bench-") as name, ExitStack() as stack:
        machine = Machine(Path(name), stack)
        parts = {part: partial(run, machine, options.repeats) for part, run in PARTS.items()}
        reports.measure(command, parts, options.only, options.report)
    return 0
