"""Real engines on the host device: models, devices and runs shared by the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version
from runs import (
    ROOT,
    Device,
    Finished,
    Run,
    engine_arguments,
    load,
    python_of,
    run_driver,
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a small model of a kind and a number of KV heads, made once.

    A model that transformers 5 wrote is no model for those before it, of vLLM up to 0.18.
    """
    sys.path.insert(0, str(ROOT / "scripts"))
    folder = tmp_path_factory.mktemp("models")

    def model(kind: str, kv_heads: int = 4, vllm: str = "") -> Path:
        by = vllm if vllm and Version(vllm) < Version("0.19") else ""
        path = folder / f"{kind}-{kv_heads}{by and '-' + by}"
        if not path.exists():
            maker = [python_of(by), ROOT / "scripts/tiny_model.py", path, "--kind", kind]
            subprocess.run(
                [*maker, "--kv-heads", str(kv_heads)],
                check=True,
                env=dict(os.environ, KVPATCH="0"),
                capture_output=True,
            )
        return path

    return model


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    return Device(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="session")
def engine(
    models: Callable[[str], Path], device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Run], Finished]:
    """Run prompts twice on an engine; the second time they may come from the tier."""
    finished: dict[Run, Finished] = {}

    def run(wanted: Run) -> Finished:
        if wanted not in finished:
            job = {
                "model": str(models(wanted.model, wanted.kv_heads, wanted.vllm)),
                "engine": engine_arguments(wanted),
                "rounds": [load("whole" if wanted.events else name) for name in wanted.rounds],
                "events": wanted.events,
                "one_by_one": wanted.events,
                "revert": list(wanted.revert),
                "forced": list(wanted.forced),
                "exhaust": wanted.exhaust,
                "cross_layer": wanted.cross_layer,
                # The simple connector's copies are watched at their own seams.
                "watch": wanted.kvpatch and not wanted.revert and not wanted.simple,
            }
            finished[wanted] = run_driver(
                job, device.environ(wanted), tmp_path_factory.mktemp("run"), vllm=wanted.vllm
            )
        return finished[wanted]

    return run
