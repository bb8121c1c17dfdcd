"""``kvpatch limit``: set the memory of the device that an engine may map."""

from __future__ import annotations

import argparse
from functools import partial

from kvpatch import environ
from kvpatch.cli import verbs
from kvpatch.control import Answer, Engine


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    verbs.name_argument(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "size",
        type=partial(verbs.parsed, environ.share),
        nargs="?",
        help="for example 8GiB, or 50%% of the KV cache that the engine started with",
    )
    which.add_argument(
        "--reset", action="store_true", help="the limit that the engine started with"
    )
    parser.epilog = (
        "G, GB and GiB are the same. While the engine is suspended, the limit holds from its "
        "resumption on."
    )


def run(options: argparse.Namespace) -> int:
    """Set the limit."""

    def verb(engine: Engine) -> Answer:
        size = engine.first if options.reset else options.size.of(engine.most)
        return engine.limit(size, tell=verbs.progress)

    goes_on = "it keeps to the limit that it was told, and gives back what is above it"
    return verbs.do(options, verb, goes_on)
