"""scripts/matrix: recomputes the compatibility matrix, from cheap to dear.

    scripts/matrix shapes                        every inspected release, from its sources
    scripts/matrix shapes 0.26.0 --archives DIR  one release, from downloaded wheels
    scripts/matrix engine                        every validated release, on real engines
    scripts/matrix engine 0.28.0 --model "full attention"
    scripts/matrix engine --feature fp8          with more turned on; "none" for the cells without
    scripts/matrix engine --synchronous          with synchronous scheduling, where a GPU's is not
    scripts/matrix engine --missing              only cells without a recorded run that was right
    scripts/matrix engine --old                  only cells whose run is old
    scripts/matrix land                          the engines that today's changes ask for: of each
                                                 unit of code that changed, the newest and the
                                                 oldest release that executes it
    scripts/matrix cover                         what a tagged version needs: each pair of values
                                                 of two axes, and each patch set, in a fresh run
    scripts/matrix engine 0.26.0                 a release that is not validated yet
    scripts/matrix try 0.32.0 --feature EAGLE    cells with more turned on that are refused until
                                                 they ran: in a copy of the checkout that admits
                                                 them; those that were right are then admitted
    scripts/matrix tried 0.33.0                  what is no axis of the matrix, such as the host
                                                 pool, and pairs of settings that people turn on:
                                                 one engine for each connector
    scripts/matrix admit                         renew what the recorded runs admit
    scripts/matrix plain 0.28.0                  plain vLLM in what is not validated: where it ends
                                                 by itself, no engine on a CPU can validate a cell
    scripts/matrix bytes                         tagged blocks, from vLLM 0.29 on
    scripts/matrix ascend                        vllm-ascend on the ACL emulator, in the environment
                                                 of scripts/environment ascend-0.23.0
    scripts/matrix ages                          how old the recorded runs are, and what a landing
                                                 and a tag lack
    scripts/matrix repair                        after a merge that left out lists of units: takes
                                                 them from the history
    scripts/matrix without                       engines of 0.32.0 without one row each
    scripts/matrix without kvcached_version.block_pool       one row

Results go to docs/results/matrix, those without a row to docs/results; ``python -m kvpatch matrix``
prints the verdicts and scripts/docs writes the tables. Exit status 1: a patch whose target is not
what its row says, a seam with a hole, a cell that starts without a run, one that got worse, or a
landing that lacks a run. Runs are recorded of committed code only.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from harness import ascend, console, provenance
from harness.console import HarnessError
from harness.engines.plugins import UNTIL_IT_RAN
from harness.engines.runs import Device
from harness.evidence import ages
from harness.matrix import (
    admission,
    axes,
    cells,
    derive,
    npu,
    npus,
    plain,
    record,
    recorded,
    shapes,
    sources,
    tagged,
    trial,
    without,
    without_rows,
)
from kvpatch import admitted, supported
from kvpatch.matrix.verdicts import LAYOUTS, NONE, RUNNERS, Cell, Kind, counts
from kvpatch.version import VERSION

BEGUN = time.monotonic()
COMMANDS = {"synchronous": "engine --synchronous"}
AXES = ("runner", "layout", "connector", "model")


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[matrix {time.monotonic() - BEGUN:6.1f}s] {text}", flush=True)


def in_words(cell: Cell) -> str:
    """Return a cell of a release."""
    words = f"{cell.connector}, {cell.runner}, {cell.layout}, {cell.model}"
    return words if cell.feature == NONE else f"{words}, {cell.feature}"


def compute_signatures(arguments: argparse.Namespace) -> int:
    """Record what each release's sources have at every target; print the rows that are red."""
    wanted = [("vllm", version) for version in arguments.releases or shapes.releases("vllm")]
    for package in shapes.PACKAGES[1:]:
        wanted += [(package, version) for version in shapes.releases(package)]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        jobs = {
            release: pool.submit(record.record_signatures, *release, arguments.archives)
            for release in wanted
        }
        for count, (release, job) in enumerate(jobs.items(), 1):
            made = job.result()
            present = sum(one is not None for one in made.targets.values())
            say(
                f"{count}/{len(jobs)} {' '.join(release)}: "
                f"{present} of {len(made.targets)} targets ({made.archive})"
            )
    derive.forget()
    return report_rows() | report_cells()


