"""``kvpatch doctor``: what is installed, what would apply, and what prevents it.

Every check is read-only. Nothing of vllm, torch or kvcached is imported into this process: the
gates that need vllm are passed in another one, which imports it as a start would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpatch.doctor.finding import Finding, Level, Topic

__all__ = ["Finding", "Level", "examine", "versions"]


def versions() -> dict[str, str]:
    """Return the version of each relevant package that is installed."""
    try:
        from kvpatch.doctor import packages
    except ImportError:  # one of the requirements: examine() says which
        return {}
    return packages.installed_versions()


def examine(
    settings: Mapping[str, str],
    try_import: bool | None = None,
    words: Sequence[str] = (),
) -> list[Finding]:
    """Run every check, of a command too if there are words; else, if none failed, import vllm."""
    try:
        from kvpatch.doctor import (
            command,
            environment,
            imports,
            leftovers,
            machine,
            memory,
            packages,
            pool,
            startup,
            tiers,
            verified,
        )
    except ImportError as error:  # one of the two requirements, which the gates need
        what = f"kvpatch cannot be imported whole ({error}), and would refuse vLLM"
        remedy = "reinstall kvpatch with its requirements"
        return [Topic("packages").problem(what, remedy)]
    sets, words = command.split(words)
    settings = {**settings, **sets}
    found = [
        *machine.check(settings),
        *memory.check(settings),
        *pool.check(settings),
        *tiers.check(settings),
        *packages.check(settings),
        *startup.check(settings),
        *environment.check(settings),
        *verified.check(settings),
        *leftovers.check(),
    ]
    if words:
        known = {finding.code for finding in found if finding.code}
        return found + command.check(words, settings, known)
    if try_import is None:
        try_import = not any(finding.level is Level.PROBLEM for finding in found)
    return found + imports.check(settings) if try_import else found
