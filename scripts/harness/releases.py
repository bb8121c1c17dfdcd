"""Releases of vLLM that tests and CI run: those that are supported, and what stands for them."""

from __future__ import annotations

import sys

from packaging.version import Version

from kvpatch.registry import releases

# Supported releases at which kvpatch's code for vLLM takes another way, beside the oldest and
# the newest: each stands for those up to the next.
SEAMS = ("0.19.1", "0.22.1", "0.24.0", "0.26.0", "0.28.0", "0.29.0")


def supported() -> tuple[str, ...]:
    """Return every supported release, from the oldest on."""
    return tuple(releases.RELEASES)


def oldest() -> str:
    """Return the oldest supported release."""
    return supported()[0]


def newest() -> str:
    """Return the newest one, which is in ``.venv``."""
    return supported()[-1]


def one_for_each_seam() -> tuple[str, ...]:
    """Return releases that together go through all of kvpatch's code for vLLM."""
    return tuple(one for one in supported() if one in (oldest(), *SEAMS, newest()))


def between(first: str, before: str = "") -> tuple[str, ...]:
    """Return the supported releases from ``first`` on, and before another one."""
    return tuple(
        one
        for one in supported()
        if Version(first) <= Version(one) and not (before and Version(one) >= Version(before))
    )


def runner_of(vllm: str) -> str:
    """Return the model runner that stands for a release: the one that a GPU would have."""
    return "v2" if Version(vllm) >= Version("0.29") else "v1"


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        found = globals()[wanted]()
        print(*([found] if isinstance(found, str) else found), end=" ")
    print()