def compute_engines(arguments: argparse.Namespace) -> int:
    """Run every cell of the engine level that was selected, and record its outcome."""
    wanted = arguments.releases or supported.validated()
    old = old_cells(level_of(arguments)) if arguments.old else set()
    selected = {
        release: [cell for cell in axes.cells(release) if wanted_cell(cell, arguments, old)]
        for release in wanted
    }
    return run_cells(selected, arguments)


def old_cells(level: str) -> set[Cell]:
    """Return the cells whose recorded run of a level is old."""
    found = ages.Evidence(ages.runs())
    old = (one for one in found.ran if one.run.level == level and found.age(one) is ages.Age.OLD)
    return {one.cell for one in old}


def run_cells(selected: Mapping[str, Iterable[Cell]], arguments: argparse.Namespace) -> int:
    """Run cells by their release, releases beside each other; record the outcome of each."""
    if provenance.commit().endswith(provenance.CHANGED):
        raise HarnessError("runs are recorded of committed code only: commit first")
    with ThreadPoolExecutor(arguments.jobs or room_for_engines()) as pool:
        jobs = [
            pool.submit(run_release, release, cells_of, arguments)
            for release, cells_of in selected.items()
            if cells_of
        ]
        wrong = sum(job.result() for job in jobs)
    record.tidy()
    derive.forget()
    return int(wrong > 0) | report_cells()


def land(arguments: argparse.Namespace) -> int:
    """Run the engines that a landing lacks, until it lacks none or none of them helps."""
    tried: set[Cell] = set()
    status = 0
    while True:
        derive.forget()
        found = ages.Evidence(ages.runs())
        chosen = [one for one in found.landing() if one.cell not in tried]
        wanted = sorted(found.wanted())
        say(f"{len(wanted)} units and releases without a fresh run: {len(chosen)} engines")
        for unit, vllm in wanted[:3]:  # the last few are those that no engine may execute any more
            say(f"    of {unit} on {vllm}")
        for one in chosen:
            say(f"    {one.cell.vllm}: {in_words(one.cell)}")
        if arguments.list or not chosen:
            return status
        tried |= {one.cell for one in chosen}
        on_host = [one.cell for one in chosen if one.run.level != recorded.NPU]
        status |= run_cells(by_release(on_host), arguments)
        if len(on_host) < len(chosen):
            status |= compute_ascend(arguments)


def cover(arguments: argparse.Namespace) -> int:
    """Run the engines of the cover of all pairs that have no fresh run."""
    chosen, lacking = covering(ages.Evidence(ages.runs()))
    say(f"{len(chosen)} engines cover all pairs, {len(lacking)} of them have no fresh run")
    if arguments.list:
        for cell in lacking:
            say(f"    {cell.vllm}: {in_words(cell)}")
        return int(bool(lacking))
    return run_cells(by_release(lacking), arguments)


def covering(found: ages.Evidence) -> tuple[list[Cell], list[Cell]]:
    """Return few cells that ran with every pair of values of two axes that any cell ran with.

    Of the releases with one patch set, the newest. And those of them that have no fresh run.
    """
    ran = [
        cell
        for cell, verdict in derive.verdicts().items()
        if verdict.kind is Kind.VALIDATED and derive.ran_right(cell)
    ]
    newest = {ages.patch_set(release): release for release in supported.validated()}
    known = set(newest.values())
    chosen = ages.pairs(cell for cell in ran if cell.vllm in known)
    fresh = {one.cell for one in found.fresh() if one.run.level == recorded.LEVELS[0]}
    return chosen, [cell for cell in chosen if cell not in fresh]


def run_tried(arguments: argparse.Namespace) -> int:
    """Run what is no axis of the matrix, alone and in pairs, and admit what was right."""
    right = {cell for cell in recorded.runs() if derive.ran_right(cell)}
    chosen = set(arguments.setting or ())
    wanted = [
        cell
        for release in arguments.releases or supported.validated()
        for cell in axes.tried_cells(release)
        if derive.missing(cell) is None
        and derive.refusal(cell, lifted=UNTIL_IT_RAN) is None
        and not (arguments.missing and cell in right)
        and (not chosen or chosen & {cell.feature, *axes.settings_of(cell)})
    ]
    return run_cells(by_release(wanted), arguments) | admit(arguments)


