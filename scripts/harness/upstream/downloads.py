"""The tests of vLLM and kvcached, out of their published sources; pinned, and never in the tree."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from harness import ROOT, pins, venvs
from harness.console import HarnessError
from harness.matrix import sources
from harness.upstream import stand_ins

PINS = ROOT / "scripts/pins-upstream.txt"
# What is kept of the sources. kvcached's tests also read its modules, which they do not import:
# pytest runs in the folder of the tests, and the installed package is the one that is tested.
KEPT = {
    "vllm": ("tests", "pyproject.toml"),
    "kvcached": ("tests", "pyproject.toml", "kvcached", "kvcached_autopatch.pth", "setup.py"),
}


def releases() -> dict[str, str]:
    """Return the release of each of the sources."""
    pinned = pins.pinned(PINS.read_text())
    return {name: pinned[name][0] for name in KEPT}


def made() -> Path:
    """Return a folder with the tests of ``KEPT``, ``packages`` and the stand-ins ``hub``.

    It is another one for other pins, as other checkouts may have them.

    Raises:
        HarnessError: something could not be downloaded.
    """
    made_of = (PINS, Path(__file__), Path(stand_ins.__file__))
    mark = hashlib.sha256(b"".join(path.read_bytes() for path in made_of)).hexdigest()[:12]
    folder = sources.cache().with_name("upstream") / mark
    return venvs.made(folder, mark, lambda: _make(folder))


def _make(into: Path) -> None:
    # What the tests and vLLM's set-up import.
    packages = into / "packages"
    packages.mkdir(parents=True)
    wanted = set(pins.pinned(PINS.read_text())) - set(KEPT)
    file = _requirements(*wanted, into=packages)
    _pip(("install", "--target", str(packages), "-r", str(file)))
    for name in KEPT:
        with tempfile.TemporaryDirectory() as temporary:
            _extract(_sdist(name, packages, Path(temporary)), KEPT[name], into / name)
    stand_ins.make(into / "hub")


def _requirements(*wanted: str, into: Path) -> Path:
    """Write the pins of ``wanted``, of which pip takes the hashes from a file only."""
    lines = (line for line in PINS.read_text().splitlines() if line.partition("==")[0] in wanted)
    file = into / "requirements.txt"
    file.write_text("\n".join(lines) + "\n")
    return file


def _sdist(name: str, packages: Path, into: Path) -> Path:
    """Download the sources of ``name``, whose metadata its set-up makes, without a build."""
    path = [packages]
    if name == "kvcached":  # asks torch for the CUDA that it builds with
        path.insert(0, ROOT / "kvpatch/hostdevice/buildtime")
    archives = into / name
    archives.mkdir()
    _pip(
        (
            *("download", "--no-build-isolation", "--no-binary", name),
            *("-d", str(archives), "-r", str(_requirements(name, into=into))),
        ),
        PYTHONPATH=os.pathsep.join(map(str, path)),
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=releases()["vllm"],
    )
    return next(archives.glob("*.tar.gz"))


def _pip(words: Sequence[str], **environment: str) -> None:
    command = [sys.executable, "-m", "pip", words[0], "-q", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*command, *words[1:]],
        env=dict(os.environ, KVPATCH="0", PIP_DISABLE_PIP_VERSION_CHECK="1") | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HarnessError(f"pip {words[0]} of scripts/{PINS.name}: {done.stderr.strip()[-2000:]}")


def _extract(archive: Path, kept: Sequence[str], into: Path) -> None:
    """Extract what is kept of an archive."""
    with tarfile.open(archive) as sdist:
        for member in sdist:
            parts = PurePosixPath(member.name).parts[1:]  # without the archive's own folder
            source = sdist.extractfile(member) if member.isfile() else None
            if source is None or not parts or parts[0] not in kept or ".." in parts:
                continue
            path = into.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as target:
                shutil.copyfileobj(source, target)
