"""Runs a suite, without kvpatch or with it, in a process of its own."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness import processes
from harness.console import HarnessError
from harness.upstream import OUTCOMES, downloads
from harness.upstream.suites import Suite
from kvpatch import environ

LIMIT = 1800  # seconds of a suite
TEST = 60  # seconds of a test


@dataclass(frozen=True)
class Outcome:
    """What became of a test: pytest's word, and the error in a line."""

    outcome: str
    words: str = ""


@dataclass(frozen=True)
class Run:
    """A run of a suite."""

    seconds: float
    tests: dict[str, Outcome]


def environment(suite: Suite, patched: bool, folder: Path) -> dict[str, str]:
    """Return the environment of a run: a host device of its own, and no network."""
    made = downloads.made()
    found = processes.on_host_device(
        folder,
        "2GiB",
        **processes.ONE_THREAD,
        KVPATCH="1" if patched else "0",
        HF_HOME=str(made / "hub"),
        TRANSFORMERS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    if suite.beside:
        found |= {switch.name: "true" for switch in environ.KVCACHED_SWITCHES}
    # vLLM's tests import each other by the name "tests", and there is a folder of it here too.
    # kvcached's folder has its modules as well, without the extension: the installed are tested.
    tests = (made / suite.source,) if suite.source == "vllm" else ()
    path = (*tests, found["PYTHONPATH"], made / "packages")
    return found | {
        "PYTHONPATH": ":".join(map(str, path)),
        OUTCOMES: str(folder / "outcomes.json"),
    }


def command(suite: Suite, patched: bool) -> list[str]:
    """Return the pytest of a run."""
    words = [sys.executable, "-m", "pytest", "-q", "--tb=native", "--continue-on-collection-errors"]
    words += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "harness.upstream.outcomes"]
    words += ["--timeout", str(TEST), "--timeout-method", "signal"]
    if patched or suite.beside:
        words += ["-p", suite.part]
    for name in suite.left_out:
        words += ["--deselect" if "::" in name else "--ignore", name]
    return [*words, *suite.tests]


def run(suite: Suite, patched: bool, folder: Path) -> Run:
    """Run a suite.

    Args:
        suite: of ``suites.SUITES``.
        patched: with kvpatch.
        folder: for the host device, the log and the outcomes; of this run alone.

    Raises:
        HarnessError: it did not come to its end.
    """
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    begun = time.monotonic()
    with log.open("w") as file:
        try:
            status = subprocess.run(
                command(suite, patched),
                cwd=downloads.made() / suite.source / suite.folder,
                env=environment(suite, patched, folder),
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    if status not in (0, 1):  # of pytest: all passed, or some failed
        raise HarnessError(f"{suite.name} ended with {status}: {log.read_text()[-2000:]}")
    found = json.loads((folder / "outcomes.json").read_text())
    return Run(time.monotonic() - begun, {test: Outcome(**one) for test, one in found.items()})
