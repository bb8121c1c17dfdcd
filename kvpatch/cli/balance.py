"""``kvpatch balance``: move memory between the engines of a device, by demand."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from kvpatch import private
from kvpatch.balance import loop, options, seen
from kvpatch.balance.event import Event
from kvpatch.balance.options import Options, Wrong
from kvpatch.balance.records import Move, Terms
from kvpatch.balance.seen import Found
from kvpatch.cli import verbs
from kvpatch.control import Refused
from kvpatch.sizes import readable

WHY = "it started with that"
NOBODY = "no engine of this user listens"

PARTS = {
    "floor": ("NAME=SIZE", "memory that an engine always may map, for example chat=4GiB"),
    "ceiling": ("NAME=SIZE", "memory that an engine never may exceed"),
    "priority": ("NAME=NUMBER", "how much an engine counts when there is not enough; 1 if not set"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    once = parser.add_mutually_exclusive_group()
    once.add_argument(
        "--dry-run", action="store_true", help="look once, say what would be done, set no limit"
    )
    once.add_argument(
        "--restore",
        action="store_true",
        help="set the limits that the engines started with again, and end",
    )
    for part, (form, help_) in PARTS.items():
        parser.add_argument(
            f"--{part}", metavar=form, action="append", default=[], type=named, help=help_
        )
    parser.add_argument(
        "--lend",
        metavar="NAME",
        action="append",
        default=[],
        help="while no request of this engine waits, others may have all but what its requests "
        "need that are there, and a page; engines with a CPU tier lend so by themselves",
    )
    parser.add_argument(
        "--no-lend",
        metavar="NAME",
        action="append",
        default=[],
        help="always leave this engine what one of its requests may need",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of each device for its engines' KV caches together; else what they have "
        "mapped and what is free",
    )
    parser.add_argument("--every", metavar="TIME", help="time between two looks, 1s if not set")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML file with all of these")
    parser.add_argument("--rounds", metavar="N", type=verbs.count, help="end after so many looks")
    parser.add_argument("--json", action="store_true", help="print a JSON object per line")
    parser.epilog = (
        "NAME is an engine's kvcached name, the name of its model, or * for all without an own "
        "setting. Ends 0 when it is interrupted, and every engine keeps the limit that it has; 1 "
        "when another balance of this user runs, or a dry run met no engine, or none of a NAME; 2 "
        "when a setting cannot be used."
    )


def named(text: str) -> tuple[str, str]:
    """Return the name and the value of a setting."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


def run(options_: argparse.Namespace) -> int:
    """Balance until it is interrupted; return the exit code."""
    stop = threading.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda signum, frame: stop.set())

    def tell(event: Event) -> None:
        print(event.json if options_.json else event.line, flush=True)

    try:
        balance = loop.Balance(read(options_), tell, dry=options_.dry_run)
        if options_.dry_run:
            balance.run(stop, options_.rounds or 1)
            if not balance.found:
                raise Refused(NOBODY)
            return 1 if balance.unknown() else 0
        with loop.alone():
            if options_.restore:
                return restore(tell)
            balance.run(stop, options_.rounds)
        leave(balance.found, tell)
    except (Wrong, Refused, loop.Busy, private.Unsafe) as error:
        print(f"kvpatch balance: {error}", file=sys.stderr)
        return 2 if isinstance(error, Wrong) else 1
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"kvpatch balance: {error.filename or ''} {error.strerror}", file=sys.stderr)
        return 1
    return 0


def restore(tell: Callable[[Event], None]) -> int:
    """Set the first limits again, those that get less first; return 1 if one does not take it."""
    taken = True
    found = [one for one in seen.look({}).values() if one.handle]
    if not found:
        raise Refused(NOBODY)
    for one in sorted(found, key=lambda one: one.handle.first > one.engine.limit):  # type: ignore[union-attr]
        assert one.handle is not None
        if not one.handle.first:  # it has not even said what it is
            tell(Event(time.time(), one.engine.name, "silent", one.why_not, limit=one.engine.limit))
            taken = False
            continue
        move = Move(one.engine.name, one.engine.limit, one.handle.first, WHY)
        refused = None
        if move.limit != move.before:
            try:
                one.handle.limit(move.limit, patience=loop.GIVES)
            except Refused as error:
                refused, taken = error, False
        tell(Event.of(time.time(), move, False, refused))
    return 0 if taken else 1


def leave(before: Mapping[str, Found], tell: Callable[[Event], None]) -> None:
    """Say which limits the engines keep."""
    for name, one in sorted(seen.look(before).items()):
        why, page = "", one.engine.page or 1
        # The first one is in whole pages, as kvcached keeps them, and not as it was written.
        if one.handle and one.handle.first not in (0, one.engine.limit // page * page):
            why = f"it started with {readable(one.handle.first)}: kvpatch balance --restore"
        tell(Event(time.time(), name, "left", why, limit=one.engine.limit))


def read(given: argparse.Namespace) -> Options:
    """Return the options of a command line, which come before those of its file."""
    found = options.read(given.config) if given.config else Options()
    said = {name: getattr(given, name) for name in ("memory", "every") if getattr(given, name)}
    found = replace(
        found, **{name: getattr(options.of({name: text}), name) for name, text in said.items()}
    )
    if both := sorted(set(given.lend).intersection(given.no_lend)):
        raise Wrong(f"{', '.join(both)} has both --lend and --no-lend; leave one out")
    parts: dict[str, dict[str, str | bool]] = {name: {"lends": True} for name in given.lend}
    parts |= {name: {"lends": False} for name in given.no_lend}
    for part in PARTS:
        settings: Iterable[tuple[str, str]] = getattr(given, part)
        for name, value in settings:
            parts.setdefault(name, {})[part] = value
    terms = dict(found.terms)
    for name, values in parts.items():
        terms[name] = options.with_(terms.get(name, Terms()), name, values)
    return replace(found, terms=terms)
