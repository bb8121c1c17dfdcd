"""Libraries of a few KB in the place of NVIDIA's, which are 2.7 GB and do nothing without a GPU.

Each has the names that the libraries of torch and vLLM take from it, under the version that they
ask for, so that these load. A function that is called says its name and returns an error.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

TOLD = {"cuDriverGetVersion", "cuGetProcAddress_v2"}  # what driver.c has itself
DRIVER = Path(__file__).with_name("driver.c")
_NVIDIA = re.compile(r"lib(cu|nv|nccl)")
# Names without a version are found in whichever library has them; these are the driver's.
_UNVERSIONED = re.compile(r"cu[A-Z]|cu[a-z]+(?:Lt)?[A-Z]|nccl|nvshmem|nvrtc")
_OF_DRIVER = re.compile(r"cu(?!File)[A-Z]")
_SYMBOL = re.compile(r" UND +([^\s@]+)(?:@(\S+))?")
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_VERSIONS = re.compile(r"File: (\S+)|Name: (\S+)")

Names = dict[str, set[str]]


def _read(option: str, library: Path) -> str:
    command = ["readelf", "-W", option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wanted(libraries: Iterable[Path]) -> dict[str, Names]:
    """Return what libraries take from NVIDIA's: names by version, by the library that has them."""
    found: dict[str, Names] = defaultdict(lambda: defaultdict(set))
    for library in libraries:
        for needed in filter(_NVIDIA.match, _NEEDED.findall(_read("-d", library))):
            found[needed][""] |= set()
        by_version, file = {}, ""
        for of_file, version in _VERSIONS.findall(_read("-V", library).partition("needs")[2]):
            file = of_file or file
            if version and _NVIDIA.match(file):
                by_version[version] = file
        for name, version in _SYMBOL.findall(_read("--dyn-syms", library)):
            if version in by_version:
                found[by_version[version]][version].add(name)
            elif not version and _UNVERSIONED.match(name):
                found["libcuda.so.1" if _OF_DRIVER.match(name) else "libnccl.so.2"][""].add(name)
    return found


def compile_library(path: Path, source: str, *options: str) -> None:
    """Compile C into a library that goes by its file's name."""
    command = ["gcc", "-shared", "-fPIC", "-w", "-s", "-fno-builtin", *options]
    command += [f"-Wl,-soname,{path.name}", "-o", str(path), "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)


def write(path: Path, names: Names) -> None:
    """Write the stand-in for one library, whose functions are ``names`` by version."""
    what = f"of {path.name} is not there: this machine has no GPU"
    lines = ["#include <stdio.h>"]
    for name in sorted(set().union(*names.values())):
        said = f'fprintf(stderr, "{name} {what}\\n")'
        lines.append(f"int {name}(void) {{ {said}; return 1; }}")
    nodes = [f"{one} {{ {'; '.join(sorted(names[one]))}; }};" for one in names if one]
    versions = path.with_suffix(".map")
    versions.write_text("\n".join(nodes or ["{ global: *; };"]))
    compile_library(path, "\n".join(lines), f"-Wl,--version-script={versions}")
    versions.unlink()


def write_driver(folder: Path, names: Iterable[str]) -> None:
    """Write a driver that has no device to use: libcuda.so.1, and libnvidia-ml.so.1."""
    folder.mkdir(parents=True, exist_ok=True)
    source = DRIVER.read_text()
    compile_library(folder / "libnvidia-ml.so.1", source)
    others = (f"NO({name})" for name in sorted({*names} - TOLD))
    compile_library(folder / "libcuda.so.1", "\n".join([source, *others]), "-DDRIVER")
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
