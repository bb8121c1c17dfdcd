"""The parts of torch that kvcached's setup.py reads, to build it against the host device.

This directory precedes the real torch on PYTHONPATH for that one build: on a machine
without a GPU the real torch has no CUDA version, and kvcached's setup.py rejects it.
"""

from __future__ import annotations

import importlib.machinery
import sys
from importlib.metadata import version as _version
from pathlib import Path

_STAND_IN = str(Path(__file__).resolve().parent.parent)


def real_torch() -> Path:
    """Return the directory of the installed torch that this module hides."""
    path = [entry for entry in sys.path if entry and str(Path(entry).resolve()) != _STAND_IN]
    spec = importlib.machinery.PathFinder.find_spec("torch", path)
    if spec is None or spec.origin is None:
        raise ImportError("torch is not installed in this environment; pip install torch first")
    return Path(spec.origin).parent


class version:  # noqa: N801 - torch.version is a module
    cuda = "host device"
    hip = None


class _C:
    _GLIBCXX_USE_CXX11_ABI = True


__version__ = _version("torch")
