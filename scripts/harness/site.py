"""scripts/site: the documentation as pages, and whether others can read what goes with them.

``build`` writes site/ and fails on a broken link, a page that is left out, a dashboard that
Grafana's schema does not hold, or a fault of ``docs/containers``. ``serve`` shows the pages on
http://127.0.0.1:8000 while they are written. The tools are in an environment of their own,
.venv-docs.
"""

import os
import subprocess

from harness import ROOT, console, venvs

VENV = ROOT / ".venv-docs"
PYTHON = VENV / "bin/python"


def make() -> None:
    """Make the environment."""
    python = os.environ.get("PYTHON", "python3.11")
    subprocess.run([python, "-m", "venv", VENV], check=True)
    venvs.install(PYTHON, "--no-deps", "-r", ROOT / "docs/requirements.txt")


def main() -> int:
    """Build or serve the pages."""
    parser = console.parser("scripts/site", __doc__ or "")
    parser.add_argument("action", nargs="?", choices=("build", "serve"), default="build")
    action = parser.parse_args().action
    venvs.made(VENV, (ROOT / "docs/requirements.txt").read_text(), make)
    commands = [["-m", "mkdocs", "serve"]]
    if action == "build":
        commands = [["-m", f"harness.{check}"] for check in ("dashboard", "containers")]
        commands.append(["-m", "mkdocs", "build", "--strict", "--quiet"])
    environment = os.environ | {
        "KVPATCH": "0",
        "NO_MKDOCS_2_WARNING": "1",
        "PYTHONPATH": str(ROOT / "scripts"),
    }
    for command in commands:
        done = subprocess.run([PYTHON, *command], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            return done.returncode
    return 0
