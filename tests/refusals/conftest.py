"""Real vLLM, started as an operator starts it, in ways that must not start."""

import os
import re
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = Path(pytest.__file__).parents[1]


@pytest.fixture
def shadow(tmp_path):
    """Make distributions look installed in other versions; return the environment for it."""

    def shadow(version: str, *names: str) -> dict[str, str]:
        for name in names:
            info = tmp_path / f"shadow/{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        # Before what the tests themselves are run with, as in a checkout beside that of .venv.
        paths = [str(tmp_path / "shadow"), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    return shadow


@pytest.fixture
def without(tmp_path):
    """Make an environment with everything of this one but some packages."""

    def without(*packages: str) -> Path:
        folder = tmp_path / "environment"
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/*/site-packages")
        for entry in PACKAGES.iterdir():
            if not re.match(rf"({'|'.join(packages)})\b", entry.name.replace("_", "-")):
                (site / entry.name).symlink_to(entry)
        return folder / "bin/python"

    return without
