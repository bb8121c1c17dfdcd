"""Build the emulated device."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from harness import ROOT

HERE = Path(__file__).parent
NVML = HERE.parent / "driver.c"
DRIVER = ("physical", "memory", "order", "streams", "copies", "driver")
OPERATORS = ("operators", "vllm")
STARTUP = ("emu_device.py", "emu_device.pth")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall")
_NO_TORCH = ROOT / "kvpatch/hostdevice/acl/no_torch"  # for the host device's header
# The rules of the device itself, which EMU_WITHOUT may leave out.
RULE = re.compile(r'(?:WITHOUT|taken)\("([^"]+)"')
_DECLARED = re.compile(r"\b((?:cu|cuda|__cuda)[A-Z]\w+)\(")


def headers(site: Path | None) -> Path | None:
    """Return the folder with CUDA's headers: of an environment, or of this machine."""
    places = [site / "nvidia/cu13/include"] if site else []
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")]
    return next((one for one in places if (one / "cuda_runtime_api.h").exists()), None)


def _headers(site: Path | None) -> Path:
    include = headers(site)
    if include is None:
        raise RuntimeError("CUDA's headers are not there")
    return include


def run(*command: str | Path) -> str:
    """Run a compiler; return what it printed.

    Raises:
        RuntimeError: it is missing or failed; its output.
    """
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not installed") from None
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def _compile(folder: Path, include: Sequence[Path], defines: Sequence[str], name: str) -> Path:
    made = folder / f"{name}.o"
    own = [_NO_TORCH] if name == "physical" else include
    folders = (f"-I{one}" for one in own)
    run("g++", *_FLAGS, *defines, *folders, "-c", HERE / f"{name}.cpp", "-o", made)
    return made


def _refusals(folder: Path, header: Path, have: Iterable[Path]) -> Path:
    """Write and compile a function for each of a header's that is in none of the objects."""
    declared = set(_DECLARED.findall(run("g++", "-E", "-P", f"-I{header.parent}", header)))
    defined = set(run("nm", "--defined-only", "--format=just-symbols", *have).split())
    of = "cuda" if "runtime" in header.name else "cu"
    return _refused(folder, of, sorted(n for n in declared - defined if re.match(of + "[A-Z]", n)))


def _refused(folder: Path, of: str, names: Iterable[str]) -> Path:
    """Write and compile functions that refuse by their names."""
    source, made = folder / f"refused_{of}.cpp", folder / f"refused_{of}.o"
    lines = ["namespace emu { int refused(const char *); }", 'extern "C" {']
    visible = '__attribute__((visibility("default")))'
    lines += [f'{visible} int {name}() {{ return emu::refused("{name}"); }}' for name in names]
    source.write_text("\n".join([*lines, "}"]))
    run("g++", *_FLAGS, "-c", source, "-o", made)
    return made


def _link(made: Path, *what: str | Path) -> None:
    unfinished = made.with_suffix(f".{os.getpid()}")
    run("g++", "-shared", "-pthread", f"-Wl,-soname,{made.name}", "-o", unfinished, *what)
    unfinished.replace(made)  # never half a library for a process that starts now


def build(folder: Path, site: Path | None = None, defines: Sequence[str] = ()) -> None:
    """Build the device, and for an environment its operators.

    Args:
        site: the packages of the environment, with torch.
        defines: for the compiler; ``-DKVPATCH_MUTANTS`` lets ``EMU_WITHOUT`` leave out a rule.

    Raises:
        RuntimeError: the compiler or CUDA's headers are missing, or it failed; its output.
    """
    include = _headers(site)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        objects = Path(scratch)
        compile_one = partial(_compile, objects, (include,), defines)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            *driver, runtime = pool.map(compile_one, (*DRIVER, "runtime"))
        refused = _refusals(objects, include / "cuda.h", driver)
        _link(folder / "libcuda.so.1", *driver, refused, "-ldl")
        versions = objects / "runtime.map"
        versions.write_text("libcudart.so.13 { global: cuda*; __cuda*; local: *; };\n")
        refused = _refusals(objects, include / "cuda_runtime_api.h", [runtime])
        own = (f"-Wl,--version-script={versions}", "-Wl,-rpath,$ORIGIN")
        driver_library = folder / "libcuda.so.1"
        _link(folder / "libcudart.so.13", *own, runtime, refused, driver_library, "-ldl")
        nvml = folder / "libnvidia-ml.so.1"
        run("gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{nvml.name}", "-o", nvml, NVML)
        if site is not None:
            _operators(folder, objects, site, include, defines)
            _nccl(folder, objects, site, include)


def conformance(made: Path, site: Path | None = None) -> None:
    """Build the program that asks a device what the documentation promises: see its source.

    Raises:
        RuntimeError: the compiler or CUDA's headers are missing, or it failed; its output.
    """
    flags = ("-std=c++20", "-O1", "-pthread", f"-I{_headers(site)}")
    run("g++", *flags, "-o", made, HERE / "conformance.cpp", "-ldl")


def _nccl(folder: Path, objects: Path, site: Path, include: Path) -> None:
    """Build what there is of NCCL; the rest of what torch calls refuses by its name."""
    made = _compile(objects, (include,), (), "nccl")
    have = set(run("nm", "--defined-only", "--format=just-symbols", made).split())
    stand_in = site / "nvidia/cu13/lib/libnccl.so.2"
    every = run("nm", "-D", "--defined-only", "--format=just-symbols", stand_in).split()
    refused = _refused(objects, "nccl", sorted({*every} - have))
    _link(folder / "libnccl.so.2", made, refused, folder / "libcuda.so.1")


def _operators(
    folder: Path, objects: Path, site: Path, include: Path, defines: Sequence[str]
) -> None:
    torch = site / "torch"
    includes = (torch / "include", torch / "include/torch/csrc/api/include", include)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = [*pool.map(partial(_compile, objects, includes, defines), OPERATORS)]
    libraries = (f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-ltorch_cuda")
    loose = ("-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined")  # torch is loaded already
    _link(folder / "libemu_operators.so", *loose, *made, *libraries, folder / "libcuda.so.1")
    for name in STARTUP:
        shutil.copyfile(HERE / name, folder / name)
