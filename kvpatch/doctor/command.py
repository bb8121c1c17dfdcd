"""Whether a command would start, asked of vLLM in another process: ``would_start``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from kvpatch import masking
from kvpatch.doctor import interpreter, would_start
from kvpatch.doctor.finding import Finding, Topic
from kvpatch.environ import KVCACHED, OURS, SWITCH

TOPIC = Topic("command")
SECONDS = 300


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that ``[env] NAME=VALUE vllm serve`` sets, and its command."""
    rest, settings = list(words), {}
    if rest[:1] == ["env"] and not "".join(rest[1:2]).startswith("-"):
        rest = rest[1:]
    while rest and re.match(r"\w+=", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        settings[name] = value
    return settings, rest


def check(
    command: Sequence[str], settings: Mapping[str, str], known: Collection[str] = ()
) -> list[Finding]:
    """Ask whether a command would start, but for refusals that are known."""
    try:
        words = would_start.words_of(command)
    except ValueError as error:
        return [TOPIC.problem(f"{' '.join(masking.command(command))}: {error}")]
    code = f"from kvpatch.doctor import would_start; would_start.main({words!r})"
    try:
        done = interpreter.run(sys.executable, code, readable_only(settings), SECONDS)
    except subprocess.TimeoutExpired:
        return [TOPIC.problem(f"vLLM has not read the command within {SECONDS} s")]
    if done.returncode:
        lines = done.stderr.rstrip().splitlines() or [f"it ended {done.returncode}"]
        last = next((one for one in reversed(lines) if "kvpatch refuses" in one), lines[-1])
        found = re.search(r"\[(KVP\d+)\]$", last)
        if found and found[1] in known:
            return [
                TOPIC.note(f"its options were not read, because of the problem above [{found[1]}]")
            ]
        return [TOPIC.problem(last, code=found[1] if found else "")]
    said = json.loads(done.stdout.splitlines()[-1])
    wrong = [
        TOPIC.problem(masking.masked(explained(what, done.stdout + done.stderr)), remedy, code)
        for what, remedy, code in said["wrong"]
        if code not in known or not code
    ]
    warned = [TOPIC.warning(masking.masked(one)) for one in said["warnings"]]
    accepted = [TOPIC.ok(said["accepted"])] if said["accepted"] else []
    return [*accepted, *wrong, *warned]


def explained(what: str, logged: str) -> str:
    """Return what vLLM says is wrong, with the import that failed where it refers to its logs."""
    failed = re.findall(r"(?:ModuleNotFound|Import)Error: .+", logged)
    return f"{what} ({failed[-1]})" if "logs for more details" in what and failed else what


def readable_only(settings: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without unreadable values, each a finding already, and kvpatch on."""
    left = dict(settings)
    for variable in (*OURS, *KVCACHED):
        value = variable.read(settings)
        if variable.parse is not None and value:
            try:
                variable.parse(value)
            except ValueError:
                del left[variable.name]
    if not SWITCH.is_on(left):
        left[SWITCH.name] = "1"
    return left
