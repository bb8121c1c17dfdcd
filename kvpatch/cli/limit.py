"""``kvpatch limit``: set the memory of the device that an engine may map."""

from __future__ import annotations

import argparse

from kvpatch import environ
from kvpatch.cli import verbs


def size(text: str) -> int:
    """Return a size in bytes; argparse prints the sentence of this error, of no other."""
    try:
        return environ.size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    verbs.name_argument(parser)
    parser.add_argument("size", type=size, help="for example 8GiB or 512MiB")
    parser.epilog = "While the engine is suspended, the limit holds from its resumption on."


def run(options: argparse.Namespace) -> int:
    """Set the limit."""
    return verbs.do(options, lambda engine: engine.limit(options.size, tell=verbs.progress))
