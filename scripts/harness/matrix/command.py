"""scripts/matrix: recomputes the compatibility matrix, from cheap to dear.

    scripts/matrix shapes                        every inspected release, from its sources
    scripts/matrix shapes 0.26.0 --archives DIR  one release, from downloaded wheels
    scripts/matrix engine                        every validated release, on real engines
    scripts/matrix engine 0.28.0 --model "full attention"
    scripts/matrix engine --feature fp8          with more turned on; "none" for the cells without
    scripts/matrix engine --synchronous          with synchronous scheduling, where a GPU's is not
    scripts/matrix engine --missing              only cells without a run of today's code
    scripts/matrix engine --stale                only cells that ran on other code than today's
    scripts/matrix engine 0.26.0                 a release that is not validated yet
    scripts/matrix try 0.32.0 --feature EAGLE    cells with more turned on that are refused until
                                                 they ran: in a copy of the checkout that admits
                                                 them; those that were right are then admitted
    scripts/matrix admit                         renew what the recorded runs admit
    scripts/matrix plain 0.28.0                  plain vLLM in what is not validated: where it ends
                                                 by itself, no engine on a CPU can validate a cell
    scripts/matrix bytes                         tagged blocks, from vLLM 0.29 on
    scripts/matrix ascend                        vllm-ascend on the ACL emulator, in the environment
                                                 of scripts/environment ascend-0.23.0
    scripts/matrix stale                         cells whose code changed since they ran
    scripts/matrix without                       engines of 0.32.0 without one row each
    scripts/matrix without told.block_pool       one row

Results go to kvpatch/matrix/data, those without a row to docs/results; ``python -m kvpatch matrix``
prints the verdicts and scripts/docs writes the tables. Exit status 1: a patch whose target is not
what its row says, a seam with a hole, a cell that starts without a run, one that got worse, or one
that is stale.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from harness import ascend, console
from harness.engines.runs import Device
from harness.matrix import (
    admission,
    cells,
    npu,
    record,
    sources,
    tagged,
    trial,
    without,
    without_rows,
)
from kvpatch import admitted, supported
from kvpatch.matrix import axes, evidence, plain, signatures, verdicts
from kvpatch.matrix import npu as on_npus
from kvpatch.version import VERSION

BEGUN = time.monotonic()
COMMANDS = {"synchronous": "engine --synchronous"}
AXES = ("runner", "layout", "connector", "model")
Ran = tuple[str, axes.Cell]  # a run's level and its cell


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[matrix {time.monotonic() - BEGUN:6.1f}s] {text}", flush=True)


def in_words(cell: axes.Cell) -> str:
    """Return a cell of a release."""
    words = f"{cell.connector}, {cell.runner}, {cell.layout}, {cell.model}"
    return words if cell.feature == axes.NONE else f"{words}, {cell.feature}"


def compute_signatures(arguments: argparse.Namespace) -> int:
    """Record what each release's sources have at every target; print the rows that are red."""
    wanted = [("vllm", version) for version in arguments.releases or signatures.releases("vllm")]
    for package in signatures.PACKAGES[1:]:
        wanted += [(package, version) for version in signatures.releases(package)]
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
    verdicts.forget()
    return report_rows() | report_cells()


def compute_engines(arguments: argparse.Namespace) -> int:
    """Run every cell of the engine level and record its outcome."""
    wanted = arguments.releases or supported.validated()
    stale = {(level, cell) for level, cell, _ in evidence.stale()}
    with ThreadPoolExecutor(arguments.jobs or room_for_engines()) as pool:
        wrong = sum(pool.map(lambda release: run_release(release, arguments, stale), wanted))
    verdicts.forget()
    return int(wrong > 0) | report_cells()


def run_release(release: str, arguments: argparse.Namespace, stale: set[Ran]) -> int:
    """Run the engines of one release; return how many of its cells are wrong."""
    say(f"{release}: environment")
    versions = cells.facts(release)
    folder = arguments.keep or tempfile.mkdtemp(prefix="kvpatch-matrix-")
    runner = cells.Engines(release, Path(folder) / release, lambda text: say(f"{release}: {text}"))
    wrong = 0
    for cell in axes.cells(release):
        if not wanted_cell(cell, arguments, stale):
            continue
        outcome = runner.compare(cell, not arguments.synchronous)
        wrong += not outcome["right"]
        patches = outcome.pop("patches", ())
        words = "right" if outcome["right"] else outcome
        say(f"{release}: {in_words(cell)}: {words}")
        # At once: what was run stays when the rest is interrupted. A cell that is refused and was
        # never right stays as it is.
        if outcome["right"] or cell in evidence.runs() or not axes.only_admitted(cell):
            record_cell(level_of(arguments), cell, outcome, patches, versions)
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
    cell: axes.Cell,
    outcome: dict[str, Any],
    patches: Iterable[str],
    versions: dict[str, str],
) -> None:
    """Record the outcome of one cell, with the machine and the versions it ran on."""
    head = head_of(cell.vllm, f"{COMMANDS.get(level, level)} {cell.vllm}", versions)
    run = {name: getattr(cell, name) for name in AXES}
    if cell.feature != axes.NONE:
        run["feature"] = cell.feature
    record.record_run(level, head, run | outcome, patches)


