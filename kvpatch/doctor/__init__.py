"""``kvpatch doctor``: what is installed here, what would apply, and what is in the way.

Every check reads only. Nothing of vllm, torch or kvcached is imported, unless the
operator asks for it, and then in an interpreter of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpatch.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]


def examine(settings: Mapping[str, str], try_import: bool = False) -> list[Finding]:
    """Run every check.

    Args:
        settings: the environment variables that vLLM would be started with.
        try_import: also import vllm with kvpatch on, which takes seconds.
    """
    try:
        from kvpatch.doctor import environment, imports, leftovers, machine, packages, startup
    except ImportError as error:  # one of the two requirements: the gates need them
        what = f"kvpatch cannot be imported whole ({error}), and would refuse vLLM"
        remedy = "reinstall kvpatch with its requirements"
        return [Finding("packages", Level.PROBLEM, what, remedy)]
    found = [
        *machine.check(settings),
        *packages.check(settings),
        *startup.check(settings),
        *environment.check(settings),
        *leftovers.check(),
    ]
    return found + imports.check(settings) if try_import else found
