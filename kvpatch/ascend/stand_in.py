"""The parts of torch that kvcached's setup.py reads, to build it against the ACL runtime.

``build.py`` puts this file before the real torch, as ``torch.py``, for that one build.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as _version
from pathlib import Path
from types import ModuleType
from typing import Any

_TORCH = Path(os.environ["STAND_IN_TORCH"])
_HEADERS = Path(os.environ["STAND_IN_HEADERS"])
_RUNTIME = Path(os.environ["STAND_IN_RUNTIME"])

__version__ = _version("torch")


class version:  # noqa: N801 - torch.version is a module
    """What selects kvcached's CUDA sources."""

    cuda = "ACL"
    hip = None


class _C:
    _GLIBCXX_USE_CXX11_ABI = True


def _include_paths(device_type: str = "cpu") -> list[str]:
    headers = _TORCH / "include"
    api = headers / "torch" / "csrc" / "api" / "include"
    return [str(_HEADERS), str(_RUNTIME / "include"), str(headers), str(api)]


def _library_paths(device_type: str = "cpu") -> list[str]:
    return [str(_TORCH / "lib"), str(_RUNTIME / "lib64")]


def _extension(name: str, sources: list[str], **options: Any) -> Any:
    """Return kvcached's extension, linked to torch's CPU libraries and the ACL runtime."""
    from setuptools import Extension

    compile_args = [
        *options["extra_compile_args"]["cxx"],
        f"-DTORCH_EXTENSION_NAME={name.rpartition('.')[2]}",
        "-O2",
        "-g0",
    ]
    return Extension(
        name,
        sources,
        include_dirs=options["include_dirs"],
        library_dirs=options["library_dirs"],
        runtime_library_dirs=[str(_RUNTIME / "lib64")],
        libraries=["c10", "torch", "torch_cpu", "torch_python", "ascendcl"],
        extra_compile_args=compile_args,
        language="c++",
    )


def _modules() -> None:
    from setuptools.command.build_ext import build_ext

    extension = ModuleType("torch.utils.cpp_extension")
    extension.__dict__.update(
        BuildExtension=build_ext,
        CUDAExtension=_extension,
        CppExtension=_extension,
        include_paths=_include_paths,
        library_paths=_library_paths,
    )
    sys.modules["torch.utils"] = ModuleType("torch.utils")
    sys.modules["torch.utils.cpp_extension"] = extension


if __name__ == "torch":
    _modules()
