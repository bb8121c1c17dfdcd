"""Environments with the CUDA builds of vLLM, torch and kvcached, and kvpatch from its wheel.

    scripts/environment cuda-0.32.0

vLLM without the kernels of other devices and models, the torch that it pins, and kvcached compiled
against it by pip, as users install it. Of NVIDIA's libraries the runtime is the real one, and the
others are stand-ins (``stand_ins``). The requirements that have no CUDA in them are those of the
environment with the release's CPU build. 1.5 GB for the first, 0.4 GB for one more of its torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, environments, processes, venvs
from harness.cuda import stand_ins
from harness.engines import runs
from harness.environments import extract
from kvpatch.supported import KVCACHED_SDISTS

FOLDER = ROOT / ".venvs-cuda"
# CUDA's runtime, what a C++ compiler includes of it, and its Python bindings, which torch asks for.
RUNTIME = (
    *("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"),
    *("cuda-bindings==13.0.3", "cuda-pathfinder==1.3.3"),
)
# What a model like Llama in bfloat16 does not run on an H100: 480 of 790 MB.
LEFT_OUT = re.compile(
    r"vllm/(vllm-rs|_(moe|flashmla|flashkda|deepselect|qutlass)\w*_C\w*\.|third_party/(deep_gemm|fmha_sm100)/"
    r"|vllm_flash_attn/_vllm_fa2_C)"
)
OF_IMAGES = re.compile(r"torchvision(\.libs/|/image\.so)")
RUNTIME_NAME = b"libcudart.so.13"
COPY = re.compile(rb"libcudart\.[0-9a-f]{8}\.so\.13(?=\0)")
# Of an environment for CPUs: its own builds, and its startup files.
_OF_CPU = re.compile(
    r"(torch|vllm|kvcached|_?kvpatch|functorch|torchgen|nvidia|pip)([-_.]|$)|torch\w+|.*\.pth$"
)
PIP = (sys.executable, "-m", "pip", "-q")
OFF = {"KVPATCH": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off"}


def python_of(version: str) -> Path:
    """Return the Python of a release's environment, which may not be made yet."""
    return FOLDER / version / "bin/python"


def site_of(version: str) -> Path:
    """Return the packages of a release's environment."""
    release = ".".join(map(str, sys.version_info[:2]))
    return FOLDER / version / f"lib/python{release}/site-packages"


def run(*command: str | Path, **environment: str) -> None:
    """Run a command with kvpatch off.

    Raises:
        subprocess.CalledProcessError: it failed; it has printed why.
    """
    subprocess.run([*map(str, command)], env=os.environ | OFF | environment, check=True)


def link(version: str, into: Path) -> None:
    """Link the packages of a release's environment for CPUs that have no build for a device."""
    own = Path(runs.python_of(version)).parents[1]
    linked = set()
    for base in dict.fromkeys((own, environments.BASE.resolve())):
        packages = list(next(base.glob("lib/python*/site-packages")).iterdir())
        # The release's own version of a package is in front of the one that .venv has.
        names = {one: re.sub(r"-[^-]+\.dist-info$", ".dist-info", one.name) for one in packages}
        for package in packages:
            if not _OF_CPU.match(package.name) and names[package] not in linked:
                (into / package.name).symlink_to(package)
        linked |= set(names.values())


def pinned(site: Path, package: str) -> str:
    """Return the release of a package that the vLLM in an environment pins."""
    metadata = next(site.glob("vllm-*.dist-info")) / "METADATA"
    found = re.search(rf"^Requires-Dist: {package}==(\S+)$", metadata.read_text(), re.MULTILINE)
    assert found is not None, f"{metadata} pins no {package}"
    return found[1]


def install_torchvision(site: Path) -> None:
    """Install the torchvision that vLLM pins, which its warm-up imports, for no image formats.

    It has a copy of CUDA's runtime under a name of its own, and takes that of torch instead, so
    that there is one in a process.
    """
    wanted = f"torchvision==={pinned(site, 'torchvision')}"
    extract(wanted, lambda name: not OF_IMAGES.match(name), sys.executable, site)
    library = site / "torchvision/_C.so"
    library.write_bytes(
        COPY.sub(lambda of: RUNTIME_NAME.ljust(len(of[0]), b"\0"), library.read_bytes())
    )


