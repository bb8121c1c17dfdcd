"""The benchmark: every arm side by side; see scripts/bench.

Run by scripts/bench in the project's environment.
"""

from __future__ import annotations

import os
import sys

from harness.bench.options import parse


def main(arguments: list[str]) -> int:
    """Run one of the benchmarks and return the exit status."""
    # Imports only now, so that --help and bad options need no environment.
    if arguments[:1] == ["sharing"]:
        from harness.bench import eight_models

        return eight_models.main(arguments[1:])
    if arguments[:1] == ["steps"]:
        from harness.bench import engine_steps

        return engine_steps.main(arguments[1:])
    if arguments[:1] == ["instructions"]:
        from harness.bench import instructions

        return instructions.main(arguments[1:])
    options = parse(arguments)

    from harness import console
    from harness.bench.run import run

    screen = console.Screen("bench")
    return console.run(screen, lambda: run(options, screen))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # The modules of vLLM's client print pages about themselves when the interpreter exits.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
