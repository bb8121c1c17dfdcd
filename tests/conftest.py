"""Lanes: every test lies in exactly one folder of tests/, and carries its mark."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest_plugins = ("harness.engines.fixtures", "harness.engines.refused")

# Tests say for themselves what is on; what the caller's shell has set must not.
os.environ["KVPATCH"] = "0"

HERE = Path(__file__).parent
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
    "npu",
    "versions",
    "upstream",
    "objects",
    "bench",
)


def lane_of(path: Path) -> str | None:
    """Return the lane whose folder ``path`` lies in, or None."""
    folders = path.relative_to(HERE).parts[:-1] if path.is_relative_to(HERE) else ()
    lanes = [folder for folder in folders if folder in LANES]
    return lanes[0] if len(lanes) == 1 and folders[0] == lanes[0] else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        lane = lane_of(item.path)
        if lane is None:
            raise pytest.UsageError(
                f"{item.nodeid} is in no lane: put it in one of tests/{{{','.join(LANES)}}}"
            )
        item.add_marker(lane)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays; every claim of a name collects


@pytest.fixture(autouse=True, scope="module")
def status_pages(tmp_path_factory: pytest.TempPathFactory) -> None:
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
def run(tmp_path: Path) -> Runner:
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
