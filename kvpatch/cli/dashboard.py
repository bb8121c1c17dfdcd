"""``kvpatch dashboard``: Grafana's dashboard, or Prometheus' alerts, of this version's series."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_HERE = Path(__file__)
# In a wheel, and in the repository, whose pyproject.toml puts them there.
FOLDERS = (_HERE.parent / "monitoring", _HERE.parents[2] / "docs/monitoring")
DASHBOARD, ALERTS = "grafana/dashboards/kvpatch.json", "alerts.yml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--alerts", action="store_true", help="Prometheus' alert rules instead of the dashboard"
    )
    parser.epilog = (
        "Import it in Grafana (Dashboards, New, Import), or provision it; the rules are a file of "
        "Prometheus' rule_files."
    )


def run(options: argparse.Namespace) -> int:
    """Print the file."""
    sys.stdout.write(content(ALERTS if options.alerts else DASHBOARD))
    return 0


def content(name: str) -> str:
    """Return one of the files, or raise FileNotFoundError."""
    for folder in FOLDERS:
        if (folder / name).is_file():
            return (folder / name).read_text()
    raise FileNotFoundError(f"{name} is not installed with kvpatch")
