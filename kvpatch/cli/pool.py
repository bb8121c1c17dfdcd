"""``kvpatch pool``: the host memory that this user's engines share, and its limit."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from kvpatch import environ, host_memory
from kvpatch.cli.columns import columns
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger
from kvpatch.pool.ledger import Peer
from kvpatch.pool.record import Limit
from kvpatch.sizes import readable
from kvpatch.telemetry.printable import printable

HEAD = ("model", "committed", "in blocks", "keeps", "at most", "coldest", "")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "size", nargs="?", help="set the limit, for example 32GiB, or 32GiB@name of a named pool"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.epilog = (
        f"The pool is the one that {HOST_POOL} names here, if it is set. A lower limit holds at "
        "once, and the engines give back what is over it. Exit status 1: no engine is in the pool, "
        "2: it cannot be read or changed."
    )


def run(options: argparse.Namespace) -> int:
    """Set the limit if asked to, and print the pool; return the exit code."""

    def failed(why: str, code: int = 2) -> int:
        print(json.dumps({"error": why}) if options.json else why)
        return code

    size, ours = options.size, HOST_POOL.read()
    said = size or f"{HOST_POOL}={ours}"
    try:
        wanted, name = _read(size or ours)
        if size and "@" not in size:
            said = f"{HOST_POOL}={ours}"
            name = _read(ours)[1]
    except ValueError as error:
        return failed(f"{said} is no size of a pool: {error}")
    folder = ledger.home(name)
    try:
        if size:
            if why_not := _too_large(folder, wanted):
                return failed(why_not)
            if not ledger.set_limit(folder, wanted):
                return failed(f"no engine is in the pool {folder}", 1)
        shown = ledger.show(folder, remove=True)
    except (ledger.Busy, ledger.Foreign, OSError) as error:
        return failed(f"the pool {folder} cannot be used: {type(error).__name__}: {error}")
    if shown is None:
        return failed(f"no engine is in the pool {folder}", 1)
    print(as_json(*shown) if options.json else text(*shown))
    return 0


def _too_large(folder: Path, wanted: int) -> str:
    """Return why a pool cannot have a limit, as one sentence; empty if it can."""
    shown = ledger.show(folder)
    if shown is None or wanted <= shown[0].current:
        return ""
    committed, ceiling = ledger.taken(shown[1])
    needed, free = min(wanted, ceiling), host_memory.here().free_in_shm + committed
    if needed <= free:
        return ""
    return (
        f"the engines of the pool may take {readable(needed)} then, and /dev/shm and the memory of "
        f"this machine and its container have {readable(free)} for it"
    )


def _read(text: str) -> tuple[int, str]:
    return environ.engines_pool(text) if text else (0, "")


def as_json(limit: Limit, engines: list[Peer]) -> str:
    """Return a pool as JSON."""
    return json.dumps(
        {
            "limit": limit.current,
            "started_with": limit.configured,
            "committed": sum(one.owner.committed for one in engines),
            "engines": [
                {**one.owner._asdict(), "state": state(one, time.monotonic(), limit.current)}
                for one in engines
            ],
        },
        indent=2,
    )


def text(limit: Limit, engines: list[Peer]) -> str:
    """Return a pool as text: its limit, and a line per engine."""
    now = time.monotonic()
    committed = sum(one.owner.committed for one in engines)
    head = f"{readable(committed)} of {readable(limit.current)} committed"
    if limit.current != limit.configured:
        head += f" (started with {readable(limit.configured)})"
    lines: list[tuple[str, ...]] = [HEAD]
    for one in engines:
        owner = one.owner
        # An extent that holds nothing is older than any machine.
        age = f"{now - owner.coldest:.0f} s" if owner.coldest >= 1 else "-"
        sizes = map(readable, (owner.committed, owner.resident, owner.floor, owner.ceiling))
        lines.append((printable(owner.name), *sizes, age, state(one, now, limit.current)))
    return f"{head}\n{columns(lines)}"


def state(engine: Peer, now: float, limit: int) -> str:
    """Return whether an engine takes part in the pool."""
    if engine.dying:
        return "ended, its memory is being freed"
    if not engine.answers(now):
        return "does not answer"
    least = engine.owner.extent
    return f"stores nothing: it takes {readable(least)} at a time" if least > limit else ""
