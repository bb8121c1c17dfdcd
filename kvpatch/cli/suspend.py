"""``kvpatch suspend``: store what only the device has, and give an engine's memory back."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial

from kvpatch.cli import verbs
from kvpatch.control import Answer, Engine
from kvpatch.environ import seconds
from kvpatch.telemetry.printable import printable


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    verbs.name_argument(parser)
    parser.add_argument(
        "--finish", action="store_true", help="let running requests finish instead of waiting too"
    )
    parser.add_argument(
        "--whole", action="store_true", help="not if the CPU tier cannot keep every block"
    )
    parser.add_argument(
        "--timeout",
        type=partial(verbs.parsed, seconds),
        help="seconds after which the engine runs on as before",
    )
    parser.add_argument(
        "--plan", action="store_true", help="only say what would be kept and what lost"
    )
    parser.epilog = (
        "Ends 0 when the engine is suspended, 1 when it runs on; requests that arrive wait until "
        "kvpatch resume. Interrupting the command does not stop the engine."
    )


def run(options: argparse.Namespace) -> int:
    """Suspend the engine, or say what that would do."""

    def verb(engine: Engine) -> Answer:
        if options.plan:
            return engine.plan()
        if engine.phase not in ("runs", "suspended"):
            said = f"{engine.name} is {engine.phase} already: this waits for that suspension"
            print(printable(said), file=sys.stderr)
        return engine.suspend(
            finish=options.finish,
            whole=options.whole,
            timeout=options.timeout,
            tell=verbs.progress,
        )

    when = (
        "when its running requests have finished"
        if options.finish
        else "when its blocks are stored"
    )
    name = shlex.quote(options.name)
    return verbs.do(
        options, verb, f"it will be suspended {when}; kvpatch resume {name} gives that up"
    )
