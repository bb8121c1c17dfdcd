"""``python -m kvpatch.ascend``: build kvcached for Ascend NPUs, and ask one what it does."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kvpatch import verdicts
from kvpatch.ascend import build, runtime
from kvpatch.ascend.probe import asking, verdict
from kvpatch.supported import KVCACHED_SDISTS


def install(version: str, emulated: bool, target: Path | None) -> int:
    """Build and install kvcached; return the exit status."""
    try:
        found = None if emulated else runtime.find()
        found = found or runtime.emulator()
        print(f"building kvcached {version} against {found}", flush=True)
        status = build.install(found, version, target)
    except (LookupError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    if status:
        print(
            "kvcached was not built: it needs g++, torch, setuptools>=77 and wheel in this "
            "environment; see pip's output above",
            file=sys.stderr,
        )
    elif found.emulated:
        print(f"processes that use it need: source {found.home / 'set_env.sh'}")
    return status


CODES = {asking.RIGHT: 0, asking.WRONG: 1, asking.UNFINISHED: 3}


def probe(device: int, folder: Path | None) -> int:
    """Ask a device, write the verdict, and return the exit status."""
    found = runtime.find()
    if found is None:
        print("CANN was not found; source its set_env.sh", file=sys.stderr)
        return CODES[asking.UNFINISHED]
    print(f"device {device} of {found}", flush=True)
    answers = asking.ask(found.home / runtime.LIBRARY, device, lambda line: print(line, flush=True))
    word = asking.word(answers)
    print(f"the probe was {word}")
    if word != asking.UNFINISHED:
        of, date = verdict.machine(found), time.strftime("%Y-%m-%d")
        path = verdict.write(answers, word, of, date, folder or verdicts.own_folder())
        print(f"verdict: {path}")
    if found.emulated:
        print("an emulator's answers say nothing of a device")
    print("no engine of kvpatch's tests has run on an NPU")
    return CODES[word]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvpatch.ascend", description="kvcached on Ascend NPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    installer = commands.add_parser(
        "install", help="build kvcached against CANN, or without it against the ACL emulator"
    )
    version = next(iter(KVCACHED_SDISTS))
    installer.add_argument(
        "--kvcached",
        default=version,
        choices=KVCACHED_SDISTS,
        help="version (default: %(default)s)",
    )
    installer.add_argument(
        "--emulator", action="store_true", help="against the emulator, also where CANN is"
    )
    installer.add_argument("--target", type=Path, help="install into this folder")
    prober = commands.add_parser(
        "probe", help="ask an NPU, in a minute, what kvpatch needs to know before it starts there"
    )
    prober.add_argument("--device", type=int, default=0, help="its number (default: 0)")
    prober.add_argument(
        "--verdicts", type=Path, metavar="DIR", help="folder for the verdict (default: the user's)"
    )
    prober.epilog = "Exit status: 0 right, 1 wrong, 3 not everything was asked."
    arguments = parser.parse_args()
    if arguments.command == "probe":
        return probe(arguments.device, arguments.verdicts)
    return install(arguments.kvcached, arguments.emulator, arguments.target)


if __name__ == "__main__":
    sys.exit(main())
