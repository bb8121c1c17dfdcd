"""scripts/mutate: small faults in the core modules, and whether the nearest unit tests notice.

    scripts/mutate                        every module; docs/results/mutation.json
    scripts/mutate fence/hooks eviction   modules whose path has one of these in it
    scripts/mutate --list gate.py         the mutants, without running anything

A survivor is equivalent (``verdicts.EQUIVALENT``), seen elsewhere (``verdicts.ELSEWHERE``), or
open: a test is missing.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from harness import console
from harness.mutation import verdicts
from harness.mutation.modules import MODULES, nearest
from harness.mutation.mutants import Mutant, mutants
from harness.mutation.runner import ROOT, Module, scratch_tree, warm

RESULTS = ROOT / "docs/results/mutation.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if a survivor has no verdict."""
    summary, _, description = (__doc__ or "").partition("\n\n")
    options = console.parser("scripts/mutate", f"{summary}\n\n{description}")
    options.add_argument("modules", nargs="*", help="parts of paths; all modules by default")
    options.add_argument("--list", action="store_true", help="print the mutants and stop")
    options.add_argument("--jobs", type=int, default=2, help="processes; default 2")
    options.add_argument("--open", action="store_true", help="try only survivors that are open")
    chosen = options.parse_args(argv)
    paths = [
        path
        for path in MODULES
        if not chosen.modules or any(part in path for part in chosen.modules)
    ]
    if not paths:
        options.error(f"no module's path has {' or '.join(chosen.modules)} in it")
    if chosen.list:
        for path in paths:
            for mutant in _mutants(path):
                print(f"{path}:{mutant.line}: {mutant.id}")
        return 0
    screen = console.Screen("scripts/mutate")
    return console.run(screen, lambda: _run(screen, paths, chosen.jobs, chosen.open))


def _mutants(path: str) -> list[Mutant]:
    return mutants((ROOT / path).read_text())


def _run(screen: console.Screen, paths: Sequence[str], jobs: int, only_open: bool) -> int:
    left = 0
    for path in paths:
        found = _mutants(path)
        known = _results().get(path, {}).get("survivors") if only_open else None
        verdict = {} if known is None else {one["mutant"]: one["verdict"] for one in known}
        tried = [one for one in found if known is None or verdict.get(one.id) == "open"]
        noticed = _noticed_of(path, tried, jobs)
        survivors = [
            one for one in found if (one.id not in noticed if one in tried else one.id in verdict)
        ]
        entry = _entry(path, found, survivors)
        still_open = [one for one in entry["survivors"] if one["verdict"] == "open"]
        left += len(still_open)
        screen.say(f"{path}: {len(found)} mutants, {len(survivors)} not noticed by unit tests")
        for one in still_open:
            screen.say(f"  line {one['line']}: {one['mutant']}", style="red")
        names = {mutant.id for mutant in found}
        for name in (name for name in verdicts.of(path) if name not in names):
            screen.say(f"  a verdict for no mutant: {name}", style="yellow")
        _write(_results() | {path: entry})  # another module may have been written meanwhile
    return 1 if left else 0


def _results() -> dict[str, Any]:
    """Return what is known so far, by module."""
    return json.loads(RESULTS.read_text())["modules"] if RESULTS.is_file() else {}


def _noticed_of(path: str, tried: Sequence[Mutant], jobs: int) -> set[str]:
    jobs = min(jobs, len(tried))
    parts = [[*tried[index::jobs]] for index in range(jobs)]
    with ProcessPoolExecutor(jobs or 1) as pool:
        return set().union(*pool.map(_noticed, [path] * jobs, parts))


def _noticed(path: str, tried: Sequence[Mutant]) -> set[str]:
    warm(nearest(ROOT, path))
    with scratch_tree() as tree:
        module = Module(tree, path, nearest(tree, path))
        noticed = {mutant.id for mutant in tried if module.notices(mutant)}
        module.check()  # the environment may have been changed meanwhile
        return noticed


def _entry(path: str, found: Sequence[Mutant], survivors: Sequence[Mutant]) -> dict[str, Any]:
    known = verdicts.of(path)
    listed = [
        {"mutant": one.id, "line": one.line} | known.get(one.id, {"verdict": "open", "why": ""})
        for one in survivors
    ]
    return {
        "mutants": len(found),
        "noticed": len(found) - len(survivors),
        "tests": nearest(ROOT, path),
        "survivors": listed,
    }


def _write(modules: dict[str, Any]) -> None:
    """Write the results, by module, with their sums first."""
    ordered = {path: modules[path] for path in MODULES if path in modules}
    count: Counter[str] = Counter(mutants=0, noticed=0, equivalent=0, elsewhere=0, open=0)
    for entry in ordered.values():
        count.update(mutants=entry["mutants"], noticed=entry["noticed"])
        count.update(one["verdict"] for one in entry["survivors"])
    real = count["mutants"] - count["equivalent"]
    share = math.floor(1000 * count["noticed"] / real) / 10 if real else 0.0
    summary = {**count, "noticed_of_not_equivalent_percent": share}
    text = json.dumps({"command": "scripts/mutate", "all": summary, "modules": ordered}, indent=1)
    RESULTS.write_text(text + "\n")
