"""``scripts/bench steps``: what a step costs the engine's thread, without a model.

    scripts/bench steps                      docs/results/steps.json
    scripts/bench steps --before COMMIT      the same loads with that commit's kvpatch, in one run
    scripts/bench steps --go-on              the loads that a run of this kvpatch has not ended
    scripts/bench steps --only giving waves  these loads, in bench-results/

Each load runs in a process of its own, every arm before and after the others (A B B A), and one arm
twice: their difference is the noise. Times are those of the thread; counts have no noise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import ROOT, console, processes, provenance
from harness.bench.options import RESULTS, SCRATCH
from harness.bench.sizes import KV_HEADS
from harness.model_cache import kept_model

PLAIN, STATIC, ALONE, OURS = "vLLM", "vLLM + offloading", "kvcached", "kvcached + kvpatch"
AGAIN, BEFORE = "kvcached + kvpatch, again", "kvcached + kvpatch, before"
ALL = (PLAIN, STATIC, ALONE, OURS, AGAIN)
PAIRED = (OURS, AGAIN)
Load = dict[str, Any]


def _load(name: str, load: str, arms: tuple[str, ...] = PAIRED, **more: Any) -> Load:
    shared = {"blocks": 8192, "asynchronous": False, "size": 300, "cap": "", "tier": 2.0}
    return {**shared, "name": name, "load": load, "arms": arms, **more}


def _shared(name: str, load_steps: int, tails: bool = False) -> Load:
    return _load(name, "shared", (STATIC, OURS), size=50, load_steps=load_steps, tails=tails)


LOADS = (
    _load("giving, busy, half to store", "giving", blocks=65_536, busy=8, cap="-1", tier=0.5),
    _load("giving, busy, all in the tier", "giving", blocks=65_536, busy=8, cap="-1"),
    _load("giving, idle, all in the tier", "giving", blocks=16_384, busy=0, cap="-1"),
    _load("waves", "waves", blocks=16_384),
    _load("waves, asynchronous", "waves", blocks=16_384, asynchronous=True),
    _load("decode", "decode", ALL),
    _load("churn", "churn", ALL),
    _load("churn, cap -1", "churn", cap="-1", blocks=65_536),
    _load("churn, cap 128,000", "churn", cap="128000", blocks=65_536, warm=180),
    _load("churn, cap 1,000,000", "churn", cap="1000000", blocks=131_072, warm=1300, tier=0.25),
    _load("returning", "returning", ALL, size=150),
    _shared("shared prefix", 1),
    _shared("shared prefix, slow loads", 50),
    _shared("shared prefix and own tails, slow loads", 50, tails=True),
)


def environment(arm: str, load: Load, folder: Path, before: Path | None) -> dict[str, str]:
    """Return the environment of one run."""
    tree = [str(before)] if arm == BEFORE and before else []
    more = {
        "KVPATCH": "0" if arm in (PLAIN, STATIC) else "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "KVCACHED_LOG_LEVEL": "CRITICAL",
        "KVCACHED_PAGE_PREALLOC_ENABLED": "false",
        "KVCACHED_MIN_RESERVED_PAGES": "0",
        "KVCACHED_MAX_RESERVED_PAGES": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join([*tree, str(processes.SCRIPTS)]),
    }
    cap = {"KVCACHED_MAX_CACHED_TOKENS": load["cap"]} if load["cap"] else {}
    return processes.on_host_device(folder, "16GiB", **more, **cap)


def measure(arm: str, load: Load, model: Path, before: Path | None) -> Load:
    """Run a load once in an arm and return its figures."""
    job = {key: load[key] for key in load if key not in ("arms", "name", "cap")}
    job |= {"model": str(model), "connector": arm not in (PLAIN, ALONE)}
    with tempfile.TemporaryDirectory(prefix="kvpatch-bench-") as folder:
        inside = environment(arm, load, Path(folder), before)
        return processes.call("harness.bench.null_engine:run", job, Path(folder), inside)


@contextmanager
def tree_of(commit: str) -> Iterator[Path | None]:
    """A tree with the files of a commit; None without one."""
    if not commit:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvpatch-before-") as folder:
        packed = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit, "kvpatch"], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        yield Path(folder)


def arms_of(load: Load, commit: str) -> tuple[str, ...]:
    """Return the arms of a load, there and back; what has no noise runs once."""
    arms = load["arms"]
    if commit and OURS in arms:
        arms = (*arms, BEFORE)
    return tuple(arms)


def begun(output: Path, before: str) -> list[Load]:
    """Return the loads that were measured before, of the same kvpatch."""
    if not output.exists():
        return []
    return [
        row
        for row in json.loads(output.read_text())["rows"]
        if row["before"] == before and _has_this_kvpatch(row["commit"])
    ]


def _has_this_kvpatch(commit: str) -> bool:
    since = commit.removesuffix(provenance.CHANGED)
    changed = subprocess.run(
        ["git", "-C", str(ROOT), "diff", "--quiet", since, "--", "kvpatch/*.py"], check=False
    )
    return not changed.returncode


def main(arguments: list[str]) -> int:
    """Run the loads and write the result file."""
    parser = console.parser("scripts/bench steps", __doc__ or "")
    parser.add_argument("--before", default="", metavar="COMMIT", help="an arm with its kvpatch")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="loads named so")
    parser.add_argument("--arms", default="", metavar="TEXT", help="only arms with this in them")
    parser.add_argument("--repeats", type=int, default=2, help="of every arm (default: 2)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the result goes")
    parser.add_argument("--go-on", action="store_true", help="keep what was measured before")
    chosen = parser.parse_args(arguments)
    whole = not (chosen.only or chosen.arms)
    output = chosen.output or (RESULTS if whole else SCRATCH) / "steps.json"
    head = provenance.header(" ".join(["scripts/bench steps", *arguments]))
    model = kept_model(7, print, KV_HEADS)
    loads = [
        one for one in LOADS if not chosen.only or any(text in one["name"] for text in chosen.only)
    ]
    rows = begun(output, chosen.before) if chosen.go_on else []
    done = {row["load"] for row in rows}
    with tree_of(chosen.before) as before:
        for load in (one for one in loads if one["name"] not in done):
            arms = [arm for arm in arms_of(load, chosen.before) if chosen.arms in arm]
            found: dict[str, list[Load]] = {arm: [] for arm in arms}
            for repeat in range(chosen.repeats):
                for arm in arms if repeat % 2 == 0 else reversed(arms):
                    found[arm].append(measure(arm, load, model, before))
                    print(f"{load['name']}: {arm}: {found[arm][-1]}", flush=True)
            row = {"load": load["name"], "blocks": load["blocks"], "arms": found}
            rows.append({**row, "commit": head["commit"], "before": chosen.before})
            provenance.write({**head, "before": chosen.before, "rows": rows}, output)
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