def compute_plain(arguments: argparse.Namespace) -> int:
    """Run plain vLLM in the combinations that are not validated; record where it ends."""
    wanted = arguments.releases or supported.validated()
    with ThreadPoolExecutor(arguments.jobs or room_for_engines()) as pool:
        list(pool.map(lambda release: run_plain(release, arguments), wanted))
    verdicts.forget()
    return report_cells()


def run_plain(release: str, arguments: argparse.Namespace) -> None:
    """Run plain vLLM of one release and record with what it ended."""
    head = head_of(release, f"plain {release}", cells.facts(release))
    folder = arguments.keep or tempfile.mkdtemp(prefix="kvpatch-plain-")
    runner = cells.Engines(release, Path(folder) / release, lambda text: say(f"{release}: {text}"))
    # One cell for each combination: connectors and layouts are not plain vLLM's.
    each = {
        plain.combination_of(cell): cell
        for cell, found in verdicts.verdicts(release).items()
        if found.kind in (verdicts.Kind.NOT_VALIDATED, verdicts.Kind.NO_CPU_ENGINE)
        and cell.feature in (arguments.feature or cells.FEATURES)
        and cell.model in (arguments.model or cells.MODELS)
        and cell.runner in (arguments.runner or axes.RUNNERS)
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
            for level in (evidence.LEVELS[0], evidence.FEATURES):
                trial.bring_back(release, tree, level)
        status = admit(arguments)
    return status or report_cells()


def admit(arguments: argparse.Namespace) -> int:
    """Admit the cells that the recorded runs show to be right; print what that changes."""
    verdicts.forget()
    before, now = admitted.table(), admission.earned()
    admission.write(now)
    verdicts.forget()
    for word, one, other in (("admitted", now, before), ("refused", before, now)):
        for cell in sorted(admission.cells_of(one) - admission.cells_of(other)):
            say(f"{word}: {', '.join(cell)}")
    return 0


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
                layout = axes.LAYOUTS[0] if contiguous else axes.LAYOUTS[1]
                cell = axes.Cell(release, "V2", layout, "Offloading", model)
                outcome = {"right": right, "kv_layouts": list(layouts)}
                record_cell("bytes", cell, outcome, found["patches"], versions)
                say(f"{release}: {layout}, {model}: {'right' if right else found['found']}")
                wrong += not right
    verdicts.forget()
    return int(wrong > 0) | report_cells()


def compute_ascend(arguments: argparse.Namespace) -> int:
    """Run the cells of vllm-ascend that start on the ACL emulator, and record their outcome."""
    wrong = 0
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="kvpatch-ascend-"))
    for release, cell in on_npus.cells():
        if release not in (arguments.releases or ascend.RELEASES):
            continue
        if on_npus.refusal(release, cell) is not None:
            continue
        place = folder / release / cell.connector.replace(" ", "-")
        place.mkdir(parents=True)
        outcome = npu.compare(release, cell.connector, place)
        failed = [what for what, right in outcome["checks"].items() if not right]
        words = f"not: {'; '.join(failed)}" if failed else "right"
        say(f"vllm-ascend {release}: {in_words(cell)}: {words}")
        wrong += bool(failed)
        record.record_run(
            evidence.NPU,
            {"vllm": cell.vllm, "vllm-ascend": release}
            | head_of(cell.vllm, f"ascend {release}", outcome.pop("versions"), "ACL emulator"),
            {name: getattr(cell, name) for name in AXES}
            | {name: outcome[name] for name in ("right", "checks", "settings")},
            outcome["patches"],
        )
    verdicts.forget()
    return int(wrong > 0) | report_cells()


def report_stale(arguments: argparse.Namespace) -> int:
    """Print the cells whose code changed since they ran; a version is tagged with none."""
    count = 0
    for level, cell, changed in evidence.stale():
        count += 1
        print(f"{level}: {cell.vllm}, {in_words(cell)}:")
        print(f"    {', '.join(changed)}")
    print(f"{count} stale cells")
    return int(count > 0)


def leave_rows_out(arguments: argparse.Namespace) -> int:
    """Run engines without one row each and record what was seen."""
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


