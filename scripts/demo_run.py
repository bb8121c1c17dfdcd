"""The demo: plain vLLM, then vLLM on elastic memory, and every token compared.

Run by scripts/demo in the project's environment.
"""

from __future__ import annotations

import os
import sys

from demo_lib.options import parse


def main(arguments: list[str]) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)

    # Only now, so that --help and bad options need no environment.
    from demo_lib import ending
    from demo_lib.screen import Screen
    from demo_lib.story import Story

    screen = Screen()
    return ending.run(screen, lambda: Story(options, screen).tell(), "the demo started")


if __name__ == "__main__":
    os.environ["KVPATCH"] = "0"  # the demo looks at the servers from outside
    sys.exit(main(sys.argv[1:]))
