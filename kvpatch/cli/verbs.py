"""What the commands that change an engine have in common, and how options are read."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from kvpatch import private
from kvpatch.control import Answer, Engine, Refused, find
from kvpatch.telemetry.printable import printable

Verb = Callable[[Engine], Answer]
_Value = TypeVar("_Value")


def parsed(read: Callable[[str], _Value], text: str) -> _Value:
    """Return what an option means; argparse prints the sentence of this error, of no other."""
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def count(text: str) -> int:
    """Return a number above 0 of an option."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return int(text)


def name_argument(parser: argparse.ArgumentParser) -> None:
    """Add the engine's name, and how its answer is printed."""
    parser.add_argument("name", help="its kvcached name, the name of its model, or its pid")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def do(options: argparse.Namespace, verb: Verb, goes_on: str) -> int:
    """Do something to the named engine, which ``goes_on`` if nobody waits; return the code."""
    engine = None
    try:
        engine = find(options.name)
        answer = verb(engine)
    except (Refused, private.Unsafe) as refused:
        if options.json:
            print(json.dumps({"name": options.name, "error": str(refused)}))
        else:
            print(printable(f"{options.name}: {refused}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if engine is not None:
            start = "\r\x1b[K" if sys.stderr.isatty() else ""
            print(start + printable(f"{engine.name} goes on: {goes_on}"), file=sys.stderr)
        raise
    if options.json:
        print(json.dumps({"name": engine.name} | answer.said))
    else:
        print(printable(f"{engine.name}: {answer.sentence}"))
    return 0


def progress(said: dict[str, Any]) -> None:
    """Show a line of progress to a person who waits."""
    if not sys.stderr.isatty():
        return
    line = str(said.get("phase", ""))
    if "missing" in said and said.get("phase") == "storing":
        line += f", {said.get('planned', 0)} of {said['missing']} blocks"
    print(f"\r\x1b[K{printable(line)}", end="", file=sys.stderr, flush=True)
