"""Releases of vLLM that tests and CI run: those that are validated, and what stands for them."""

import sys

from packaging.version import Version

from harness import environments
from harness.matrix import sharing
from kvpatch import supported
from kvpatch.versions import Span


def oldest() -> str:
    """Return the oldest validated release."""
    return supported.validated()[0]


def newest() -> str:
    """Return the newest one."""
    return supported.validated()[-1]


def newest_built() -> str:
    """Return the newest one with a CPU build of its own, which is in ``.venv``."""
    return [one for one in supported.validated() if one not in environments.BORROWED][-1]


def between(first: str, before: str | None = None) -> tuple[str, ...]:
    """Return the validated releases from ``first`` on, and before another one."""
    return tuple(supported.validated(Span(first, before)))


def with_own_runs(first: str, before: str | None = None) -> tuple[str, ...]:
    """Return those of ``between`` whose runs of the fence and of exhaustion are their own."""
    return tuple(one for one in between(first, before) if sharing.runs_of(one) == one)


def runner_of(vllm: str) -> str:
    """Return the model runner that stands for a release: the one that a GPU would have."""
    return "v2" if Version(vllm) >= Version("0.29") else "v1"


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        found = globals()[wanted]()
        print(*([found] if isinstance(found, str) else found), end=" ")
    print()
