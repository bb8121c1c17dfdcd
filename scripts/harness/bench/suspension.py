"""scripts/bench-suspend: what a suspension gives, on served engines.

    .venv/bin/python scripts/bench-suspend
    .venv/bin/python scripts/bench-suspend --report bench-results/suspend.json

Servers on the host device with a small model: an engine of each connector, suspended and resumed
with more and more on the device.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import ROOT, console
from harness.bench import reports
from harness.engines.runs import Device, Run, block_bytes, engine_arguments, model_of, prompts
from harness.engines.serving import eventually, watched
from harness.serve import Server
from kvpatch import control

RESULT = ROOT / "docs/results/suspend.json"
MIB = 1 << 20
BLOCK = block_bytes(Run())
LOADED = "vllm:external_prefix_cache_hits_total"
ON_THE_DEVICE = "vllm:prefix_cache_hits_total"
KINDS = {"offloading": Run(), "eager": Run(simple="eager"), "lazy": Run(simple="lazy")}
COUNTS = (6, 18, 54)  # prompts of 20 blocks on the device
STEPS = 64  # tokens of an answer by which a step is measured
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
        run = replace(run, environment=(*run.environment, *more.items()))
        folder = self.folder / name
        folder.mkdir()
        arguments = {"served_model_name": name, **engine_arguments(run)}
        server = watched(model_of(run.model), arguments, device.environ(run), folder)
        return self.stack.enter_context(server), name


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
                "resident": answer.resident,
                "kept": answer.kept,
                "lost": answer.lost,
                "mapped_before": before,
                "mapped_after": answer.mapped,
                "floor": page,
                "given_back": round((before - answer.mapped) / max(1, before - page), 4),
                "seconds": round(took, 4),
                "seconds_in_engine": answer.seconds,
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


def main() -> int:
    """Measure, print and write the result."""
    parser = console.parser("scripts/bench-suspend", __doc__ or "")
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
        parts = {"suspend": lambda: suspend(machine, options.repeats)}
        reports.measure(command, parts, None, options.report)
    return 0
