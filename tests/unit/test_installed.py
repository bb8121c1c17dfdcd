"""What is tested is what is released: an engine of .ci/run runs kvpatch from its wheel."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ROOT, provenance
from harness.console import HarnessError

STARTUP = ROOT / "scripts/harness/startup"
OTHER = 'VERSION = "of the wheel"'


@pytest.fixture
def wheel(monkeypatch):
    monkeypatch.setattr(provenance, "installed", lambda: "wheel")


def test_the_checkouts_kvpatch_is_refused_where_the_wheel_is_installed(wheel):
    with pytest.raises(HarnessError, match="kvpatch is installed from its wheel"):
        provenance.check_installed(str(ROOT / "kvpatch/__init__.py"))
    provenance.check_installed(str(ROOT / ".venv/lib/python3.11/site-packages/kvpatch/__init__.py"))


def test_it_is_taken_in_place(monkeypatch):
    monkeypatch.setattr(provenance, "installed", lambda: "in place")
    provenance.check_installed(str(ROOT / "kvpatch/__init__.py"))


def test_a_process_in_the_checkout_finds_the_installed_one(tmp_path):
    """``python -m`` puts the folder that it runs in first."""
    (tmp_path / "kvpatch").mkdir()
    (tmp_path / "kvpatch/__init__.py").write_text(OTHER)
    lines = [f"sys.path.append({str(tmp_path)!r})", "import kvpatch", "print(kvpatch.__file__)"]
    found = []
    for first in ([], [f"sys.path.insert(0, {str(STARTUP)!r})", "import kvpatch_from_wheels"]):
        command = [sys.executable, "-S", "-c", "\n".join(["import sys", *first, *lines])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found.append(Path(done.stdout.strip()).parents[1])
    assert found == [ROOT, tmp_path]


def test_ci_installs_the_wheels_before_any_lane():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    setup = lines.index("scripts/setup --wheels")
    lanes = [at for at, line in enumerate(lines) if re.match(r"(    )?lane ", line)]
    assert setup < min(lanes)
    assert not [line for line in lines[setup + 1 :] if "scripts/setup" in line]
