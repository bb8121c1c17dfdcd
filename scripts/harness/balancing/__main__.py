"""python -m harness.balancing: policies for several models on one device, simulated.

python -m harness.balancing --coding FOLDER --mooncake FOLDER
python -m harness.balancing ... --report docs/results/balance.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from harness import provenance
from harness.balancing import traces
from harness.balancing.arms import ARMS, COMPARED, Arm, Balanced
from harness.balancing.device import PROMPT, STEP, Device
from harness.balancing.engine import Engine
from harness.balancing.traces import BLOCK, Conversation, Turn

GIB = 1 << 30
DEVICE = 24 * GIB  # for KV: what three models of 7B in bfloat16 leave of 80 GB
TIER = 16 * GIB  # of each engine
PHASE = 300.0  # seconds in which one model is busy
QUIET = 0.1  # of a load, in the phases of others
USERS = 8  # of the coding model
FILES = {"chat": "conversation_trace.jsonl", "agents": "synthetic_trace.jsonl"}
PARTS = {"chat": 0.25, "agents": 0.12}  # of the conversations of a cluster
MODELS = ("coding", "chat", "agents")
SEEDS = (1, 2)
NEVER = 86_400.0  # seconds, after the end of every simulation


@dataclass(frozen=True)
class Scarcity:
    """How much of the device requests take.

    Attributes:
        per_token: bytes of KV.
        longest: tokens of each model's longest request, of which a static part holds one.
        times: how many times the load.
    """

    per_token: int
    longest: Mapping[str, int]
    times: float = 1.0


LIGHT = Scarcity(56 << 10, {"coding": 120_000, "chat": 32_000, "agents": 32_000})
HEAVY = Scarcity(128 << 10, {"coding": 60_000, "chat": 32_000, "agents": 32_000})
KINDS = {
    "56 KiB per token": "28 layers and 4 KV heads of 128, as of Qwen 2.5 7B",
    "128 KiB per token": "32 layers and 8 KV heads of 128, as of Llama 3 8B",
}
GROWS = ("in turn", "one busy")  # the loads of which more is tried
TIMES = (1.0, 1.5, 2.0)

SETTING = {
    "device_bytes": DEVICE,
    "tier_bytes": TIER,
    "bytes_per_token": LIGHT.per_token,
    "longest": LIGHT.longest,
    "users": USERS,
    "parts": PARTS,
    "prompt_tokens_per_second": PROMPT,
    "step_seconds": STEP,
    "load_bytes_per_second": Engine.loads,
}

Open = list[tuple[float, Turn]]


def activity(load: str, times: float = 1.0) -> Callable[[str, float], float]:
    """Return how busy a model is at a time, from 0 to 1."""

    def in_turn(model: str, now: float) -> float:
        return 1.0 if [*MODELS][int(now // PHASE) % len(MODELS)] == model else QUIET

    def one(model: str, now: float) -> float:
        return 1.0 if model == "coding" else QUIET

    def together(model: str, now: float) -> float:
        return 0.5

    def crowd(model: str, now: float) -> float:
        return 2.0 if model == "coding" else 0.5

    of = {"in turn": in_turn, "one busy": one, "together": together, "crowd": crowd}[load]
    return lambda model, now: times * of(model, now)


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


@dataclass(frozen=True)
class Traces:
    """The requests of the three models."""

    sessions: list[Conversation]
    chat: Open
    agents: Open


def simulate(
    arm: Arm, load: str, seconds: float, of_traces: Traces, scarcity: Scarcity = LIGHT
) -> dict[str, Any]:
    """Run one arm with one load; return what was measured."""
    begun = time.monotonic()
    block = scarcity.per_token * BLOCK
    tier = TIER // block if arm.tier else 0
    longest = scarcity.longest
    engines = [Engine(name, block, tier, arm.cached, longest[name]) for name in MODELS]
    limits = arm.make(engines, DEVICE)
    device = Device(engines, limits)
    busy = activity(load, scarcity.times)
    by_name = dict(zip(MODELS, engines, strict=True))
    users = round(2 * USERS * scarcity.times)
    device.users(by_name["coding"], of_traces.sessions, users, next_turn(busy))
    for name, trace in (("chat", of_traces.chat), ("agents", of_traces.agents)):
        speed = lambda now, name=name: busy(name, now)  # noqa: E731
        device.open_load(by_name[name], traces.warped(trace, speed, seconds))
    device.run(seconds)
    return {
        **together(engines, seconds),
        "moves": limits.moves if isinstance(limits, Balanced) else 0,
        "moved_gib": round(limits.moved / GIB, 1) if isinstance(limits, Balanced) else 0,
        "took": round(time.monotonic() - begun, 1),
    }


def together(engines: list[Engine], seconds: float) -> dict[str, Any]:
    """Return what was measured of all models, and of each."""
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
        "models": {one.name: of_model(one, seconds) for one in engines},
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
    seconds = options.minutes * 60
    arms = [arm for arm in ARMS if not options.only or arm.name in options.only]
    loads = options.load or LOADS
    runs, grows = [], []
    for seed in options.seeds:
        of_traces = read(options, LIGHT.longest, seed)
        for load, arm in product(loads, arms):
            found = simulate(arm, load, seconds, of_traces)
            runs.append({"seed": seed, "load": load, "arm": arm.name} | found)
            print(line(runs[-1]), flush=True)
        for kind, scarce in zip(KINDS, (LIGHT, HEAVY), strict=True):
            of_traces = read(options, scarce.longest, seed)
            compared = [arm for arm in arms if arm.name in COMPARED]
            wanted = [load for load in GROWS if load in loads]
            for load, times, arm in product(wanted, TIMES, compared):
                found = simulate(arm, load, seconds, of_traces, replace(scarce, times=times))
                grows.append(
                    {"seed": seed, "load": load, "kind": kind, "times": times, "arm": arm.name}
                    | found
                )
                print(f"{kind}, {times:g} times: {line(grows[-1])}", flush=True)
    if options.report:
        report = head | {
            "minutes": options.minutes,
            "setting": SETTING,
            "traces": traces.SOURCES,
            "loads": LOADS,
            "arms": {arm.name: arm.what for arm in ARMS},
            "kinds": KINDS,
            "runs": runs,
            "grows": grows,
        }
        provenance.write(report, options.report)
    return 0


def read(options: argparse.Namespace, longest: Mapping[str, int], seed: int) -> Traces:
    """Return the requests of a draw, none of them longer than its model takes."""
    chat, agents = (
        traces.mooncake(options.mooncake / FILES[name], longest[name], PARTS[name], seed)
        for name in FILES
    )
    return Traces(traces.coding(options.coding, longest["coding"], seed), chat, agents)


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