def make(version: str) -> None:
    """Make the environment of a release of vLLM, without kvpatch."""
    folder, site = FOLDER / version, site_of(version)
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(folder)
    extract(f"vllm=={version}", lambda name: not LEFT_OUT.match(name), sys.executable, site)
    link(version, site)
    torch = pinned(site, "torch")
    # === because an index may have a build for CPUs of the same version.
    shared = FOLDER / f"torch-{torch}"
    whole = partial(extract, f"torch==={torch}", bool, sys.executable, shared)
    venvs.made(shared, torch, whole)
    shutil.copytree(shared, site, copy_function=os.link, dirs_exist_ok=True)
    install_torchvision(site)
    venvs.install(sys.executable, "--no-deps", "--target", site, *RUNTIME)
    cuda = site / "nvidia/cu13"
    libraries = [*site.glob("torch/lib/*.so"), *(site / "vllm").rglob("*.so")]
    wanted = stand_ins.wanted(libraries)
    for name in wanted.keys() - {"libcudart.so.13", "libcuda.so.1"}:
        stand_ins.write(cuda / "lib" / name, wanted[name])
    stand_ins.write_driver(driver_of(version), wanted["libcuda.so.1"][""])
    install_kvcached(version, cuda)


def driver_of(version: str) -> Path:
    """Return the folder with the stand-in for a driver: for ``LD_LIBRARY_PATH``."""
    return FOLDER / version / "driver"


def install_kvcached(version: str, cuda: Path) -> None:
    """Build kvcached from its sources as ``pip install kvcached`` does; nvcc compiles none of them.

    Args:
        cuda: the folder with CUDA's headers, which gets what a CUDA_HOME has besides.
    """
    compiler = cuda / "bin/nvcc"
    compiler.parent.mkdir(exist_ok=True)
    compiler.write_text('#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.88"\n')
    compiler.chmod(0o755)
    (cuda / "lib/libcudart.so").symlink_to("libcudart.so.13")
    (cuda / "lib/libcuda.so").symlink_to(driver_of(version) / "libcuda.so.1")
    with tempfile.TemporaryDirectory() as folder:
        hashes = Path(folder, "kvcached.txt")  # pip takes hashes from a file only
        ((release, digest),) = KVCACHED_SDISTS.items()
        hashes.write_text(f"kvcached=={release} --hash=sha256:{digest}\n")
        run(
            *(*PIP, "--python", python_of(version), "install", "--no-deps", "--no-cache-dir"),
            *("--no-build-isolation", "--no-binary", "kvcached", "--require-hashes", "-r", hashes),
            CUDA_HOME=str(cuda),
            LD_LIBRARY_PATH=str(driver_of(version)),
        )


def install_kvpatch(version: str, folder: Path) -> None:
    """Install kvpatch from its wheel, made in ``folder``, without kvpatch-hostdevice."""
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    pip = (*PIP, "--python", python_of(version), "install", "--no-deps", "--force-reinstall")
    run(*pip, *folder.glob("*.whl"))


def made(version: str) -> Path:
    """Return the Python of a release's environment, made and with the kvpatch of this tree."""
    parts = [Path(__file__), Path(stand_ins.__file__), stand_ins.DRIVER, ROOT / "scripts/pins.txt"]
    venvs.made(FOLDER / version, digest(parts), lambda: make(version))
    sources = (one for one in (ROOT / "kvpatch").rglob("*.*") if one.is_file())
    own = sorted(one for one in sources if one.suffix != ".pyc")
    wheel = FOLDER / version / "kvpatch-wheel"
    recipe = digest([*own, ROOT / "pyproject.toml"])
    venvs.made(wheel, recipe, lambda: install_kvpatch(version, wheel))
    return python_of(version)


def variables(version: str, folder: Path, **changes: str) -> dict[str, str]:
    """Return the variables of a process with kvpatch, whose own files are in a folder."""
    own = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(FOLDER / version / "vllm-cache"),
        "KVPATCH": "1",
        "KVPATCH_STATUS_DIR": str(folder),
    }
    return processes.clean_environment(**own | changes)


def through(
    program: Path, jobs: dict[str, Any], python: Path, variables: dict[str, str], limit: float
) -> tuple[dict[str, Any], str]:
    """Run jobs of a program in forks of one process, for ``limit`` seconds at most.

    Returns:
        What it wrote, empty if it ended early, and its log.
    """
    folder = Path(variables["KVPATCH_STATUS_DIR"])
    asked, results, log = folder / "jobs.json", folder / "results.json", folder / "log"
    asked.write_text(json.dumps(jobs))
    results.unlink(missing_ok=True)
    with log.open("w") as output, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [python, "-P", program, asked, results],
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=limit,
            check=False,
        )
    return json.loads(results.read_text()) if results.exists() else {}, log.read_text()


def digest(files: Iterable[Path]) -> str:
    """Return a digest of files."""
    total = hashlib.sha256()
    for file in files:
        total.update(file.read_bytes())
    return total.hexdigest()


def main() -> None:
    """Run ``scripts/environment cuda-VERSION``."""
    print(made(sys.argv[1].removeprefix("cuda-")))


if __name__ == "__main__":
    main()
