"""``kvpatch resume``: give a suspended engine its limit back."""

from __future__ import annotations

import argparse

from kvpatch.cli import verbs

GOES_ON = "it is resumed as soon as it has its memory; kvpatch list shows it"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    verbs.name_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Resume the engine."""
    return verbs.do(options, lambda engine: engine.resume(tell=verbs.progress), GOES_ON)
