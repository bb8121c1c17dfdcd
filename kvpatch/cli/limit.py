"""``kvpatch limit``: set the memory of the device that an engine may map."""

from __future__ import annotations

import argparse

from kvpatch.cli import verbs
from kvpatch.environ import size


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    verbs.name_argument(parser)
    parser.add_argument("size", type=size, help="for example 8GiB or 512MiB")
    parser.epilog = "While the engine is suspended, the limit holds from its resumption on."


def run(options: argparse.Namespace) -> int:
    """Set the limit."""
    return verbs.do(options, lambda engine: engine.limit(options.size, tell=verbs.progress))
