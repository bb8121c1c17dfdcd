"""Which release's runs of the fence and of exhaustion stand for a release.

``below`` has a digest of the functions below every row, for each release from ``FLOOR`` on;
``scripts/matrix shapes`` reads it from the unpacked sources. The round trips of the matrix run on
each release. The interleavings of the fence and failing allocations depend on what these rows
change and call, and so a release with the rows and the functions of a later validated one, next
to it, has its runs.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from harness.matrix import shapes
from kvpatch import patches, supported

LEVEL = "below"


class Below(NamedTuple):
    """What is below the rows of one release.

    Attributes:
        targets: a digest of the targets that they were found below, see ``targets_digest``.
    """

    vllm: str
    functions: int
    digest: str
    targets: str


def targets_of(release: str) -> list[str]:
    """Return the targets in vLLM of the rows that apply to a release, each once."""
    return sorted({target for _, target in _rows_of(release) if target.startswith("vllm.")})


def targets_digest(release: str) -> str:
    """Return a digest of the targets of a release."""
    return hashlib.sha256("\n".join(targets_of(release)).encode()).hexdigest()[:16]


@cache
def recorded(data: Path = shapes.DATA) -> dict[str, Below]:
    """Return what is recorded, by release."""
    paths = (data / LEVEL).glob("vllm-*.json")
    found = [Below(**json.loads(path.read_text())) for path in paths]
    return {one.vllm: one for one in found}


def runs_of(release: str, releases: Sequence[str] = ()) -> str:
    """Return the validated release whose runs stand for a release; its own for most.

    Args:
        releases: the validated ones, oldest first; those of ``supported`` if not given.
    """
    every = releases or supported.validated()
    for one, later in pairwise(every[list(every).index(release) :]):
        if not same(one, later):
            return one
    return every[-1]


def shared() -> list[tuple[str, str, int]]:
    """Return the releases that share runs: release, whose runs, and the functions below both."""
    pairs = [(release, runs_of(release)) for release in supported.validated()]
    return [(one, of, recorded()[one].functions) for one, of in pairs if one != of]


def same(one: str, other: str) -> bool:
    """Return whether two releases have the same rows, and the same functions below them."""
    known = recorded()
    return (
        one in known
        and other in known
        and known[one].digest == known[other].digest
        and known[one].targets == targets_digest(one)
        and known[other].targets == targets_digest(other)
        and _rows_of(one) == _rows_of(other)
    )


def forget() -> None:
    """Clear what is cached of the files."""
    recorded.cache_clear()


def _rows_of(release: str) -> list[tuple[str, str]]:
    """Return the ids and targets of the rows of a release, in the order of application."""
    return [(patch.id, patch.target) for _, rows in patches.at(Version(release)) for patch in rows]
