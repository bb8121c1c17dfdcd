"""Opens the packs and builds kvcached, on the GPU machine: ``install.py PACKS WORK``."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from packing import PackError, unpack


def pip(*words: str | Path) -> None:
    """Run pip without a network.

    Raises:
        PackError: it failed.
    """
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    done = subprocess.run([*command, *map(str, words)], check=False)
    if done.returncode:
        raise PackError("pip could not install what was packed; see its output above")


def install(packs: Path, work: Path) -> None:
    """Make ``work/tree``, ``work/site`` (vLLM, kvcached) and ``work/wheels-site``.

    Raises:
        PackError: something is missing or does not build.
    """
    site, wheels = work / "site", work / "wheels-site"
    work.mkdir(parents=True, exist_ok=True)
    done = work / "installed"
    opened = unpack(packs, work)
    if done.exists() and done.read_text().split() == opened:
        return
    with zipfile.ZipFile(work / "vllm-python.zip") as file:
        file.extractall(site)
    have = _have()
    for wheel in sorted((work / "wheels").glob("*.whl")):
        # What the machine has stays: it was built together with its torch.
        if wheel.name.partition("-")[0].replace("_", "-").lower() not in have:
            pip("--upgrade", "--target", wheels, wheel)
    if not (site / "kvcached").exists():
        (sources,) = work.glob("kvcached-*.tar.gz")
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
        os.environ["PYTHONPATH"] = str(wheels)
        pip("--no-build-isolation", "--no-cache-dir", "--target", site, sources)
    done.write_text(" ".join(opened))


def _have() -> set[str]:
    from importlib import metadata

    return {str(one.metadata["Name"]).replace("_", "-").lower() for one in metadata.distributions()}


if __name__ == "__main__":
    try:
        install(Path(sys.argv[1]), Path(sys.argv[2]))
    except PackError as error:
        sys.exit(f"run: {error}")
