"""``kvpatch clean``: list what engines left behind, and remove what is surely nobody's."""

from __future__ import annotations

import argparse
import json
import sys

from kvpatch.cli.columns import columns
from kvpatch.doctor import leftovers
from kvpatch.sizes import readable
from kvpatch.telemetry.printable import printable

EACH = 10  # lines of leftovers that differ in their path only


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--yes", action="store_true", help="remove them; else they are listed")
    parser.add_argument("--json", action="store_true", help="print every leftover as JSON")
    parser.epilog = (
        "Removed is what belongs to you and whose engine is known to have exited; nothing of other "
        "users, of containers that cannot be seen from here, and no pool under a name that an "
        "operator chose. Exit status 1: something could not be removed."
    )


def run(options: argparse.Namespace) -> int:
    """List the leftovers or remove them; return the exit code."""
    kinds = (*leftovers.KINDS, leftovers.LOGS)
    found = list(leftovers.find(kinds))
    # Once more: an engine may have started since the first look.
    still = {one.path for one in leftovers.find(kinds) if one.sure} if options.yes else ()
    gone: list[leftovers.Leftover] = []
    failed: list[str] = []
    for leftover in found:
        if leftover.sure and leftover.path in still:
            try:
                leftovers.remove(leftover)
                gone.append(leftover)
            except OSError as error:
                failed.append(f"{leftover.path}: {error.strerror}")
    if options.json:
        entries = [leftover.as_dict() | {"removed": leftover in gone} for leftover in found]
        print(json.dumps({"leftovers": entries, "failed": failed}, indent=2))
    else:
        print(text(found, gone, options.yes))
    for line in failed:
        print(printable(line), file=sys.stderr)
    return 1 if failed else 0


def text(found: list[leftovers.Leftover], gone: list[leftovers.Leftover], removing: bool) -> str:
    """Return a line per leftover, or for many that are alike, and what was or would be removed."""
    if not found:
        return "nothing is left behind in /dev/shm and /tmp"
    sure = [leftover for leftover in found if leftover.sure]
    alike: dict[tuple[str, str, str], list[leftovers.Leftover]] = {}
    for leftover in found:
        word = ("removed" if leftover in gone else "left") if removing else _would(leftover)
        alike.setdefault((word, leftover.owner, leftover.what), []).append(leftover)
    lines = []
    for (word, owner, what), some in alike.items():
        shown = some if len(some) <= EACH else some[: EACH - 1]
        rest = some[len(shown) :]
        named = [([one], str(one.path)) for one in shown]
        if rest:
            named.append((rest, f"{len(rest)} more; --json lists each"))
        lines += [(word, _bytes(of), printable(owner), what, printable(name)) for of, name in named]
    if removing:
        last = f"{len(gone)} removed, {_bytes(gone)}; {len(found) - len(gone)} left"
    else:
        last = (
            f"{len(sure)} of {len(found)}, {_bytes(sure)}, would be removed by kvpatch clean --yes"
        )
    return f"{columns(lines)}\n\n{last}"


def _would(leftover: leftovers.Leftover) -> str:
    return "nobody's" if leftover.sure else "stays"


def _bytes(some: list[leftovers.Leftover]) -> str:
    return readable(sum(leftover.bytes for leftover in some))
