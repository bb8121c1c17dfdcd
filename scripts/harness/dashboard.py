"""The Grafana dashboard, checked against Grafana's own schema.

Grafana's SDK reads the file into its types and writes it back: a field that is lost or changed
on the way is an error. Run by scripts/site, in the environment that it makes.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from harness import ROOT

FOLDER = ROOT / "docs/monitoring/grafana/dashboards"


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield the place of everything in ``given`` that is not in ``kept``."""
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(kept, dict) or name not in kept:
                yield f"{path}/{name}"
            else:
                yield from lost(value, kept[name], f"{path}/{name}")
    elif isinstance(given, list):
        for number, value in enumerate(given):
            there = isinstance(kept, list) and number < len(kept)
            yield from lost(value, kept[number] if there else None, f"{path}/{number}")
    elif given != kept:
        yield f"{path}: {given!r} is read as {kept!r}"


def main() -> int:
    """Check every dashboard; return 1 when something of one is lost."""
    plugins.register_default_plugins()
    faults = []
    for path in sorted(FOLDER.glob("*.json")):
        given = json.loads(path.read_text())
        kept = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(given)))
        faults += [f"{path.name}{place}" for place in lost(given, kept)]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
