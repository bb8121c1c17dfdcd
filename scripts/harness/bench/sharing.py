"""``scripts/bench sharing``: what engines find that share memory, on traces, in simulated time.

pool     two engines that share a host pool, beside fixed halves and one LRU over all blocks:
         kvpatch's own keepers, extents and ledger (harness/balancing/host_pool.py)
models   eight models, few of them busy, on a device for three: limits by ``kvpatch balance``,
         first come first served, static parts, one LRU (harness/balancing/many.py)
engines  the same at a scale that eight served engines on the host device fit into, without
         traces (harness/bench/eight_models.py)

The traces are not in this repository; harness/balancing/traces.py says where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, console
from harness.balancing import arms, host_pool, many, traces
from harness.balancing.host_pool import GIB
from harness.bench import eight_models, reports

RESULT = ROOT / "docs/results/sharing.json"
# ``half`` and ``other half`` are of the coding sessions.
PAIRS = (("coding", "chat"), ("coding", "agents"), ("chat", "agents"), ("half", "other half"))
SIZES = (24, 64, 128)  # GiB of the pool
TURNS = (0, 10, 60, 300)  # seconds; 0: both at the same time
BLOCK_BYTES = traces.BLOCK * (128 << 10)  # 32 layers and 8 KV heads of 128, as of Llama 3 8B
LONGEST, PART = 60_000, 0.25
MINUTES = 15
PARTS = ("models", "pool", "engines")
Result = dict[str, Any]


def load(kind: str, coding: Path, mooncake: Path, seed: int) -> list[tuple[float, traces.Turn]]:
    """Return a load by its name."""
    part = {"coding": slice(None), "half": slice(0, None, 2), "other half": slice(1, None, 2)}
    if kind in part:
        return host_pool.closed(traces.coding(coding, LONGEST, seed)[part[kind]])
    name = {"chat": "conversation_trace.jsonl", "agents": "synthetic_trace.jsonl"}[kind]
    return traces.mooncake(mooncake / name, LONGEST, PART, seed)


def one_pool(pair: tuple[str, str], gib: int, turn: float, seconds: float, read: Any) -> Result:
    """Run one setting of the pool, with so many seconds of each load."""
    requests = host_pool.in_turns([read(kind) for kind in pair], turn, seconds)
    blocks = gib * GIB // BLOCK_BYTES
    found = {
        "halves": host_pool.parts(requests, blocks, 2),
        "one LRU": host_pool.one_lru(requests, blocks, 2),
        "pool": host_pool.pooled(requests, blocks * BLOCK_BYTES, BLOCK_BYTES, 2),
    }
    hits = {arm: sum(one.hits) for arm, one in found.items()}
    return {
        "pair": list(pair),
        "gib": gib,
        "turn": turn,
        "looked": sum(found["pool"].looked),
        "hits": {arm: one.hits for arm, one in found.items()},
        "over_halves": round(hits["pool"] / hits["halves"], 3),
        "over_one_lru": round(hits["pool"] / hits["one LRU"], 3),
        "one_lru_over_halves": round(hits["one LRU"] / hits["halves"], 3),
        "extents_given": found["pool"].given,
    }


def _one_pool(
    setting: tuple[tuple[str, str], int, float, float], folders: tuple[Path, Path]
) -> Result:
    found = one_pool(*setting, lambda kind: load(kind, *folders, seed=1))
    print(*setting, found["over_halves"], found["over_one_lru"], flush=True)
    return found


def pool(folders: tuple[Path, Path], sizes: Sequence[int], minutes: float) -> Result:
    """Two engines that share a host pool."""
    settings = list(itertools.product(PAIRS, sizes, TURNS, [minutes * 60]))
    with ProcessPoolExecutor(2) as workers:
        rows = list(workers.map(partial(_one_pool, folders=folders), settings))
    over = [row["over_halves"] for row in rows]
    return {
        "minutes": minutes,
        "rows": rows,
        "over_halves": {"least": min(over), "mean": round(sum(over) / len(over), 3)},
        "over_one_lru": {"least": min(row["over_one_lru"] for row in rows)},
        "one_lru_over_halves": {"least": min(row["one_lru_over_halves"] for row in rows)},
    }


def models(folders: tuple[Path, Path]) -> Result:
    """Eight models, few of them busy."""
    rows: list[Result] = []
    for seed in (1, 2):
        sessions = traces.coding(folders[0], many.LONGEST, seed)
        by_arm = {arm.name: many.simulate(arm, MINUTES * 60.0, sessions, seed) for arm in arms.ARMS}
        static, ideal = by_arm[arms.STATIC], by_arm[arms.IDEAL]
        for arm, found in by_arm.items():
            first = {name: one / static["models"][name] for name, one in found["models"].items()}
            rows.append(
                {
                    "seed": seed,
                    "arm": arm,
                    "tokens_per_second": found["tokens_per_second"],
                    "p90": found["p90"],
                    "tokens_over_static": _ratio(found, static),
                    "tokens_over_one_lru": _ratio(found, ideal),
                    "p90_over_static": round(found["p90"] / static["p90"], 3),
                    "worst_p90_over_static": round(max(first.values()), 3),
                    "moves": found["moves"],
                }
            )
            print(rows[-1], flush=True)
    return {"setting": many.SETTING, "minutes": MINUTES, "rows": rows}


def _ratio(one: Result, other: Result) -> float:
    ratio: float = one["tokens_per_second"] / other["tokens_per_second"]
    return round(ratio, 3)


def main(arguments: list[str]) -> int:
    """Simulate, and write the result file."""
    parser = console.parser("scripts/bench sharing", __doc__ or "")
    parser.add_argument("--coding", type=Path, help="folder of trace_*.json")
    parser.add_argument("--mooncake", type=Path, help="folder of *_trace.jsonl")
    parser.add_argument("--gib", type=int, nargs="+", default=SIZES, help="of the pool")
    parser.add_argument("--minutes", type=float, default=40, help="of each load of the pool")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--output", type=Path, default=RESULT, metavar="FILE")
    chosen = parser.parse_args(arguments)
    if {*(chosen.only or PARTS)} - {"engines"} and not (chosen.coding and chosen.mooncake):
        parser.error("pool and models need --coding and --mooncake")
    folders = (chosen.coding, chosen.mooncake)
    parts = {
        "models": partial(models, folders),
        "pool": partial(pool, folders, chosen.gib, chosen.minutes),
        "engines": partial(eight_models.measured, console.Screen("eight engines")),
    }
    command = "scripts/bench sharing"
    if chosen.only == ["engines"]:
        command += " --only engines"
    else:
        command += " --coding FOLDER --mooncake FOLDER"
        command += f" --gib {' '.join(map(str, chosen.gib))} --minutes {chosen.minutes:g}"
    reports.measure(command, parts, chosen.only, chosen.output)
    return 0
