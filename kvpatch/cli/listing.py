"""``kvpatch list``: the engines that can be told to suspend, resume and keep a limit."""

from __future__ import annotations

import argparse
import json
import sys

from kvpatch import private
from kvpatch.cli.columns import columns
from kvpatch.control import Engine
from kvpatch.control.client import every
from kvpatch.sizes import readable
from kvpatch.telemetry.printable import printable
from kvpatch.telemetry.reader import state_of

HEAD = (
    "PID",
    "NAME",
    "MODEL",
    "STATE",
    "RUN",
    "WAIT",
    "MAPPED+RESERVED",
    "LIMIT",
    "LENT",
    "BORROWED",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.epilog = (
        "The words are those of kvpatch status. LENT is what the limit is below the one that the "
        "engine started with, BORROWED what it is above. What is lent is lent to none by name: any "
        "engine of the device may map it, up to its own limit. Ends 1 when no engine of this user "
        "listens."
    )


def run(options: argparse.Namespace) -> int:
    """Print the engines; return the exit code."""
    try:
        found, silent = every()
    except private.Unsafe as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([engine.said for engine in found]))
    elif found:
        print(columns([HEAD, *map(line, found)]))
        lent, borrowed = (sum(one) for one in zip(*map(moved, found), strict=True))
        if lent or borrowed:
            print(f"of all: {readable(lent)} lent, {readable(borrowed)} borrowed")
        for engine in found:
            if why_not := engine.said.get("why_not"):
                print(printable(f"{engine.name} cannot be suspended: {why_not}"))
    elif not silent:
        print("no engine of this user listens")
    for one in silent:
        print(printable(one.sentence), file=sys.stderr)
    return 0 if found else 1


def moved(engine: Engine) -> tuple[int, int]:
    """Return the bytes that an engine lent, and those that it borrowed."""
    limit = int(engine.said.get("limit", 0))
    return max(0, engine.first - limit), max(0, limit - engine.first)


def line(engine: Engine) -> tuple[str, ...]:
    """Return an engine's line, nothing of which reaches the terminal but text."""
    said = engine.said
    limit = int(said.get("limit", 0))
    cells = (
        str(said.get("pid", "")),
        engine.name,
        ", ".join(engine.models),
        state_of(engine.phase).value,
        str(said.get("running", "")),
        str(said.get("waiting", "")),
        readable(int(said.get("mapped", 0))),
        readable(limit),
        *map(readable, moved(engine)),
    )
    return tuple(map(printable, cells))
