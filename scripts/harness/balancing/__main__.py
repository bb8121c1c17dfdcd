"""python -m harness.balancing: policies for several models on one device, simulated.

python -m harness.balancing --coding FOLDER --mooncake FOLDER
python -m harness.balancing ... --report docs/results/balance.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import provenance
from harness.balancing import traces
from harness.balancing.arms import ARMS, Arm, Balanced
from harness.balancing.device import PROMPT, STEP, Device
from harness.balancing.engine import Engine
from harness.balancing.traces import BLOCK, Conversation, Turn

GIB = 1 << 30
DEVICE = 24 * GIB  # for KV: what three models of 7B in bfloat16 leave of 80 GB
TIER = 16 * GIB  # of each engine
PER_TOKEN = 56 << 10  # of 28 layers, 4 KV heads of 128, bfloat16
PHASE = 300.0  # seconds in which one model is busy
QUIET = 0.1  # of a load, in the phases of others
USERS = 8  # of the coding model
FILES = {"chat": "conversation_trace.jsonl", "agents": "synthetic_trace.jsonl"}
PARTS = {"chat": 0.25, "agents": 0.12}  # of the conversations of a cluster
MODELS = {"coding": 120_000, "chat": 32_000, "agents": 32_000}  # tokens of the longest request
SEEDS = (1, 2)
NEVER = 86_400.0  # seconds, after the end of every simulation

SETTING = {
    "device_bytes": DEVICE,
    "tier_bytes": TIER,
    "bytes_per_token": PER_TOKEN,
    "longest": MODELS,
    "users": USERS,
    "parts": PARTS,
    "prompt_tokens_per_second": PROMPT,
    "step_seconds": STEP,
    "load_bytes_per_second": Engine.loads,
}

Open = list[tuple[float, Turn]]


def activity(load: str) -> Callable[[str, float], float]:
    """Return how busy a model is at a time, from 0 to 1."""

    def in_turn(model: str, now: float) -> float:
        return 1.0 if [*MODELS][int(now // PHASE) % len(MODELS)] == model else QUIET

    def one(model: str, now: float) -> float:
        return 1.0 if model == "coding" else QUIET

    def together(model: str, now: float) -> float:
        return 0.5

    def crowd(model: str, now: float) -> float:
        return 2.0 if model == "coding" else 0.5

    return {"in turn": in_turn, "one busy": one, "together": together, "crowd": crowd}[load]


LOADS = {
    "in turn": "each model is busy for 5 minutes, while the two others have a tenth of their load",
    "one busy": "coding is busy, the two others have a tenth of their load",
    "together": "all three have half of their load all the time",
    "crowd": "coding has twice its load, more than the device can hold, the two others half of it",
}


def next_turn(busy: Callable[[str, float], float]) -> Callable[[int, float], float]:
    """Return when a user of the coding model may ask next."""

    def active(user: int, when: float) -> float:
        while when < NEVER and busy("coding", when) * USERS <= user:
            when += 5.0
        return when

    return active


def simulate(
    arm: Arm, load: str, seconds: float, sessions: list[Conversation], chat: Open, agents: Open
) -> dict[str, Any]:
    """Run one arm with one load; return what was measured."""
    begun = time.monotonic()
    block = PER_TOKEN * BLOCK
    tier = TIER // block if arm.tier else 0
    engines = [Engine(name, block, tier, arm.cached, most) for name, most in MODELS.items()]
    limits = arm.make(engines, DEVICE)
    device = Device(engines, limits)
    busy = activity(load)
    by_name = dict(zip(MODELS, engines, strict=True))
    device.users(by_name["coding"], sessions, 2 * USERS, next_turn(busy))
    for name, trace in (("chat", chat), ("agents", agents)):
        speed = lambda now, name=name: busy(name, now)  # noqa: E731
        device.open_load(by_name[name], traces.warped(trace, speed, seconds))
    device.run(seconds)
    every = [first for one in engines for first in one.measured.first]
    # Who still waits has waited for so long already.
    waits = [
        seconds - one.came
        for engine in engines
        for one in (*engine.queue, *engine.running)
        if one.first is None
    ]
    return {
        "tokens_per_second": round(sum(one.measured.tokens for one in engines) / seconds, 1),
        "first_token": of(every + waits),
        "moves": limits.moves if isinstance(limits, Balanced) else 0,
        "moved_gib": round(limits.moved / GIB, 1) if isinstance(limits, Balanced) else 0,
        "models": {one.name: of_model(one, seconds) for one in engines},
        "took": round(time.monotonic() - begun, 1),
    }


def of(first: list[float]) -> dict[str, float]:
    """Return the median and the 90th percentile of times to the first token."""
    if len(first) < 2:
        return {"p50": 0.0, "p90": 0.0}
    cuts = statistics.quantiles(first, n=10)
    return {"p50": round(statistics.median(first), 3), "p90": round(cuts[8], 3)}


def of_model(engine: Engine, seconds: float) -> dict[str, Any]:
    """Return what was measured of one model."""
    found = engine.measured
    waits = [seconds - one.came for one in (*engine.queue, *engine.running) if one.first is None]
    return {
        "requests": found.requests,
        "unanswered": len(engine.queue),
        "tokens_per_second": round(found.tokens / seconds, 1),
        "first_token": of(found.first + waits),
        "hits_device": round(found.device / max(1, found.looked), 4),
        "hits_tier": round(found.tier / max(1, found.looked), 4),
        "preempted": found.preempted,
    }


def main() -> int:
    """Run all arms with all loads, print a line of each, and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.balancing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--coding", type=Path, required=True, help="folder of trace_*.json")
    parser.add_argument("--mooncake", type=Path, required=True, help="folder of *_trace.jsonl")
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=SEEDS, help="which conversations are taken"
    )
    parser.add_argument("--only", action="append", help="an arm; else all")
    parser.add_argument("--load", action="append", choices=list(LOADS), help="a load; else all")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    head = provenance.header("python -m harness.balancing --coding FOLDER --mooncake FOLDER")
    runs = []
    for seed in options.seeds:
        sessions = traces.coding(options.coding, MODELS["coding"], seed)
        chat, agents = (
            traces.mooncake(options.mooncake / FILES[model], MODELS[model], PARTS[model], seed)
            for model in FILES
        )
        for load in options.load or LOADS:
            for arm in ARMS:
                if not options.only or arm.name in options.only:
                    found = simulate(arm, load, options.minutes * 60, sessions, chat, agents)
                    runs.append({"seed": seed, "load": load, "arm": arm.name} | found)
                    print(line(runs[-1]), flush=True)
    if options.report:
        report = head | {
            "minutes": options.minutes,
            "setting": SETTING,
            "traces": traces.SOURCES,
            "loads": LOADS,
            "arms": {arm.name: arm.what for arm in ARMS},
            "runs": runs,
        }
        provenance.write(report, options.report)
    return 0


def line(run: dict[str, Any]) -> str:
    """Return a run for a person."""
    models = "  ".join(
        f"{name} {one['tokens_per_second']:.0f}/s p90 {one['first_token']['p90']:.1f} "
        f"({one['hits_device']:.0%}+{one['hits_tier']:.0%}, {one['unanswered']} left)"
        for name, one in run["models"].items()
    )
    return (
        f"{run['seed']} {run['load']:9} {run['arm']:22} {run['tokens_per_second']:6.0f}/s "
        f"p90 {run['first_token']['p90']:6.1f}  {models}  moves {run['moves']} {run['took']} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
