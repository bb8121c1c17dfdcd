"""scripts/sbom: the bill of materials of built wheels, in CycloneDX's JSON.

Of each wheel in a folder: its hash, its licence, and everything that it requires, directly or
indirectly, in the version and with the hash that the tests ran with (scripts/pins.txt). vLLM,
kvcached and torch are the operator's own and required by none of them.
"""

import hashlib
import os
import uuid
import zipfile
from collections.abc import Iterable
from datetime import datetime, timezone
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness import console, pins


def requirements(lines: Iterable[str]) -> list[str]:
    """Return the canonical names of requirements that apply here, of no extra."""
    wanted = [Requirement(line) for line in lines]
    return sorted(
        canonicalize_name(one.name)
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": ""})
    )


def component(about: Message, version: str, hashes: Iterable[str]) -> Component:
    """Return a package as a component, from its metadata and the hashes of its files."""
    name = canonicalize_name(about["Name"])
    licence = about.get("License-Expression") or about.get("License") or ""
    known = [LicenseFactory().make_from_string(licence)] if licence and "\n" not in licence else []
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}=={version}",
        purl=PackageURL("pypi", name=name, version=version),
        licenses=known,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes],
    )


def bill(wheel: Path, pinned: dict[str, tuple[str, frozenset[str]]], when: datetime) -> str:
    """Return the bill of materials of a wheel as JSON; equal for equal arguments."""
    with zipfile.ZipFile(wheel) as content:
        (name,) = [
            one
            for one in content.namelist()
            if one.endswith(".dist-info/METADATA") and one.count("/") == 1
        ]
        about = HeaderParser().parsestr(content.read(name).decode())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{digest}"))
    bom.metadata.timestamp = when
    bom.metadata.component = component(about, about["Version"], [digest])
    made: dict[str, Component] = {canonicalize_name(about["Name"]): bom.metadata.component}
    waiting = [(bom.metadata.component, about.get_all("Requires-Dist") or [])]
    while waiting:
        who, lines = waiting.pop()
        needs = []
        for need in requirements(lines):
            if need not in made:
                installed = metadata.distribution(need)
                version, hashes = pinned.get(need, (installed.version, frozenset()))
                told = HeaderParser().parsestr(installed.read_text("METADATA") or "")
                made[need] = component(told, version, sorted(hashes))
                bom.components.add(made[need])
                waiting.append((made[need], installed.requires or []))
            needs.append(made[need])
        bom.register_dependency(who, needs)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def main() -> int:
    """Write the bill of each wheel beside it."""
    parser = console.parser("scripts/sbom", __doc__ or "")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("dist"))
    folder: Path = parser.parse_args().folder
    pinned = pins.pinned(pins.PINS.read_text())
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    when = datetime.fromtimestamp(int(epoch), timezone.utc) if epoch else datetime.now(timezone.utc)
    for wheel in sorted(folder.glob("*.whl")):
        path = wheel.with_name("-".join(wheel.name.split("-")[:2]) + ".cdx.json")
        path.write_text(bill(wheel, pinned, when))
        print(path)
    return 0
