"""What is in docs/containers, against the schemas and linters of those that read it.

Kubernetes' API schemas, the Compose specification, hadolint for the Dockerfile, yamllint for the
rest. Run by scripts/site, in the environment that it makes. What kvpatch itself asks of them is in
tests/unit/test_containers.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import yaml
from compose_spec import PyCompose
from yamllint import linter
from yamllint.config import YamlLintConfig

from harness import ROOT

FOLDER = ROOT / "docs/containers"
COMPOSE = FOLDER / "compose.yaml"
# A ModelClaim has a schema of AIBrix's, a PodMonitor one of the Prometheus operator's.
KUBERNETES = ("two-models.yaml", "disk-tier.yaml", "time-slicing.yaml")
# DRA is v1 from Kubernetes 1.34 on, which the manifest needs.
RELEASES = ("1.34", kubernetes_validate.latest_version())
# A series or an expression of PromQL is one line.
STYLE = """
extends: default
rules: {line-length: {max: 100, ignore: ["alerts*.yml"]}, document-start: disable}
"""


def of_yaml() -> Iterator[str]:
    """Yield what yamllint says of every YAML file, those of docs/monitoring as well."""
    style = YamlLintConfig(STYLE)
    files = [*FOLDER.glob("*.y*ml"), *(ROOT / "docs/monitoring").rglob("*.y*ml")]
    for path in sorted(files):
        for found in linter.run(path.read_text(), style, path.name):
            yield f"{path.relative_to(ROOT)}:{found.line}: {found.desc}"


def of_kubernetes(path: Path) -> Iterator[str]:
    """Yield what the API schemas of Kubernetes do not hold of a manifest."""
    for document in yaml.safe_load_all(path.read_text()):
        for release in RELEASES:
            try:
                kubernetes_validate.validate(document, release, strict=True)
            except (
                kubernetes_validate.ValidationError,
                kubernetes_validate.SchemaNotFoundError,
            ) as error:
                what = str(error).partition("\n")[0]  # and then the whole schema
                yield f"{path.name}, {document['kind']}, Kubernetes {release}: {what}"


def of_compose() -> Iterator[str]:
    """Yield what the Compose specification does not hold of the compose file."""
    # Its parser knows no merge keys, which Compose does: they are resolved here.
    resolved = yaml.safe_dump(yaml.safe_load(COMPOSE.read_text()))
    try:
        PyCompose.from_yaml(resolved).validate()
    except ValueError as error:
        yield f"{COMPOSE.name}: {error}"


def of_docker() -> Iterator[str]:
    """Yield what hadolint says of the Dockerfile."""
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), "--no-color", str(FOLDER / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    yield from done.stdout.splitlines()
    if done.returncode and not done.stdout:
        yield f"hadolint: {done.stderr}"


def main() -> int:
    """Print every fault; return 1 if there is one."""
    faults = [*of_yaml(), *of_compose(), *of_docker()]
    for name in KUBERNETES:
        faults += of_kubernetes(FOLDER / name)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
