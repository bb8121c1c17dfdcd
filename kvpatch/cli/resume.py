"""``kvpatch resume``: give a suspended engine its limit back."""

from __future__ import annotations

import argparse

from kvpatch.cli import verbs


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    verbs.name_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Resume the engine."""
    return verbs.do(options, lambda engine: engine.resume(tell=verbs.progress))
