"""The bill of materials that is built with the wheels."""

import hashlib
import json
from datetime import datetime, timezone

import pytest

pytest.importorskip("cyclonedx")  # of .venv, which builds the wheels; scripts/pythons is without

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from harness import pins, sbom
from kvpatch.version import VERSION

PINNED = pins.pinned(pins.PINS.read_text())
WHEN = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def text(wheel):
    return sbom.bill(wheel, PINNED, WHEN)


def needs(text, name):
    """Return the names of what a package requires."""
    (found,) = [
        one["dependsOn"]
        for one in json.loads(text)["dependencies"]
        if one["ref"].partition("==")[0] == name
    ]
    return [need.partition("==")[0] for need in found]


def test_it_is_cyclonedx(text):
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_it_is_of_this_wheel(text, wheel):
    about = json.loads(text)["metadata"]["component"]
    assert (about["name"], about["version"]) == ("kvpatch", VERSION)
    assert about["purl"] == f"pkg:pypi/kvpatch@{VERSION}"
    assert about["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert about["hashes"] == [{"alg": "SHA-256", "content": digest}]


def test_it_has_everything_required_in_the_pinned_version(text):
    found = {one["name"]: one for one in json.loads(text)["components"]}
    assert found.keys() == {
        *("packaging", "psutil", "rich", "wrapt"),
        *("markdown-it-py", "mdurl", "pygments"),  # of rich
    }
    for name, one in found.items():
        version, hashes = PINNED[name]
        assert one["version"] == version
        assert {each["content"] for each in one["hashes"]} == hashes


def test_it_says_what_requires_what(text):
    assert needs(text, "kvpatch") == ["packaging", "psutil", "rich", "wrapt"]
    assert needs(text, "rich") == ["markdown-it-py", "pygments"]


def test_it_is_the_same_each_time(text, wheel):
    assert sbom.bill(wheel, PINNED, WHEN) == text


def test_the_host_device_requires_kvpatch(host_wheel):
    text = sbom.bill(host_wheel, PINNED, WHEN)
    assert needs(text, "kvpatch-hostdevice") == ["kvpatch", "wrapt"]
