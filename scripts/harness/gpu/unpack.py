"""``scripts/gpu unpack``: an environment of each release that parts have, on the machine.

An environment has vLLM, kvcached and kvpatch of its own; behind them are the packages of the
parts, and behind these what the Python that runs this has, torch above all.
"""

import configparser
import json
import lzma
import shutil
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.console import HarnessError
from harness.gpu import RELEASES, archives, parts

DAMAGED = 9  # exit status
PACKAGES = "packages"
_SCRIPT = """#!{python}
import sys
from {module} import {function}

# A process of an engine is spawned, and imports the script of its parent again.
if __name__ == "__main__":
    sys.exit({function}())
"""
Say = Callable[[str], None]


def environments(kit: Path) -> list[Path]:
    """Return the Pythons of the environments, in the order of ``RELEASES``."""
    every = [kit / f"vllm-{release}/bin/python" for release in RELEASES]
    return [python for python in every if python.exists()]


def main(folders: Sequence[Path], kit: Path, say: Say) -> int:
    """Take parts in, and unpack what is whole; return the exit status.

    Raises:
        parts.Damaged: something is not what it was when it was packed.
        HarnessError: there is no room, or nothing that can serve.
    """
    files = kit / "files"
    files.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        parts.check(folder, folder / parts.SUMS)
        for name in parts.read_sums(folder / parts.SUMS):
            shutil.copy(folder / name, files / name)
        say(f"{folder}: every sum is right")
    for name in parts.join(files):
        say(f"{name} waits for the parts that have the rest of it")
    whole = sorted(files.glob(f"*{archives.ENDING}"))
    releases = [one for one in whole if one.name.startswith("vllm-")]
    with ThreadPoolExecutor() as pool:
        shared = [one for one in whole if one.name.startswith(PACKAGES)]
        jobs = [pool.submit(_unpack, one, kit / PACKAGES) for one in shared]
        jobs += [pool.submit(_environment, one, kit) for one in releases]
        for job in jobs:
            job.result()
    for archive in releases:
        site = _site(kit / _name(archive) / "bin/python")
        for one in (*files.glob(f"site-*{archives.ENDING}"), *files.glob("*.whl")):
            _unpack(one, site)
        _scripts(site)
        for original in files.glob(f"original-{_name(archive).removeprefix('vllm-')}.*z"):
            restore(original, site)
            say(f"{_name(archive)}: its kernels are as they were released")
        say(f"{site.parents[2]}: every library is right")
    if not releases:
        raise HarnessError("these parts have no release of vLLM; begin with part 1")
    return 0


def _name(archive: Path) -> str:
    return archive.name.removesuffix(archives.ENDING)


def _site(python: Path) -> Path:
    """Return the folder of an environment's own packages."""
    return next(python.parents[1].glob("lib/python*/site-packages"))


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive or a wheel, unless it was, and look at every library.

    Raises:
        parts.Damaged: a library, or the archive itself, is not what it was.
    """
    stamp = folder / f".{archive.name}"
    if stamp.exists() and stamp.read_text() == parts.digest(archive):
        return
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder)
        else:
            archives.unpack(archive, folder)
            parts.check(folder, archives.sums_of(archive))
    except (lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise parts.Damaged(f"{archive} is damaged ({error})") from error
    except OSError as error:
        raise HarnessError(f"{archive.name} cannot be unpacked into {folder} ({error})") from error
    stamp.write_text(parts.digest(archive))


def _environment(archive: Path, kit: Path) -> None:
    """Make the environment of a release."""
    folder = kit / _name(archive)
    if not (folder / "pyvenv.cfg").exists():
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    site = _site(folder / "bin/python")
    behind = [one for one in sys.path if one.endswith(("site-packages", "dist-packages"))]
    # The first of the startup files, by name: kvcached's imports what is there.
    (site / "00-behind.pth").write_text("\n".join([str(kit / PACKAGES), *behind]) + "\n")
    _unpack(archive, site)


def _scripts(site: Path) -> None:
    """Write the commands of an environment's own packages, as pip would."""
    folder = site.parents[2] / "bin"
    for declared in site.glob("*.dist-info/entry_points.txt"):
        points = configparser.ConfigParser(delimiters=("=",))
        points.read(declared)
        for name, target in points.items("console_scripts") if "console_scripts" in points else ():
            module, _, function = target.partition(":")
            words = {"python": folder / "python", "module": module, "function": function}
            (folder / name).write_text(_SCRIPT.format(**words))
            (folder / name).chmod(0o755)


def restore(original: Path, site: Path) -> None:
    """Put back what was blanked in a library.

    Raises:
        parts.Damaged: what comes of it is not the library that was released.
    """
    folder = site.parents[2] / "original"
    _unpack(original, folder)
    described = json.loads((folder / "spans.json").read_text())
    library = site / described["in"]
    changed = bytearray(library.read_bytes())
    with (folder / "bytes").open("rb") as file:
        for begin, size in described["spans"]:
            changed[begin : begin + size] = file.read(size)
    partial = library.with_suffix(".part")
    partial.write_bytes(changed)
    if parts.digest(partial) != described["sha256"]:
        raise parts.Damaged(f"{library} cannot be restored: its sum is not the released one's")
    partial.replace(library)
