"""scripts/pins.txt: one file per package and hash, which pip compares."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import console, pins, pythons, smollm2
from kvpatch.hostdevice import __main__ as install
from kvpatch.hostdevice.__main__ import KVCACHED, SDISTS

ROOT = Path(__file__).parents[2]
A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.mark.parametrize("path", [pins.PINS, smollm2.PINS], ids=["the packages", "a model"])
def test_every_package_has_a_hash(path):
    found = pins.pinned(path.read_text())
    assert {len(hashes) for _, hashes in found.values()} == {1}


def test_setup_compares_them():
    assert "--no-deps --require-hashes -r scripts/pins.txt" in (ROOT / "scripts/setup").read_text()


def test_the_sdist_of_kvcached_is_the_one_whose_sources_were_read():
    record = ROOT / f"docs/results/matrix/signatures/kvcached-{KVCACHED}.json"
    assert SDISTS[KVCACHED] == json.loads(record.read_text())["sha256"]


@pytest.mark.parametrize("line", ["rich", "rich>=13", "rich==15.0.0 --hash=md5:1", "-r other.txt"])
def test_what_is_not_pinned_is_an_error(line):
    with pytest.raises(console.HarnessError, match=re.escape(repr(line))):
        pins.pinned(f"# comment\n{line}\n")


def test_each_package_gets_its_hash():
    before = f"# comment\nTorch==1 --hash=sha256:{C}\nrich==2\n"
    assert pins.renewed(before, {"torch": A, "rich": B}) == (
        f"# comment\nTorch==1 --hash=sha256:{A}\nrich==2 --hash=sha256:{B}\n"
    )


def test_what_pip_reports_is_read():
    one = {
        "metadata": {"name": "Typing_Extensions"},
        "download_info": {"archive_info": {"hashes": {"sha256": A}}},
    }
    assert pins.downloads({"install": [one]}) == {"typing-extensions": A}


def test_other_pythons_take_the_versions_alone():
    found = pythons.pinned()
    assert len(found) > 20
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in found)


def test_only_that_sdist_is_built(monkeypatch):
    asked = []

    def run(command, **options):
        asked.append((command, Path(command[-1]).read_text()))
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(install.subprocess, "run", run)
    assert install.install(KVCACHED) == 1
    ((command, wanted),) = asked
    assert "--require-hashes" in command
    assert wanted == f"kvcached=={KVCACHED} --hash=sha256:{SDISTS[KVCACHED]}\n"
