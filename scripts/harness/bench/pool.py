"""scripts/bench-pool: what a host pool takes and gives, beside vLLM's own CPU tiers.

    .venv/bin/python scripts/bench-pool
    .venv/bin/python scripts/bench-pool --only share --report bench-results/pool.json

Engines on the host device, with a small model, each in a process of its own:

start   the start of an engine against the size of its CPU tier, with a pool and without
memory  what is committed against what blocks take; how soon memory is back
wave    how soon it is back that an idle engine evicts for another
load    an engine with a pool, one without, and another without, which serve the same prompts
        in turns: the last two are the noise
real    the same with SmolLM2-135M, real text and coding sessions
share   two engines in turns, one with coding sessions and one with chats, in one pool and with
        half of its memory each; by how much memory there is
chaos   two engines of one pool with random loads, limits and kill -9, while the kernel's count
        of their tiers is compared with the limit

Coding sessions and chats are scaled down from published traces (harness/bench/conversations.py).
The other prompts are drawn from a fixed set, the earlier ones more often (a power law). Parts that
are not measured again are kept.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, console, smollm2
from harness.bench import conversations, reports
from harness.engines.pools import Pooled
from harness.engines.runs import Device, Run, block_bytes, prompts
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger

RESULT = ROOT / "docs/results/pool.json"
MIB, GIB = 1 << 20, 1 << 30
BLOCK = block_bytes(Run())
# Sizes of a tier, in GiB. vLLM's own is memory of this machine.
POOLED, OWN = (1, 4, 16), (1, 2, 4)
NAME = f"bench{os.getpid()}"
# Of two engines that share: in the least neither's conversations fit a half, in the most all do.
SHARED = ((128, 2), (192, 2), (384, 2), (128, 4))  # MiB; phases of each engine
PHASE = 40.0  # seconds of an engine's phases together
SESSIONS = 6  # coding sessions of a round of the real model
NUMBERS = ("starts", "rounds", "minutes")  # the options of a run
Result = dict[str, Any]


class Machine:
    """Starts engines, and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.device = folder, Device(folder / "device")
        self.device.folder.mkdir()
        self.engines: list[Pooled] = []

    def start(self, size: int, pool: str = "", limit: int = 0, model: Path | None = None) -> Pooled:
        """Start an engine with a tier of ``size`` bytes, in a pool if one is named."""
        own = ((HOST_POOL.name, f"{limit or size}@{NAME}{pool}"),) if pool else ()
        run = Run(
            environment=own,
            cpu_blocks=size // BLOCK,
            dtype="bfloat16" if model is not None else Run.dtype,
        )
        folder = self.folder / f"engine{len(self.engines)}"
        self.engines.append(Pooled(self.device, folder, run, measured=True, model=model))
        return self.engines[-1]

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End what was started meanwhile."""
        before = len(self.engines)
        try:
            yield
        except BaseException:
            for one in self.engines[before:]:
                one.kill()
            raise
        for one in self.engines[before:]:
            if one.runs:
                one.end()


def drawn(seed: int, count: int, conversations: int, first: int) -> list[Any]:
    """Draw prompts of conversations, the lower ones more often."""
    source = random.Random(seed)
    known = prompts(conversations, seed=first)
    weights = [1 / (index + 1) ** 0.6 for index in range(conversations)]
    return source.choices(known, weights, k=count)


def about(values: list[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Return the seconds per GiB, by least squares."""
    return round(statistics.linear_regression(*zip(*points, strict=True)).slope, 4)


def start(machine: Machine, options: argparse.Namespace) -> Result:
    """The start against the tier's size; the arms and sizes in turns."""
    starts: list[Result] = []
    for repeat in range(options.starts):
        for arm, sizes in (("pool", POOLED), ("own", OWN)):
            for size in sizes if repeat % 2 == 0 else sizes[::-1]:
                with machine.ending():
                    one = machine.start(size * GIB, "start" * (arm == "pool"))
                    starts.append({"arm": arm, "gib": size, **one.do("start")})
    slopes = {
        arm: {
            figure: slope([(one["gib"], one[figure]) for one in starts if one["arm"] == arm])
            for figure in ("seconds", "cpu_seconds")
        }
        for arm in ("pool", "own")
    }
    return {"starts": starts, "per_gib": slopes}


