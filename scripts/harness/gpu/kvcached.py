"""kvcached for a machine with a GPU, compiled where there is none.

Its own setup.py wants a torch with CUDA. kvcached keeps to torch's stable ABI, so that any torch
has the headers, and of the driver's and CUDA's libraries the names are enough to link.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

from harness.console import HarnessError
from harness.pythons import interpreter

SONAMES = {"cuda": "libcuda.so.1", "cudart": "libcudart.so.13"}
# What its setup.py passes, for torch 2.10 and later.
DEFINES = (
    "NDEBUG",
    "KVCACHED_USE_CUDA",
    "TORCH_TARGET_VERSION=0x020a000000000000",
    "TORCH_STABLE_ONLY",
    "TORCH_API_INCLUDE_EXTENSION_H",
    "TORCH_EXTENSION_NAME=_C",
)


def build(sdist: Path, python: str, cuda: Path, into: Path) -> None:
    """Compile kvcached and lay it out as an installation has it.

    Args:
        python: the release of Python that it is for, as ``3.12``.
        cuda: a folder with CUDA's headers in ``include``.
        into: made; what belongs into ``site-packages``.

    Raises:
        HarnessError: something is missing to compile it, or it does not compile.
    """
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise HarnessError(f"{sys.executable} has no torch, whose headers kvcached needs")
    torch = Path(found.origin).parent
    if not (cuda / "include/cuda_runtime.h").exists():
        raise HarnessError(f"{cuda} has no include/cuda_runtime.h; name CUDA's folder with --cuda")
    own = _headers(python)
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(sdist) as tar:
            tar.extractall(temporary, filter="data")
        (source,) = Path(temporary).iterdir()
        package = into / "kvcached"
        shutil.copytree(source / "kvcached", package)
        shutil.copy(source / "kvcached_autopatch.pth", into)
        for name, soname in SONAMES.items():
            empty = ["-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}"]
            _compile(*empty, "-o", Path(temporary, f"lib{name}.so"))
        include = [torch / "include", torch / "include/torch/csrc/api/include", cuda / "include"]
        library = package / f"_C.cpython-{python.replace('.', '')}-x86_64-linux-gnu.so"
        _compile(
            *("-shared", "-s", "-std=c++17", "-O2", "-fPIC"),
            *(f"-D{define}" for define in DEFINES),
            *(f"-I{folder}" for folder in (*include, source / "csrc/inc", own)),
            *sorted((source / "csrc").glob("*.cpp")),
            *(f"-L{temporary}", "-Wl,--no-as-needed", "-lcuda", "-lcudart"),
            *(f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"),
            *("-o", library),
        )
        entry = into / f"{source.name}.dist-info"
        entry.mkdir()
        shutil.copy(source / "PKG-INFO", entry / "METADATA")
        shutil.copy(source / "kvcached.egg-info/entry_points.txt", entry)


def _headers(python: str) -> Path:
    """Return the folder of a Python's headers."""
    found = interpreter(python)
    if found is None:
        raise HarnessError(f"there is no Python {python} here, whose headers kvcached needs")
    ask = [found, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]
    folder = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    if not (folder / "Python.h").exists():
        raise HarnessError(f"{found} has no Python.h, which kvcached needs")
    return folder


def _compile(*words: str | Path) -> None:
    done = subprocess.run(["g++", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HarnessError(f"kvcached was not compiled: {done.stderr.strip()[-2000:]}")
