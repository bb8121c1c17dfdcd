"""``python -m kvpatch.ascend``: build kvcached for Ascend NPUs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvpatch.ascend import build, runtime
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
    arguments = parser.parse_args()
    return install(arguments.kvcached, arguments.emulator, arguments.target)


if __name__ == "__main__":
    sys.exit(main())