def by_release(cells_: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return cells by their release."""
    found: dict[str, list[Cell]] = {}
    for cell in cells_:
        found.setdefault(cell.vllm, []).append(cell)
    return found


def engines_of(release: str, arguments: argparse.Namespace) -> cells.Engines:
    """Return what runs engines of a release, in a folder of its own."""
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="kvpatch-matrix-"))
    return cells.Engines(release, folder / release, lambda text: say(f"{release}: {text}"))


def run_release(release: str, cells_of: Iterable[Cell], arguments: argparse.Namespace) -> int:
    """Run engines of one release; return how many of its cells are wrong."""
    say(f"{release}: environment")
    versions = cells.facts(release)
    runner = engines_of(release, arguments)
    wrong = 0
    for cell in cells_of:
        outcome = runner.compare(cell, level_of(arguments) == recorded.LEVELS[0])
        wrong += not outcome["right"]
        executed = outcome.pop("executed")
        words = "right" if outcome["right"] else outcome
        say(f"{release}: {in_words(cell)}: {words}")
        # At once: what was run stays when the rest is interrupted. A cell that is refused and was
        # never right stays as it is.
        is_tried = axes.only_admitted(cell) or cell.feature in axes.TRIED
        if outcome["right"] or cell in recorded.runs() or not is_tried:
            record_cell(level_of(arguments), cell, outcome, executed, versions)
    return wrong


def head_of(
    release: str, command: str, versions: dict[str, str], device: str = "host device"
) -> dict[str, Any]:
    """Return the head of a result file: the machine and the versions that engines ran on."""
    return {
        "vllm": release,
        "kvcached": supported.KVCACHED[-1],
        "kvpatch": VERSION,
        "date": datetime.date.today().isoformat(),
        "command": f"scripts/matrix {command}",
        "machine": f"{device}, {os.cpu_count()} cores, {platform.machine()}",
        "versions": versions,
    }


def record_cell(
    level: str,
    cell: Cell,
    outcome: dict[str, Any],
    executed: Mapping[str, str],
    versions: dict[str, str],
) -> None:
    """Record the outcome of one cell, with the machine and the versions it ran on."""
    head = head_of(cell.vllm, f"{COMMANDS.get(level, level)} {cell.vllm}", versions)
    run = {name: getattr(cell, name) for name in AXES}
    if cell.feature != NONE:
        run["feature"] = cell.feature
    record.record_run(level, head, run | outcome, executed)


def compute_plain(arguments: argparse.Namespace) -> int:
    """Run plain vLLM in the combinations that are not validated; record where it ends."""
    wanted = arguments.releases or supported.validated()
    with ThreadPoolExecutor(arguments.jobs or room_for_engines()) as pool:
        list(pool.map(lambda release: run_plain(release, arguments), wanted))
    derive.forget()
    return report_cells()


def run_plain(release: str, arguments: argparse.Namespace) -> None:
    """Run plain vLLM of one release and record with what it ended."""
    head = head_of(release, f"plain {release}", cells.facts(release))
    runner = engines_of(release, arguments)
    # One cell for each combination: connectors and layouts are not plain vLLM's.
    each = {
        plain.combination_of(cell): cell
        for cell, found in derive.verdicts(release).items()
        if found.kind in (Kind.NOT_VALIDATED, Kind.NO_CPU_ENGINE)
        and cell.feature in (arguments.feature or cells.FEATURES)
        and cell.model in (arguments.model or cells.MODELS)
        and cell.runner in (arguments.runner or RUNNERS)
    }
    for made, cell in each.items():
        if arguments.missing and made in plain.runs():
            continue
        outcome = runner.plain(cell)
        ended = cells.reason(outcome["failed"]) if "failed" in outcome else ""
        axes_of = {name: getattr(made, name) for name in ("runner", "model", "feature")}
        record.record_plain(head, axes_of | {"ended": ended})
        say(f"{release}: {', '.join(axes_of.values())}: {ended or 'ran to its end'}")


def try_features(arguments: argparse.Namespace) -> int:
    """Run cells that rules refuse until they ran, and admit those that were right."""
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="kvpatch-try-"))
    tree = trial.copy(folder / "tree")
    wanted = admission.tried(arguments.feature, arguments.releases, arguments.model or ())
    admission.write(wanted, tree)
    words = ["engine", *arguments.releases, "--missing", "--keep", str(folder / "engines")]
    for name in ("feature", "model", "connector", "layout", "runner"):
        for value in getattr(arguments, name) or ():
            words += [f"--{name}", value]
    words += ["--jobs", str(arguments.jobs)] if arguments.jobs else []
    environment = dict(os.environ, KVPATCH="0", PYTHONPATH=f"{tree}:{tree / 'scripts'}")
    try:
        command = [tree / ".venv/bin/python", "scripts/matrix", *words]
        subprocess.run(command, cwd=tree, env=environment, check=False)
    finally:  # what was run stays when the rest is interrupted
        for release in arguments.releases:
            for level in (recorded.LEVELS[0], recorded.FEATURES):
                trial.bring_back(release, tree, level)
        status = admit(arguments)
    return status or report_cells()


def admit(arguments: argparse.Namespace) -> int:
    """Admit the cells that the recorded runs show to be right; print what that changes."""
    derive.forget()
    before, now = admitted.table(), admission.earned()
    admission.write(now)
    derive.forget()
    for word, one, other in (("admitted", now, before), ("refused", before, now)):
        for cell in sorted(admission.cells_of(one) - admission.cells_of(other)):
            say(f"{word}: {', '.join(cell)}")
    return 0


def repair(_: argparse.Namespace) -> int:
    """Take lists of units that a merge left out from the history."""
    lost = record.repair()
    for name in lost:
        say(f"the list of units {name} is in no commit: take its runs from where it was recorded")
    return int(bool(lost))


def compute_bytes(arguments: argparse.Namespace) -> int:
    """Tag the blocks of releases and record whether a connector would copy them."""
    wrong = 0
    for release in arguments.releases or tagged.RELEASES:
        versions = cells.facts(release)
        for contiguous, layouts in tagged.LAYOUTS.items():
            with tempfile.TemporaryDirectory() as folder:
                found = tagged.look(release, contiguous, Device(Path(folder)), Path(folder))
            for kind, (model, _) in tagged.KINDS.items():
                right = all(tagged.right(found["found"], kind, layout) for layout in layouts)
                layout = LAYOUTS[0] if contiguous else LAYOUTS[1]
                cell = Cell(release, "V2", layout, "Offloading", model)
                outcome = {"right": right, "kv_layouts": list(layouts)}
                record_cell("bytes", cell, outcome, {}, versions)
                say(f"{release}: {layout}, {model}: {'right' if right else found['found']}")
                wrong += not right
    derive.forget()
    return int(wrong > 0) | report_cells()


def compute_ascend(arguments: argparse.Namespace) -> int:
    """Run the cells of vllm-ascend that start on the ACL emulator, and record their outcome."""
    wrong = 0
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="kvpatch-ascend-"))
    for release, cell in npus.cells():
        if release not in (arguments.releases or ascend.RELEASES):
            continue
        if npus.refusal(release, cell) is not None:
            continue
        place = folder / release / cell.connector.replace(" ", "-")
        place.mkdir(parents=True)
        outcome = npu.compare(release, cell.connector, place)
        failed = [what for what, right in outcome["checks"].items() if not right]
        words = f"not: {'; '.join(failed)}" if failed else "right"
        say(f"vllm-ascend {release}: {in_words(cell)}: {words}")
        wrong += bool(failed)
        record.record_run(
            recorded.NPU,
            {"vllm": cell.vllm, "vllm-ascend": release}
            | head_of(cell.vllm, f"ascend {release}", outcome.pop("versions"), "ACL emulator"),
            {name: getattr(cell, name) for name in AXES}
            | {name: outcome[name] for name in ("right", "checks", "settings")},
            outcome["executed"],
        )
    derive.forget()
    return int(wrong > 0) | report_cells()


def report_ages(arguments: argparse.Namespace) -> int:
    """Print how old the recorded runs are, and what a landing and a tag lack."""
    found = ages.Evidence(ages.runs())
    for age, count in sorted(found.counts().items()):
        print(f"{count:6} {age.value}")
    lacking = sorted(found.wanted())
    for one in lacking[: None if arguments.all else 20]:
        print(f"without a fresh run on {one.vllm}: {one.unit}")
    chosen, old = covering(found)
    print(f"a landing lacks {len(found.landing())} engines, for {len(lacking)} units and releases")
    print(f"a tag lacks {len(old)} of {len(chosen)} engines")
    print(f"{len(found.unseen())} functions of kvpatch that no recorded engine executes")
    return int(bool(lacking))


def leave_rows_out(arguments: argparse.Namespace) -> int:
    """Run engines without one row each and record what was seen."""
    if unknown := [row for row in arguments.rows if row not in without_rows.ROWS]:
        sys.exit(f"matrix: not rows of the newest release: {', '.join(unknown)}")
    folder = arguments.keep or tempfile.mkdtemp(prefix="kvpatch-without-")
    engines = without.Engines(Path(folder), say)
    recorded = without.read().get("rows", {})
    for row in arguments.rows or without_rows.ROWS:
        looks = without_rows.ROWS[row].looks
        if arguments.missing and without.is_recorded(recorded.get(row, []), looks):
            continue
        found = without.looked(engines, row, looks)
        for one in found:
            say(f"{row}: {one['load']}: {one['seen']}: {one['words']}")
        # At once: what was run stays when the rest is interrupted.
        without.record({row: found})
    return 0


def room_for_engines() -> int:
    """Return how many engines fit beside each other: a core and 6 GiB for each."""
    return int(max(1, min(os.cpu_count() or 1, psutil.virtual_memory().available // (6 << 30))))


def wanted_cell(cell: Cell, arguments: argparse.Namespace, old: set[Cell]) -> bool:
    """Return whether the engine level runs a cell: one that starts and was selected."""
    if (
        cell.connector not in (arguments.connector or cells.TRIALS)
        or cell.model not in (arguments.model or cells.MODELS)
        or cell.feature not in (arguments.feature or cells.FEATURES)
        or cell.layout not in (arguments.layout or LAYOUTS)
        or cell.runner not in (arguments.runner or RUNNERS)
        or derive.missing(cell) is not None
        or derive.refusal(cell, tried=cell.vllm in arguments.releases) is not None
    ):
        return False
    if arguments.old:
        return cell in old
    right = {run.level for run in recorded.runs().get(cell, ()) if run.right}
    return not (arguments.missing and level_of(arguments) in right)


def level_of(arguments: argparse.Namespace) -> str:
    """Return the level that the engines' outcomes are recorded at."""
    synchronous = getattr(arguments, "synchronous", False)
    return recorded.LEVELS[1] if synchronous else recorded.LEVELS[0]


def report_rows() -> int:
    """Print the rows whose target is not what they say in their range, and holes in seams."""
    red = 0
    (kvcached,) = shapes.releases("kvcached").values()
    for vllm in shapes.releases("vllm").values():
        for row, verdict in shapes.check_rows(vllm, kvcached).items():
            if shapes.is_red(verdict):
                red += 1
                print(f"RED vllm {vllm.version}, {row}: {verdict.reason}")
        for hole in shapes.holes(vllm.version):
            red += 1
            print(f"RED {hole}")
    print(f"{red} red rows in {len(shapes.releases('vllm'))} releases of vLLM")
    return int(red > 0)


def report_cells() -> int:
    """Print how many cells have each verdict, and those that no matrix may have."""
    found = derive.verdicts()
    for kind, count in counts(found.values()).items():
        print(f"{count:6} {kind}")
    worse = derive.lost(found)
    for cell in worse:
        why = found[cell].why if cell in found else "not in the matrix"
        print(f"WORSE {json.dumps(vars(cell))}: {why}")
    for cell, verdict in found.items():
        if verdict.kind.red:
            print(f"RED {json.dumps(vars(cell))}: {verdict.kind.value}, {verdict.why}")
    return int(bool(worse) or any(verdict.kind.red for verdict in found.values()))


def main() -> int:
    """Run one level."""
    parser = console.parser("scripts/matrix", __doc__ or "")
    levels = parser.add_subparsers(dest="level", required=True)
    which, how, validated = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    which.add_argument("--connector", action="append", help="one of them (default: all)")
    which.add_argument("--model", action="append", help="one kind (default: all)")
    which.add_argument("--layout", action="append", choices=LAYOUTS)
    which.add_argument("--runner", action="append", choices=RUNNERS)
    how.add_argument("--jobs", type=int, help="releases at a time (default: what has room)")
    how.add_argument("--keep", type=Path, help="a folder for logs and results")
    validated.add_argument("releases", nargs="*", help="of vLLM (default: all that are validated)")
    level = levels.add_parser("shapes", help="each row's target in each release's sources")
    level.add_argument("releases", nargs="*", help="of vLLM (default: all that are inspected)")
    level.add_argument("--archives", type=Path, help="a folder of downloaded wheels and sdists")
    level.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    level.set_defaults(compute=compute_signatures)
    engines = [which, how, validated]
    level = levels.add_parser("engine", help="real engines on the host device", parents=engines)
    level.add_argument("--feature", action="append", help="one of them (default: all, and none)")
    only = level.add_mutually_exclusive_group()
    only.add_argument("--missing", action="store_true", help="only cells without a right run")
    only.add_argument("--old", action="store_true", help="only cells whose run is old")
    level.add_argument("--synchronous", action="store_true", help="scheduling")
    level.set_defaults(compute=compute_engines)
    what = "real engines with what is refused until it ran"
    level = levels.add_parser("try", help=what, parents=[which, how])
    level.add_argument("releases", nargs="+", help="of vLLM")
    # With nothing else turned on, the kinds of model that are admitted cell by cell.
    kinds = {one.name for one in axes.MODELS if one.admitted}
    waiting = [one.name for one in axes.FEATURES if one.admitted or kinds & set(one.models)]
    level.add_argument("--feature", action="append", required=True, choices=waiting)
    level.set_defaults(compute=try_features)
    what = "plain vLLM in what is not validated"
    level = levels.add_parser("plain", help=what, parents=[how, validated])
    level.add_argument("--feature", action="append", help="one of them (default: all, and none)")
    level.add_argument("--model", action="append", help="one kind (default: all)")
    level.add_argument("--runner", action="append", choices=RUNNERS)
    level.add_argument("--missing", action="store_true", help="only what is not recorded")
    level.set_defaults(compute=compute_plain)
    level = levels.add_parser("bytes", help="tagged blocks, without an engine")
    level.add_argument("releases", nargs="*", help="of vLLM (default: all from 0.29 on)")
    level.set_defaults(compute=compute_bytes)
    level = levels.add_parser("without", help="real engines, each without one row")
    level.add_argument("rows", nargs="*", help="ids (default: every row of the newest release)")
    level.add_argument("--missing", action="store_true", help="only looks that are not recorded")
    level.add_argument("--keep", type=Path, help="a folder for logs and results, which are reused")
    level.set_defaults(compute=leave_rows_out)
    level = levels.add_parser("ascend", help="vllm-ascend's engines on the ACL emulator")
    level.add_argument("releases", nargs="*", help="of vllm-ascend (default: all)")
    level.add_argument("--keep", type=Path, help="an empty folder for models and devices")
    level.set_defaults(compute=compute_ascend)
    what = "what is no axis, and pairs of settings"
    level = levels.add_parser("tried", help=what, parents=[how, validated])
    level.add_argument(
        "--setting", action="append", help="one of the two, or both as 'A + B' (default: all)"
    )
    level.add_argument("--missing", action="store_true", help="only cells without a right run")
    level.set_defaults(compute=run_tried)
    for name, what, compute in (
        ("land", "the engines that today's changes ask for", land),
        ("cover", "the engines that a tagged version needs", cover),
    ):
        level = levels.add_parser(name, help=what, parents=[how])
        level.add_argument("--list", action="store_true", help="print them, and run none")
        level.set_defaults(compute=compute, releases=[])
    level = levels.add_parser("ages", help="how old the recorded runs are")
    level.add_argument("--all", action="store_true", help="every unit that a landing lacks")
    level.set_defaults(compute=report_ages)
    level = levels.add_parser("admit", help="what the recorded runs admit")
    level.set_defaults(compute=admit)
    level = levels.add_parser("repair", help="lists of units that a merge left out")
    level.set_defaults(compute=repair)
    arguments = parser.parse_args()
    try:
        status: int = arguments.compute(arguments)
    except sources.NoSuchRelease as error:
        sys.exit(f"matrix: {error}")
    return status
