"""Lanes: every test lies in exactly one folder of tests/, and carries its mark."""

import gc
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = (
    "harness.engines.fixtures",
    "harness.engines.refused",
    "harness.evidence.of_tests",
)

# Tests say for themselves what is on; what the caller's shell has set must not.
for _name in [name for name in os.environ if name.startswith(("KVPATCH", "KVCACHED", "ENABLE_KV"))]:
    del os.environ[_name]
os.environ["KVPATCH"] = "0"
# Nor is anything seen of the caller's home but what tools download, compile and are set up by.
for _name, _place in {
    "XDG_CACHE_HOME": ".cache",
    "PYENV_ROOT": ".pyenv",
    "GIT_CONFIG_GLOBAL": ".gitconfig",
    "PIP_CONFIG_FILE": ".config/pip/pip.conf",
}.items():
    if (_path := Path.home() / _place).exists():
        os.environ.setdefault(_name, str(_path))
for _name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
    os.environ.pop(_name, None)
HOME = os.environ["HOME"] = tempfile.mkdtemp(prefix="kvpatch-tests-home-")

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.json"  # seconds of a file's tests, as last recorded
# From "faults" to "objects" they are not in the default run, which would be too long with them.
LANES = (
    "unit",
    "wheel",
    "refusals",
    "engine",
    "faults",
    "long",
    "ascend",
    "gpu-start",
    "cuda",
    "npu",
    "versions",
    "upstream",
    "objects",
)


def lane_of(path: Path) -> str | None:
    """Return the lane whose folder ``path`` lies in, or None."""
    folders = path.relative_to(HERE).parts[:-1] if path.is_relative_to(HERE) else ()
    lanes = [folder for folder in folders if folder in LANES]
    return lanes[0] if len(lanes) == 1 and folders[0] == lanes[0] else None


def durations() -> dict[str, int]:
    """Return the seconds of each file, by the first part of its tests' ids."""
    return dict(json.loads(DURATIONS.read_text())) if DURATIONS.exists() else {}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"into {DURATIONS.name}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("record_durations"):
        took: Counter[str] = Counter()
        for report in chain.from_iterable(terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport):
                took[file_of(report.nodeid)] += report.duration
        found = durations() | {name: round(seconds) for name, seconds in took.items()}
        there = {name: found[name] for name in found if (config.rootpath / name).exists()}
        DURATIONS.write_text(json.dumps(there, indent=0, sort_keys=True) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Longest files first, so that no process is left with one; nobody knows about a new one.
    known = durations()
    items.sort(key=lambda item: -known.get(file_of(item.nodeid), math.inf))
    for item in items:
        lane = lane_of(item.path)
        if lane is None:
            raise pytest.UsageError(
                f"{item.nodeid} is in no lane: put it in one of tests/{{{','.join(LANES)}}}"
            )
        item.add_marker(lane)


def pytest_unconfigure() -> None:
    shutil.rmtree(HOME, ignore_errors=True)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays; every claim of a name collects


@pytest.fixture(autouse=True, scope="module")
def status_pages(tmp_path_factory):
    """Keep what a file's tests publish away from what others, and this machine's user, see.

    A refused engine, which some tests make, is told by ``kvpatch status`` for an hour.
    And this user's verdicts, which lift refusals, are kept away from the tests.
    """
    os.environ["KVPATCH_STATUS_DIR"] = str(tmp_path_factory.mktemp("status"))
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))


@dataclass(frozen=True)
class Finished:
    """What a process left behind."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line on stderr, where an operator looks first."""
        return self.err.rstrip().rpartition("\n")[2]


Runner = Callable[..., Finished]
OURS = ("KVPATCH", "KVCACHED", "ENABLE_KVCACHED", "VLLM", "PYTHON")


@pytest.fixture
def run(tmp_path):
    """Run a command in an empty folder, with nothing of ours in its environment.

    Keyword arguments are environment variables; ``limit`` is a guard against a hang.
    """

    def run(*command: str | Path, limit: float = 300, **environment: str | Path) -> Finished:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            [str(part) for part in command],
            env=kept
            | {"KVPATCH_STATUS_DIR": str(tmp_path)}
            | {name: str(value) for name, value in environment.items()},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run
