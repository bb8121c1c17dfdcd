"""torch.utils.cpp_extension as kvcached's setup.py calls it, without CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from torch import real_torch

BuildExtension = build_ext
_HEADERS = Path(__file__).resolve().parents[3] / "include"


def include_paths(device_type: str = "cpu") -> list[str]:
    """Return the host device's CUDA headers, then torch's."""
    torch_include = real_torch() / "include"
    return [
        str(_HEADERS),
        str(torch_include),
        str(torch_include / "torch" / "csrc" / "api" / "include"),
    ]


def library_paths(device_type: str = "cpu") -> list[str]:
    return [str(real_torch() / "lib")]


def CUDAExtension(name: str, sources: list[str], **options: Any) -> Extension:  # noqa: N802
    """Return kvcached's extension, linked to torch's CPU libraries only."""
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
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
        extra_compile_args=compile_args,
        language="c++",
    )


CppExtension = CUDAExtension
