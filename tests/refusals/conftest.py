"""Real vLLM, started as an operator starts it, in ways that must not start."""

from __future__ import annotations

import json
import re
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refused import Refused

from harness.engines.runs import model_of

ROOT = Path(__file__).parents[2]
PACKAGES = Path(pytest.__file__).parents[1]
SMALL = (
    *("--max-model-len", "2048", "--block-size", "32", "--enforce-eager"),
    *("--dtype", "float32", "--num-gpu-blocks-override", "64", "--port", "0"),
)


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of a small model, made once."""
    return model_of("llama")


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of an engine on a host device of its own."""
    device = tmp_path / "device"
    device.mkdir()
    return {
        "KVPATCH": "1",
        "KVPATCH_HOST_DEVICE": "1GiB",
        "KVPATCH_HOST_DEVICE_DIR": str(device),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture
def python(run: Callable[..., Any], machine: dict[str, str]) -> Callable[..., Refused]:
    """Run Python code that must be refused, by an interpreter of choice."""

    def python(code: str, *arguments: str | Path, exe: Path | None = None, **changes: Any) -> Any:
        return Refused(run(exe or sys.executable, "-c", code, *arguments, **machine | changes))

    return python


@pytest.fixture
def serve(run: Callable[..., Any], machine: dict[str, str], model: Path) -> Callable[..., Refused]:
    """Run ``vllm serve`` on the small model; it must be refused."""

    def serve(*flags: str, connector: dict[str, Any] | None = None, **changes: Any) -> Refused:
        command = Path(sys.executable).with_name("vllm")
        if connector is not None:
            flags = (*flags, "--kv-transfer-config", json.dumps({"kv_role": "kv_both"} | connector))
        return Refused(run(command, "serve", model, *SMALL, *flags, **machine | changes))

    return serve


@pytest.fixture
def shadow(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Make distributions look installed in other versions; return the environment for it."""

    def shadow(version: str, *names: str) -> dict[str, str]:
        for name in names:
            info = tmp_path / f"shadow/{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        return {"PYTHONPATH": str(tmp_path / "shadow")}

    return shadow


@pytest.fixture
def without(tmp_path: Path) -> Callable[..., Path]:
    """Make an environment with everything of this one but some packages."""

    def without(*packages: str) -> Path:
        folder = tmp_path / "environment"
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/*/site-packages")
        for entry in PACKAGES.iterdir():
            if not re.match(rf"({'|'.join(packages)})\b", entry.name.replace("_", "-")):
                (site / entry.name).symlink_to(entry)
        return folder / "bin/python"

    return without
