"""The benchmark: every arm side by side; see scripts/bench.

Run by scripts/bench in the project's environment.
"""

from __future__ import annotations

import os
import sys

from harness.bench.options import parse


def main(arguments: list[str]) -> int:
    """Run what is asked for and return the exit status."""
    if arguments[:1] == ["micro"]:
        from harness.bench import micro

        return micro.main(arguments[1:])
    if arguments[:1] == ["profile"]:
        from harness.bench import profile

        return profile.main(arguments[1:])
    options = parse(arguments)

    # Only now, so that --help and bad options need no environment.
    from harness.bench.bench import Bench
    from harness.demo import ending
    from harness.console import Screen

    screen = Screen("bench")
    return ending.run(screen, lambda: Bench(options, screen).run(), "that was started")


if __name__ == "__main__":
    os.environ["KVPATCH"] = "0"  # the servers are looked at from outside
    status = main(sys.argv[1:])
    # What vLLM's client brings along prints pages about itself when the interpreter ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
