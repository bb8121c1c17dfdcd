"""What an engine does without one of kvpatch's rows, under a GPU's defaults.

A look is one engine that was started without a row, beside the same engine with it. Both schedule
asynchronously and are given a load that ``LOADS`` names; what differs is what was seen. Which
looks a row has is in ``without_rows``, with the test that shows its need where no load does.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import ROOT, provenance
from harness.engines.fences import BARE, Fences, SimpleFences
from harness.engines.runs import (
    Device,
    Finished,
    Run,
    engine_arguments,
    load,
    model_of,
    prompts,
    run_driver,
)
from harness.engines.without_driver import STARTED, WAITS
from harness.matrix import cells

RELEASE = "0.32.0"
RESULT = ROOT / "docs/results/without.json"
FEW = 8  # prompts of 20 blocks
LIMIT = 400  # seconds after which an engine is taken for one that hangs

# What may be seen, the gravest first.
NOT_STARTED = "the engine does not start"
ENDED = "the engine ends"
HANGS = "requests wait for ever"
TOKENS = "tokens differ"
BYTES = "bytes differ"
LOST = "blocks are not restored"
COPIES = "copies are wrong"
MEMORY = "memory is not given back"
EVENTS = "events differ"
SILENT = "a refusal does not come"
OTHER_WORDS = "another refusal"
NOTHING = "nothing seen"
KINDS = (
    *(NOT_STARTED, ENDED, HANGS, TOKENS, BYTES, LOST, COPIES, MEMORY, EVENTS),
    *(SILENT, OTHER_WORDS, NOTHING),
)


@dataclass(frozen=True)
class Look:
    """One engine without a row.

    Attributes:
        load: a key of ``LOADS``.
        also: rows that are taken out of both engines, as in a start where they failed.
        why: of ``also``.
    """

    load: str
    also: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Load:
    """What an engine is given.

    Attributes:
        words: what it is, for the page.
        rounds: prompts, round by round.
        job: what else its driver is told.
        engine: arguments beside those of the run.
        tier: the run has a folder on disk behind its CPU tier.
        scenarios: of ``fence_driver``, instead of rounds.
        held: its copies are held in flight.
        simple: the scenarios are those of SimpleCPUOffloadConnector.
        refused: an engine with every row does not come to its end: a row of kvpatch's ends it.
    """

    words: str
    run: Run
    rounds: tuple[list[Any], ...] = ()
    job: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    tier: bool = False
    scenarios: tuple[str, ...] = ()
    held: bool = False
    simple: str = ""
    refused: bool = False


def _of_cells(name: str, words: str, **changes: Any) -> Load:
    # As a cell of the matrix, with half the prompts on a device that is too small for those.
    trial = cells.TRIALS[name]
    known = prompts(FEW, max_tokens=7)
    run = replace(Run(asynchronous=True, blocks=90, cpu_blocks=0), **trial.changes)
    first, last = known[:-2], known
    rounds: tuple[list[Any], ...] = (first, first, last) if run.simple else (last, last)
    if run.simple:
        run = replace(run, cpu_blocks=130)
    if run.tiers:
        rounds = tuple([one] for one in known[:-2] * 2)
        run = replace(run, tiers=(), cpu_blocks=60)
        return Load(words, replace(run, **changes), rounds, trial.job, tier=True)
    return Load(words, replace(run, **changes), rounds, trial.job)


def _fences(words: str, *scenarios: str, asynchronous: bool = True, **more: Any) -> Load:
    return Load(words, Run(asynchronous=asynchronous), scenarios=scenarios, **more)


def _with(one: Load, words: str, **changes: Any) -> Load:
    return replace(one, words=words, run=replace(one.run, **changes))


_OFFLOADING = _of_cells("Offloading", "8 prompts twice, on a device that holds 4")
_EAGER = _of_cells("Simple eager", "6 prompts twice and 8 once; the device holds 4, the CPU tier 6")
_TIERS = _of_cells(
    "tiering fs", "6 prompts twice, one at a time; the device holds 4, the CPU tier 3"
)
DEBUG = (("KVPATCH_DEBUG", "1"),)
_TAKEN = Load(
    "3 pages of CPU blocks are taken and freed, while kvcached keeps no page in reserve",
    Run(simple="eager", asynchronous=True, environment=tuple(BARE.items())),
)
LOADS = {
    "Offloading": _OFFLOADING,
    "Offloading, non-contiguous": _with(_OFFLOADING, "the same, by layer", contiguous=False),
    "Offloading, Runner V2": _with(
        replace(_OFFLOADING, rounds=tuple(one[:5] for one in _OFFLOADING.rounds)),
        "5 prompts twice, on a device that holds 4",
        runner="v2",
    ),
    "Offloading, latent attention": _with(
        replace(_OFFLOADING, rounds=tuple(one[:5] for one in _OFFLOADING.rounds)),
        "the same, of latent attention",
        runner="v2",
        model="latent",
    ),
    "Offloading, two groups": _with(_OFFLOADING, "the same", model="sliding", blocks=140),
    "Offloading, exhausted": _with(
        replace(_OFFLOADING, rounds=(load("long"),), job={"exhaust": 4}),
        "8 long answers of a model with two groups, while every fourth allocation fails",
        model="sliding",
        blocks=140,
    ),
    "Multi": _of_cells("Multi", "the same as Offloading, inside MultiConnector"),
    "Simple eager": _EAGER,
    "Simple eager, non-contiguous": _with(_EAGER, "the same, by layer", contiguous=False),
    "Simple lazy": _of_cells("Simple lazy", "the same"),
    "Simple lazy, capped": _of_cells(
        "Simple lazy",
        "the same; kvcached keeps 20 blocks that no request holds",
        environment=(("KVCACHED_MAX_CACHED_TOKENS", "640"),),
    ),
    "Simple lazy, pressed": Load(
        "24 prompts back and forth on a device that holds most of them",
        Run(simple="lazy", asynchronous=True, blocks=400),
        rounds=tuple(load(name) for name in ("24", "back", "shared", "24", "shared")),
    ),
    "Simple eager, taken": replace(_TAKEN, job={"take_cpu_blocks": True}),
    "Simple eager, shutdown": Load(
        "a shutdown while copies are in flight",
        Run(simple="eager", asynchronous=True),
        rounds=(load("few"),),
        job={"shut_down_while_copying": True},
    ),
    "tiering fs": _TIERS,
    # For upstream's deadlock, and so not admitted by a run as what is only not validated is.
    "tiering fs, priority": replace(
        _TIERS,
        words="a configuration that is refused",
        engine={"scheduling_policy": "priority"},
        refused=True,
    ),
    "events": Load(
        "12 prompts twice, one by one, whose KV cache events are kept",
        Run(
            events=True,
            cpu_blocks=200,
            asynchronous=True,
            environment=(("PYTHONHASHSEED", "0"), ("KVCACHED_MAX_CACHED_TOKENS", "-1")),
        ),
        rounds=(load("whole"),) * 2,
        job={"events": True, "one_by_one": True},
    ),
    "late store": _fences("a store is planned after its blocks were freed", "finish_unplanned"),
    "preemption": _fences("requests are preempted", "preempt"),
    "standstill": _fences("the limit is lowered under two loads", "standstill"),
    "held copies": _fences(
        "requests finish, are aborted and evicted while copies are held",
        *("finish", "finish_in_flight", "abort_while_storing", "abort_before_launch"),
        *("abort_while_loading", "cap_trim", "reset", "give_back"),
        asynchronous=False,
        held=True,
    ),
    "given back": _fences("a request finishes and its copies end", "give_back"),
    "simple, held copies": _fences(
        "requests finish, are aborted and evicted while copies are held",
        *("finish_in_flight", "abort_while_storing", "abort_before_launch"),
        *("abort_while_loading", "cap_trim", "reset_in_flight", "wake"),
        held=True,
        simple="eager",
    ),
    "debug": replace(
        _fences("a request finishes while its store is held, in debug mode", "finish"),
        run=Run(environment=DEBUG),
        held=True,
    ),
    "debug, corrupt": replace(
        _fences("a bit of the CPU tier flips, in debug mode", "corrupt"),
        run=Run(asynchronous=True, environment=DEBUG),
        refused=True,
    ),
    "tiering fs, debug": _with(_TIERS, "the same, in debug mode", environment=DEBUG),
    "Simple eager, debug": _with(_EAGER, "the same, in debug mode", environment=DEBUG),
}


class Engines:
    """Runs engines of looks, each only once.

    Args:
        work: a folder for devices, logs and results; what is there from an earlier run of the
            same tree is taken.
    """

    def __init__(self, work: Path, say: Callable[[str], None]) -> None:
        self.work, self.say = work, say
        self._fences: dict[bool, Fences] = {}

    def look(self, row: str, look: Look) -> tuple[str, str]:
        """Return what was seen without a row, and the words of it."""
        whole = self.run(look.load, look.also)
        if not good(whole) and not (look.also or LOADS[look.load].refused):
            raise RuntimeError(f"{look.load} fails with every row: {last_words(whole)}")
        return compare(whole, self.run(look.load, (row, *look.also)), LOADS[look.load])

    def run(self, name: str, without: tuple[str, ...]) -> Finished:
        """Run one engine under a load without rows."""
        label = re.sub(r"[^a-z0-9_.]+", "-", "-".join((name, *without)).lower())
        kept = self.work / label / "finished.json"
        if not kept.exists():
            begun = time.monotonic()
            ended = self._run(name, without, kept.parent)
            kept.write_text(json.dumps(asdict(ended)))
            left_out = ", ".join(without) or "nothing"
            self.say(f"{name}, without {left_out}: {time.monotonic() - begun:.0f} s")
        return Finished(**json.loads(kept.read_text()))

    def _run(self, name: str, without: tuple[str, ...], folder: Path) -> Finished:
        load = LOADS[name]
        device = folder / "device"
        device.mkdir(parents=True, exist_ok=True)
        run, job, driver = load.run, dict(load.job), "driver"
        if load.scenarios:
            driver = "fence_driver"
            run, job = self._scenarios(load)
        else:
            if load.tier:
                run = replace(run, tiers=(str(folder / "disk"),))
            job |= {
                "model": str(model_of(run.model, run.kv_heads)),
                "engine": engine_arguments(run) | load.engine,
                "rounds": load.rounds,
            }
        job |= {"driver": driver, "without": list(without)}
        environment = Device(device).environ(run)
        try:
            return run_driver(job, environment, folder, timeout=LIMIT, driver="without_driver")
        except subprocess.TimeoutExpired as late:
            log = (folder / "log").read_text(errors="replace")
            return Finished(-1, f"{log}\n{WAITS}: no end after {late.timeout:.0f} s\n", {})

    def _scenarios(self, load: Load) -> tuple[Run, dict[str, Any]]:
        simple = bool(load.simple)
        if simple not in self._fences:
            folder = self.work / f"fences-{'simple' if simple else 'offloading'}"
            device = folder / "device"
            device.mkdir(parents=True, exist_ok=True)
            self._fences[simple] = (SimpleFences if simple else Fences)(
                model_of, Device(device), folder
            )
        run, job = self._fences[simple].prepare(
            load.scenarios, load.run.asynchronous, 1, load.simple
        )
        job |= {"may_hold": load.held, "simple": simple, "unpinned": False}
        return replace(run, environment=(*run.environment, *load.run.environment)), job


def compare(whole: Finished, less: Finished, load: Load) -> tuple[str, str]:
    """Return what an engine without a row did that the whole one did not, and its words."""
    if not good(whole):
        if good(less) or (STARTED in less.log and STARTED not in whole.log):
            return SILENT, last_words(whole)
        same = last_words(whole) == last_words(less)
        return (NOTHING, "") if same else (OTHER_WORDS, last_words(less))
    if not good(less):
        words = last_words(less)
        if WAITS in less.log or "did not finish in 400 steps" in less.log:
            return HANGS, words
        return (ENDED if STARTED in less.log else NOT_STARTED), words
    judge = _of_scenarios if load.scenarios else _of_rounds
    return min(judge(whole.result, less.result), key=lambda one: KINDS.index(one[0]))


def good(ended: Finished) -> bool:
    """Return whether an engine came to its end."""
    return ended.code == 0 and bool(ended.result)


# What is different in every run: processes, addresses, and the folders of a device.
VARYING = (
    (r"0x[0-9a-f]+", "0x…"),
    (r"/\S*/(?=\S)", "…/"),
    (r"(?<![0-9a-f])[0-9a-f]{8}(?![0-9a-f])", "x"),
    (r"\d{4,}", "N"),
)


def last_words(ended: Finished) -> str:
    """Return the sentence with which an engine ended: of a refusal, or of an error."""
    lines = [
        re.sub(r"^(\(\w+ pid=\d+\)|\[rank\d+\]:) ", "", line) for line in ended.log.splitlines()
    ]
    refused = [line for line in lines if re.search(r"\[KVP\d+\]$", line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Refusal|Exit)\b", line)]
    debug = [line for line in lines if "kvpatch KVPATCH_DEBUG:" in line]
    hung = [line for line in lines if line.startswith(WAITS)]
    found = (debug or refused or hung or errors or lines or [""])[-1].strip()
    if found == "AssertionError":  # which has no words of its own
        found = next((line.strip() for line in lines[::-1] if line.strip()[:7] == "assert "), found)
    for pattern, put in VARYING:
        found = re.sub(pattern, put, found)
    return found[:300] or f"exit status {ended.code}"


def _of_rounds(whole: dict[str, Any], less: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what differs between two results of ``driver``."""
    yield NOTHING, ""
    pairs = [
        (one, other)
        for ours, theirs in zip(whole.get("rounds", ()), less.get("rounds", ()), strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    wrong = sum(one["tokens"] != other["tokens"] for one, other in pairs)
    if wrong:
        yield TOKENS, f"{wrong} of {len(pairs)} answers"
    changed = len(less.get("changed", ())) + less.get("simple", {}).get("changed", 0)
    if changed:
        yield BYTES, f"{changed} restored blocks"
    had, has = (sum(pair[at]["cached"] for pair in pairs) for at in (0, 1))
    if has < 0.9 * had:
        yield LOST, f"{has} tokens from the tier instead of {had}"
    for name in ("twice", "pinned", "device_calls"):
        more = less.get("simple", {}).get(name)
        if more and not whole["simple"][name]:
            yield COPIES, f"{name}: {more if isinstance(more, int | dict) else len(more)}"
    for name, tier in whole.get("simple", {}).get("tiers", {}).items():
        if less["simple"]["tiers"][name] != tier:
            yield COPIES, f"blocks of the CPU tier: {less['simple']['tiers'][name]}, not {tier}"
    if whole.get("charged") and less["charged"][0] != less["charged"][1]:
        yield MEMORY, f"bytes of the device while CPU blocks are taken: {less['charged']}"
    if "after_reset" in whole:
        kept = less["after_reset"]["charged"] - whole["after_reset"]["charged"]
        if kept > 0:
            yield MEMORY, f"{kept >> 20} MiB more after the load"
    if whole.get("reset") and not less.get("reset"):
        yield MEMORY, "the prefix cache cannot be reset"
    leaked = less.get("exhaustion", {}).get("leaked", 0)
    if leaked:
        yield MEMORY, f"{leaked} blocks that nobody gives back"
    if "events" in whole and _kinds(whole) != _kinds(less):
        yield EVENTS, f"{_kinds(less)} instead of {_kinds(whole)}"


def _kinds(result: dict[str, Any]) -> str:
    """How many events of a kind there were on the device."""
    kinds = [one["event"] for one in result["events"] if one.get("medium", "GPU") == "GPU"]
    return ", ".join(f"{kinds.count(one)} {one}" for one in sorted(set(kinds))) or "none"


def _of_scenarios(whole: dict[str, Any], less: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what differs between two results of ``fence_driver``."""
    yield NOTHING, ""
    for name, one in whole["scenarios"].items():
        other = less["scenarios"][name]
        if other["wrong"] or other["unknown"]:
            stored = other["right"] + other["wrong"] + other["unknown"]
            bad = other["wrong"] + other["unknown"]
            yield BYTES, f"{bad} of {stored} stored blocks ({name})"
        if other["right"] < 0.9 * one["right"] and not other["wrong"]:
            yield LOST, f"{other['right']} stored blocks instead of {one['right']} ({name})"
        for key in ("left", "kept", "asks_for_steps"):
            if other.get(key) and not one.get(key):
                yield MEMORY, f"{key}: {other[key]} ({name})"
        if other.get("steps", 0) > one.get("steps", 0):
            yield MEMORY, f"{other['steps']} steps later instead of {one['steps']} ({name})"
    for key in ("held_now", "retired_now"):
        if less[key] > whole[key]:
            yield MEMORY, f"{less[key]} pages stay ({key})"
    if less["charged"] > whole["charged"]:
        yield MEMORY, f"{(less['charged'] - whole['charged']) >> 20} MiB more at the end"
    if less["checked"] != whole["checked"]:
        yield OTHER_WORDS, f"checked: {less['checked']} instead of {whole['checked']}"


def read(path: Path = RESULT) -> dict[str, Any]:
    """Return the result file; empty where there is none."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def record(found: dict[str, list[dict[str, Any]]], path: Path = RESULT) -> None:
    """Write what was seen; rows that were not looked at keep what they had."""
    rows = read(path).get("rows", {}) | found
    head = provenance.header("scripts/matrix without")
    provenance.write(head | {"rows": {row: rows[row] for row in sorted(rows)}}, path)


def is_recorded(records: list[dict[str, Any]], looks: Iterable[Look]) -> bool:
    """Return whether the records of a row are those of its looks."""
    return [(one["load"], tuple(one["also"])) for one in records] == [
        (look.load, look.also) for look in looks
    ]


def looked(engines: Engines, row: str, looks: Iterable[Look]) -> list[dict[str, Any]]:
    """Return the records of a row's looks."""
    records = []
    for look in looks:
        kind, words = engines.look(row, look)
        records.append({"load": look.load, "also": list(look.also), "seen": kind, "words": words})
    return records
