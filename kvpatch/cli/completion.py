"""``kvpatch completion``: a script for a shell, made by shtab of the command's own parser."""

from __future__ import annotations

import argparse
import sys

from kvpatch import cli

SHELLS = ("bash", "zsh", "fish")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("shell", choices=SHELLS)
    parser.epilog = (
        "It needs shtab (pip install 'kvpatch[completion]'); the printed script does not. "
        "Exit status 2: shtab is not installed."
    )


def run(options: argparse.Namespace) -> int:
    """Print the script; return the exit code."""
    try:
        import shtab
    except ImportError:
        print("shtab is not installed: pip install shtab", file=sys.stderr)
        return 2
    print(shtab.complete(cli.parser(configured=cli.COMMANDS), shell=options.shell))
    return 0
