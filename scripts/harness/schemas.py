"""The Grafana dashboard and docs/containers, against the schemas of those that read them.

Grafana's SDK reads a dashboard into its types and writes it back: a field that is lost or changed
on the way is an error. Run by scripts/site, in the environment that it makes. What kvpatch itself
asks of docs/containers is in tests/unit/test_containers.py.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import yaml
from compose_spec import PyCompose
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from harness import ROOT

DASHBOARDS = ROOT / "docs/monitoring/grafana/dashboards"
CONTAINERS = ROOT / "docs/containers"
# A ModelClaim has a schema of AIBrix's, a PodMonitor one of the Prometheus operator's.
KUBERNETES = ("two-models.yaml", "disk-tier.yaml", "time-slicing.yaml")
# DRA is v1 from Kubernetes 1.34 on, which the manifest needs.
RELEASES = ("1.34", kubernetes_validate.latest_version())


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield the place of everything in ``given`` that is not in ``kept``."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from lost(value, kept.get(name, "nothing"), f"{path}/{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, value in enumerate(given):
            yield from lost(value, kept[number], f"{path}/{number}")
    elif given != kept:
        yield f"{path}: {given!r} is read as {kept!r}"


def of_dashboards() -> Iterator[str]:
    """Yield what Grafana's types lose of a dashboard."""
    plugins.register_default_plugins()
    for path in sorted(DASHBOARDS.glob("*.json")):
        given = json.loads(path.read_text())
        kept = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(given)))
        for place in lost(given, kept):
            yield f"{path.name}{place}"


def of_kubernetes() -> Iterator[str]:
    """Yield what the API schemas of Kubernetes do not hold of a manifest, or do not know."""
    for name, release in itertools.product(KUBERNETES, RELEASES):
        for document in yaml.safe_load_all((CONTAINERS / name).read_text()):
            try:
                kubernetes_validate.validate(document, release, strict=True)
            except (
                kubernetes_validate.ValidationError,
                kubernetes_validate.SchemaNotFoundError,
            ) as error:
                what = str(error).partition("\n")[0]  # and then the whole schema
                yield f"{name}, {document['kind']}, Kubernetes {release}: {what}"


def of_compose() -> Iterator[str]:
    """Yield what the Compose specification does not hold of the compose file."""
    # Its parser knows no merge keys, which Compose does: they are resolved here.
    resolved = yaml.safe_dump(yaml.safe_load((CONTAINERS / "compose.yaml").read_text()))
    try:
        PyCompose.from_yaml(resolved).validate()
    except ValueError as error:
        yield f"compose.yaml: {error}"


if __name__ == "__main__":
    sys.exit("\n".join([*of_dashboards(), *of_kubernetes(), *of_compose()]) or 0)
