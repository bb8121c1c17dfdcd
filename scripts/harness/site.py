"""scripts/site: the documentation as pages, and whether others can read what goes with them.

``build`` writes site/ and fails on a broken link, a page that is left out, a dashboard that
Grafana's schema does not hold, or a fault of ``docs/containers``: by Kubernetes' API schemas, the
Compose specification, hadolint and yamllint. ``serve`` shows the pages on http://127.0.0.1:8000
while they are written. The tools are in an environment of their own, .venv-docs.
"""

import os
import subprocess

from harness import ROOT, console, venvs

VENV = ROOT / ".venv-docs"
BIN = VENV / "bin"
CONTAINERS = "docs/containers"
# A series or an expression of PromQL is one line.
STYLE = """
extends: default
rules: {line-length: {max: 100, ignore: ["alerts*.yml"]}, document-start: disable}
"""
BUILD = (
    ("python", "-m", "harness.schemas"),
    ("yamllint", "--strict", "-d", STYLE, CONTAINERS, "docs/monitoring"),
    ("hadolint", "--no-color", f"{CONTAINERS}/Dockerfile"),
    ("python", "-m", "mkdocs", "build", "--strict", "--quiet"),
)
SERVE = (("python", "-m", "mkdocs", "serve"),)


def make() -> None:
    """Make the environment."""
    python = os.environ.get("PYTHON", "python3.11")
    subprocess.run([python, "-m", "venv", VENV], check=True)
    venvs.install(BIN / "python", "--no-deps", "-r", ROOT / "docs/requirements.txt")


def main() -> int:
    """Build or serve the pages; the status is of the first command that fails."""
    parser = console.parser("scripts/site", __doc__ or "")
    parser.add_argument("action", nargs="?", choices=("build", "serve"), default="build")
    action = parser.parse_args().action
    venvs.made(VENV, (ROOT / "docs/requirements.txt").read_text(), make)
    environment = os.environ | {
        "KVPATCH": "0",
        "NO_MKDOCS_2_WARNING": "1",
        "PYTHONPATH": str(ROOT / "scripts"),
    }
    for tool, *words in BUILD if action == "build" else SERVE:
        done = subprocess.run([BIN / tool, *words], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            return done.returncode
    return 0
