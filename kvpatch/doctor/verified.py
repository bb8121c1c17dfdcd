"""The verdicts of ``kvpatch verify``, and which of them hold no more."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from kvpatch import verdicts
from kvpatch.doctor.finding import Finding, Topic
from kvpatch.environ import VERDICTS
from kvpatch.telemetry.printable import printable
from kvpatch.verdicts import Verdict
from kvpatch.version import VERSION
from kvpatch.versions import installed

TOPIC = Topic("verdicts")


def check(settings: Mapping[str, str]) -> list[Finding]:
    """Check every verdict against what is installed; its device and flags, an engine does."""
    found = []
    named = VERDICTS.read(settings)
    if named and not Path(named).is_dir():
        what = f"{VERDICTS} names {named}, which is no folder"
        found.append(TOPIC.warning(what, f"name another one, or unset {VERDICTS}"))
    digest = cache(verdicts.digest)
    for path in verdicts.files(settings):
        try:
            found.append(check_verdict(verdicts.read(path), digest))
        except (OSError, ValueError) as error:
            what = f"{path} is not used: {error}"
            found.append(TOPIC.warning(what, "remove it, and verify its command again"))
    return found


def check_verdict(verdict: Verdict, digest: Callable[[str], str]) -> Finding:
    """Return the finding about one verdict."""
    command = printable(shlex.join(verdict.command))
    again = f"kvpatch verify -- {command}"
    device = printable(verdict.combination["device"])
    what = f"{command} was {verdict.word} on {verdict.date}, on {device}"
    changes = stale(verdict, digest)
    if changes:
        what += f"; it holds no more, because {' and '.join(changes)}"
        return TOPIC.note(what, f"run {again}")
    if verdict.word != verdicts.RIGHT:
        return TOPIC.warning(f"{what} ({verdict.path})", f"report it, or run {again}")
    lifted = ", ".join(sorted(verdict.lifted))
    return TOPIC.ok(what + (f"; it lifts {lifted}" if lifted else ""))


def stale(verdict: Verdict, digest: Callable[[str], str]) -> list[str]:
    """Return what has changed since a verdict; nothing is imported for it."""
    changes = []
    then = verdict.combination["versions"]
    now = {name: _version(name) for name in then if name != "python"}
    for name, version in now.items():
        if version != then[name]:
            changes.append(f"{name} {then[name]} is now {version or 'missing'}")
    if changes:
        return changes  # so has its code
    code = verdict.combination["code"]
    changed = (package for package in sorted(code) if code[package] != digest(package))
    return [f"{package} has changed" for package in changed][:1]


def _version(name: str) -> str:
    if name == "kvpatch":
        return VERSION
    if name in ("vllm", "kvcached"):
        every = installed(name)
        return every[0].text if every else ""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
