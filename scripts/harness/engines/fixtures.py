"""Fixtures of the lanes that run engines: models, host devices, and runs that tests share."""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from harness.engines import kept, process
from harness.engines.fences import Fences
from harness.engines.pools import Pooled
from harness.engines.runs import (
    ALL,
    Device,
    Finished,
    Run,
    engine_arguments,
    load,
    model_of,
    prompts,
    weights_of,
)
from harness.engines.tiers import APART, Serve
from harness.evidence import executed
from harness.models import make_model

LAYOUTS = pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "non-contiguous"])
MODELS = pytest.mark.parametrize("model", ["llama", "sliding"])
MODES = pytest.mark.parametrize("mode", ["eager", "lazy"])
# Every two values of the three meet; all eight are cells of the matrix.
PAIRS = pytest.mark.parametrize(
    ("mode", "model", "contiguous"),
    [
        pytest.param("eager", "llama", True, id="eager-llama-contiguous"),
        pytest.param("eager", "sliding", False, id="eager-sliding-non-contiguous"),
        pytest.param("lazy", "llama", False, id="lazy-llama-non-contiguous"),
        pytest.param("lazy", "sliding", True, id="lazy-sliding-contiguous"),
    ],
)
# Each model with one layout; the other two are cells of the matrix.
MODEL_PAIRS = pytest.mark.parametrize(
    ("model", "contiguous"),
    [("llama", False), ("sliding", True)],
    ids=["llama-non-contiguous", "sliding-contiguous"],
)
SCHEDULING = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def pytest_sessionfinish() -> None:
    """End the servers of this process, which xdist ends without its exit handlers."""
    process.close_servers()


@pytest.fixture
def reported(tmp_path: Path) -> Callable[..., Any]:
    """Run ``python -m`` a module of the harness to its good end; return the report it wrote."""

    def reported(module: str, *options: str) -> Any:
        report = tmp_path / "report.json"
        ended = subprocess.run(
            [sys.executable, "-m", module, *options, "--report", report],
            env=dict(os.environ, KVPATCH="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-4000:]
        return json.loads(report.read_text())

    return reported


@pytest.fixture(scope="session")
def models() -> Callable[..., Path]:
    """Return the folder of a small model of a kind, a number of KV heads and a release."""
    return model_of


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the first of these models with other weights."""
    return make_model(tmp_path_factory.mktemp("trained") / "llama-4", seed=8)


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    """A host device for the engines of this process of pytest."""
    return Device(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="session")
def engine(
    device: Device, tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[Run], Finished]:
    """Run an engine through its rounds, once for all processes of this run of pytest."""
    own = tmp_path_factory.getbasetemp()
    shared = (own if worker_id == "master" else own.parent) / "engines"

    def run(wanted: Run) -> Finished:
        name = sha256(repr(wanted).encode()).hexdigest()[:16]
        folder, result = shared / name, shared / name / "finished.json"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                environment = device.environ(wanted)
                if executed.VARIABLE in environment:
                    environment[executed.VARIABLE] = str(folder / "executed")
                ended = kept.drive(wanted, job_of(wanted), environment, folder)
                result.write_text(json.dumps(dataclasses.asdict(ended)))
            executed.add(folder / "executed")
        return Finished(**json.loads(result.read_text()))

    return run


def job_of(wanted: Run) -> dict[str, Any]:
    """What the driver is told for a run."""
    return {
        "model": str(weights_of(wanted)),
        "engine": engine_arguments(wanted),
        "rounds": [load("whole" if wanted.events else name) for name in wanted.rounds],
        "events": wanted.events,
        "one_by_one": wanted.events,
        "revert": list(wanted.revert),
        "forced": list(wanted.forced),
        "exhaust": wanted.exhaust,
        "cross_layer": wanted.cross_layer,
        "nothing_connector": "NothingConnector" in wanted.inside,
        # The simple connector's copies are watched at their own seams.
        "watch": wanted.kvpatch and not wanted.revert and not wanted.simple,
    }


@pytest.fixture(scope="module")
def serve(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Run an engine of its own through a job: the first prompts one at a time, or what is given."""

    def run(
        wanted: Run, times: int = 1, engine: Mapping[str, Any] | None = None, **more: Any
    ) -> Finished:
        job = job_of(wanted)
        job["engine"] |= engine or {}
        job |= {"rounds": [[one] for one in prompts(ALL)[:APART]] * times, "watch": False, **more}
        return kept.drive(wanted, job, device.environ(wanted), tmp_path_factory.mktemp("serve"))

    return run


@pytest.fixture(scope="module")
def fences(
    models: Callable[..., Path], device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Return the fence's scenarios of a kind on a release, once for the tests of a file."""

    @cache
    def of(kind: type[Fences] = Fences, *release: str, **more: str) -> Fences:
        return kind(models, device, tmp_path_factory.mktemp("fence"), *release, **more)

    return of


@pytest.fixture
def start_in_pool(device: Device, tmp_path: Path) -> Iterator[Callable[..., Pooled]]:
    """Start an engine of a run whose CPU tier is in a host pool; one that is left is killed."""
    started: list[Pooled] = []

    def start(run: Run, **engine: Any) -> Pooled:
        started.append(Pooled(device, tmp_path / f"engine{len(started)}", run, **engine))
        return started[-1]

    yield start
    for one in started:
        one.kill()