def memory(machine: Machine, options: argparse.Namespace) -> Result:
    """What is committed, and how soon it is back."""
    rounds, reset, lowered = [], [], []
    size = 256 * MIB
    with machine.ending():
        one = machine.start(size, "memory")
        for number in range(options.rounds):
            one.do("serve", drawn(number, 24, 24, first=1000 + number))
            seen = one.do("see")
            rounds.append({name: seen[name] for name in ("committed", "resident", "extent")})
            if number % 2:
                reset.append(one.do("reset"))
            else:
                lowered.append(one.do("limit", seen["committed"] // 4))
                one.do("limit", size)
    return {
        "rounds": rounds,
        "committed_over_resident": about(
            [(one["committed"] - one["extent"]) / one["resident"] for one in rounds]
        ),
        "seconds_after_a_reset": about(reset),
        "seconds_after_a_lowered_limit": about(lowered),
    }


def wave(machine: Machine, options: argparse.Namespace) -> Result:
    """What an idle engine evicts for another is given back: how long more stays than it holds."""
    size = 96 * MIB
    seen: list[tuple[float, int, int]] = []
    with machine.ending():
        one = machine.start(size, "wave")
        one.do("serve", drawn(0, 40, 20, first=5000))
        two = machine.start(size, "wave")
        extent = one.do("see")["extent"]
        with ThreadPoolExecutor() as pool:
            other = pool.submit(two.do, "paced", [drawn(1, 40, 20, first=6000), 10.0])
            while not other.done():
                look = one.do("look")
                seen.append((time.monotonic(), look["committed"], look["resident"]))
            other.result()
    longest = since = 0.0
    for at, committed, resident in seen:
        since = (since or at) if committed - resident > extent else 0.0
        longest = max(longest, at - since if since else 0.0)
    return {
        "given": seen[0][1] - seen[-1][1],
        "looks": len(seen),
        "seconds_between_looks": round((seen[-1][0] - seen[0][0]) / len(seen), 4),
        "seconds_after_it_was_evicted": round(longest, 4),
    }


def load(machine: Machine, options: argparse.Namespace) -> Result:
    """Three engines without pressure, in turns, in another order each time."""
    rounds = (drawn(number, 120, 60, first=2000) for number in range(options.rounds + 2))
    return beside(machine, rounds, 2)


def real(machine: Machine, options: argparse.Namespace) -> Result:
    """The same with a real model, which takes longer."""
    model, words = smollm2.kept(print), text()
    turns = conversations.read("coding")
    few = range(SESSIONS)
    # Each round has the same sessions with other text.
    rounds = (
        list(conversations.prompts([one for one in turns if one[0] in few], words, seed=number))
        for number in range(options.rounds // 2 + 1)
    )
    found = beside(machine, rounds, 1, model)
    return {"model": smollm2.NAME, "sessions": SESSIONS, **found}


def text() -> list[int]:
    """Return real text in the real model's tokens: Python's own documentation of its topics."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder())
    tokens: list[int] = tokenizer("\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    return tokens


def beside(
    machine: Machine, loads: Iterable[list[Any]], unmeasured: int, model: Path | None = None
) -> Result:
    """Let three engines serve the same loads in turns: one with a pool, and two without."""
    arms = ("pool", "own", "own, again")
    rounds: dict[str, list[Result]] = {arm: [] for arm in arms}
    with machine.ending():
        size = 512 * MIB
        engines = {
            arm: machine.start(size, "load" * (arm == "pool"), limit=2 * size, model=model)
            for arm in arms
        }
        for number, some in enumerate(loads):
            for arm in arms[number % 3 :] + arms[: number % 3]:
                served = engines[arm].do("serve", some)
                if number >= unmeasured:
                    rounds[arm].append(served)

    def ratios(first: str, second: str, figure: str) -> dict[str, float]:
        pairs = zip(rounds[first], rounds[second], strict=True)
        return about([a[figure] / b[figure] for a, b in pairs])

    keeping = sum(one["keeper_seconds"] for one in rounds["pool"])
    return {
        "rounds": rounds,
        **{
            figure: {
                "pool over own": ratios("pool", "own", figure),
                "own twice": ratios("own, again", "own", figure),
            }
            for figure in ("seconds", "first_token", "cpu_seconds")
        },
        "keeper_share": round(keeping / sum(one["cpu_seconds"] for one in rounds["pool"]), 4),
    }


def share(machine: Machine, options: argparse.Namespace) -> Result:
    """Two engines in turns, in one pool and with half of its memory each."""
    return {
        f"{size} MiB, {phases} phases each": shared(machine, size * MIB, phases)
        for size, phases in SHARED
    }


def shared(machine: Machine, size: int, phases: int) -> Result:
    """Two engines in turns, so many times each, with so many bytes together."""
    words = random.Random(0).choices(range(2, 258), k=1 << 16)
    kinds = ("coding", "chat")
    loads = [
        list(conversations.prompts(conversations.read(kind), words, seed))
        for seed, kind in enumerate(kinds)
    ]
    seen: dict[str, list[Result]] = {"pool": [], "halves": []}
    with machine.ending():
        engines = {
            "pool": [machine.start(size, f"share{size}x{phases}") for _ in kinds],
            "halves": [machine.start(size // 2) for _ in kinds],
        }
        for number in range(phases * len(kinds)):
            turn, which = divmod(number, len(kinds))
            every = loads[which]
            begin, end = (len(every) * at // phases for at in (turn, turn + 1))
            part = every[begin:end], PHASE / phases
            # Both arms at the same time, as prompts come with pauses.
            with ThreadPoolExecutor() as both:
                served = both.map(lambda pair: pair[which].do("paced", part), engines.values())  # noqa: B023
                for arm, one in zip(engines, served, strict=True):
                    seen[arm].append({"engine": kinds[which], **one})
    tokens = {arm: sum(one["from_tier"] for one in every) for arm, every in seen.items()}
    return {
        "phases": seen,
        "tokens_from_tier": tokens,
        "ratio": round(tokens["pool"] / max(1, tokens["halves"]), 3),
    }


def chaos(machine: Machine, options: argparse.Namespace) -> Result:
    """Random loads, limits and kills, and the most that the kernel counted over the limit."""
    source, size = random.Random(1), 96 * MIB
    folder = ledger.home(f"{NAME}chaos")
    counts = {"kills": 0, "limits": 0, "rounds": 0, "looks": 0}
    over: list[int] = []
    began = time.monotonic()
    with machine.ending():
        engines = [machine.start(size, "chaos") for _ in range(2)]
        while time.monotonic() - began < options.minutes * 60:
            what, which = source.random(), source.randrange(2)
            if what < 0.15:
                engines[which].kill()
                counts["kills"] += 1
                over.append(overrun(folder))
                engines[which] = machine.start(size, "chaos")
            elif what < 0.3:
                ledger.set_limit(folder, source.choice([24, 48, 96]) * MIB)
                counts["limits"] += 1
            else:
                engines[which].do("burst", drawn(source.randrange(1 << 30), 8, 30, first=4000))
                counts["rounds"] += 1
            over.append(overrun(folder))
    counts["looks"] = len(over)
    return {
        **counts,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "bytes_over_the_size": max(over),
    }


def overrun(folder: Path) -> int:
    """Return by how much the tiers of a pool's engines exceed its size, by the kernel's count.

    The lock of the folder keeps every engine from taking more while it is counted.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        limit = ledger.read_limit(folder)
        size = sum(tiers(folder).values())
    finally:
        os.close(file)
    return size - limit.configured if limit is not None and size > limit.configured else 0


def tiers(folder: Path) -> dict[tuple[int, int], int]:
    """Return the bytes of every tier whose process has a record in a folder, by its file."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            links = {path: str(path.readlink()) for path in process.glob("fd/*")}
            if any(link.startswith(f"{folder}/") for link in links.values()):
                for path, link in links.items():
                    if link.startswith("/dev/shm/vllm_offload_"):
                        stat = path.stat()
                        found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return found


PARTS: dict[str, Callable[[Machine, argparse.Namespace], Result]] = {
    "memory": memory,
    "wave": wave,
    "share": share,
    "load": load,
    "real": real,
    "start": start,
    "chaos": chaos,
}


def main() -> int:
    """Measure, print and write the result."""
    parser = console.parser("scripts/bench-pool", __doc__ or "")
    parser.add_argument("--only", choices=PARTS, action="append", help="again for more parts")
    parser.add_argument("--starts", type=int, default=3, help="of each size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of a load (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="of chaos (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=RESULT)
    options = parser.parse_args()
    return console.run(console.Screen("bench-pool"), lambda: measure(options))


def measure(options: argparse.Namespace) -> int:
    """Run the parts and write what they found."""
    words = [f"--{name} {getattr(options, name)}" for name in NUMBERS]
    command = " ".join(["scripts/bench-pool", *words])
    with tempfile.TemporaryDirectory(prefix="kvpatch-bench-") as name:
        machine = Machine(Path(name))
        parts = {part: partial(run, machine, options) for part, run in PARTS.items()}
        reports.measure(command, parts, options.only, options.report)
    return 0