def wanted_cell(cell: axes.Cell, arguments: argparse.Namespace, stale: set[Ran]) -> bool:
    """Return whether the engine level runs a cell: one that starts and was selected."""
    if (
        cell.connector not in (arguments.connector or cells.TRIALS)
        or cell.model not in (arguments.model or cells.MODELS)
        or cell.feature not in (arguments.feature or cells.FEATURES)
        or cell.layout not in (arguments.layout or axes.LAYOUTS)
        or cell.runner not in (arguments.runner or axes.RUNNERS)
        or verdicts.missing(cell) is not None
        or verdicts.refusal(cell, tried=cell.vllm in arguments.releases) is not None
    ):
        return False
    level = level_of(arguments)
    if arguments.stale:
        return (level, cell) in stale
    right = {run.level for run in evidence.runs().get(cell, ()) if run.right}
    return not (arguments.missing and level in right and (level, cell) not in stale)


def level_of(arguments: argparse.Namespace) -> str:
    """Return the level that the engines' outcomes are recorded at."""
    return "synchronous" if arguments.synchronous else "engine"


def report_rows() -> int:
    """Print the rows whose target is not what they say in their range, and holes in seams."""
    red = 0
    (kvcached,) = signatures.releases("kvcached").values()
    for vllm in signatures.releases("vllm").values():
        for row, verdict in signatures.check_rows(vllm, kvcached).items():
            if signatures.is_red(verdict):
                red += 1
                print(f"RED vllm {vllm.version}, {row}: {verdict.reason}")
        for hole in signatures.holes(vllm.version):
            red += 1
            print(f"RED {hole}")
    print(f"{red} red rows in {len(signatures.releases('vllm'))} releases of vLLM")
    return int(red > 0)


def report_cells() -> int:
    """Print how many cells have each verdict, and those that no matrix may have."""
    found = verdicts.verdicts()
    for kind, count in verdicts.counts(found.values()).items():
        print(f"{count:6} {kind}")
    worse = verdicts.lost(found)
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
    level = levels.add_parser("shapes", help="each row's target in each release's sources")
    level.add_argument("releases", nargs="*", help="of vLLM (default: all that are inspected)")
    level.add_argument("--archives", type=Path, help="a folder of downloaded wheels and sdists")
    level.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    level.set_defaults(compute=compute_signatures)
    level = levels.add_parser("engine", help="real engines on the host device")
    level.add_argument("releases", nargs="*", help="of vLLM (default: all that are validated)")
    level.add_argument("--connector", action="append", help="one of them (default: all)")
    level.add_argument("--model", action="append", help="one kind (default: all)")
    level.add_argument("--feature", action="append", help="one of them (default: all, and none)")
    level.add_argument("--layout", action="append", choices=axes.LAYOUTS)
    level.add_argument("--jobs", type=int, help="releases at a time (default: what has room)")
    level.add_argument("--runner", action="append", choices=axes.RUNNERS)
    which = level.add_mutually_exclusive_group()
    which.add_argument("--missing", action="store_true", help="only cells without a current run")
    which.add_argument("--stale", action="store_true", help="only cells whose run is not current")
    level.add_argument("--synchronous", action="store_true", help="scheduling")
    level.add_argument("--keep", type=Path, help="a folder for logs and results")
    level.set_defaults(compute=compute_engines)
    level = levels.add_parser("try", help="real engines with what is refused until it ran")
    level.add_argument("releases", nargs="+", help="of vLLM")
    # With nothing else turned on, the kinds of model that are admitted cell by cell.
    waiting = [one.name for one in axes.FEATURES if one.admitted or one.name == axes.NONE]
    level.add_argument("--feature", action="append", required=True, choices=waiting)
    level.add_argument("--model", action="append", help="one kind (default: all)")
    level.add_argument("--connector", action="append", help="one of them (default: all)")
    level.add_argument("--layout", action="append", choices=axes.LAYOUTS)
    level.add_argument("--runner", action="append", choices=axes.RUNNERS)
    level.add_argument("--jobs", type=int, help="releases at a time (default: what has room)")
    level.add_argument("--keep", type=Path, help="a folder for the copy, logs and results")
    level.set_defaults(compute=try_features)
    level = levels.add_parser("plain", help="plain vLLM in what is not validated")
    level.add_argument("releases", nargs="*", help="of vLLM (default: all that are validated)")
    level.add_argument("--feature", action="append", help="one of them (default: all, and none)")
    level.add_argument("--model", action="append", help="one kind (default: all)")
    level.add_argument("--runner", action="append", choices=axes.RUNNERS)
    level.add_argument("--missing", action="store_true", help="only what is not recorded")
    level.add_argument("--jobs", type=int, help="releases at a time (default: what has room)")
    level.add_argument("--keep", type=Path, help="a folder for logs and results")
    level.set_defaults(compute=compute_plain)
    level = levels.add_parser("admit", help="what the recorded runs admit")
    level.set_defaults(compute=admit)
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
    level = levels.add_parser("stale", help="cells whose code changed since they ran")
    level.set_defaults(compute=report_stale)
    arguments = parser.parse_args()
    try:
        status: int = arguments.compute(arguments)
    except sources.NoSuchRelease as error:
        sys.exit(f"matrix: {error}")
    return status
