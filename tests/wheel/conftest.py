"""A wheel built from the sources, in an environment that has nothing else."""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = Path(pytest.__file__).parents[1]
# By folder; rich has three requirements of its own.
REQUIREMENTS = ("wrapt", "packaging", "psutil", "rich", "markdown_it", "mdurl", "pygments")
BUILD = ("hatchling", "pathspec", "pluggy", "trove_classifiers", "editables")
BUILD += ("hatch_fancy_pypi_readme",)
BUILD += ("tomli",) if sys.version_info < (3, 11) else ()


PLATFORMS = """
from types import SimpleNamespace
current_platform = SimpleNamespace(is_cpu=lambda: False, device_type="cuda")
"""


class Environment:
    """A virtual environment with kvpatch's requirements and a fake vllm.

    Attributes:
        python: its interpreter.
        site: its site-packages.
    """

    def __init__(self, folder: Path, packages: tuple[str, ...] = REQUIREMENTS) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin/python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / version / "site-packages"
        for package in packages:
            infos = (*PACKAGES.glob(f"{package}-*"), *PACKAGES.glob(f"{package}_py-*"))
            for entry in (PACKAGES / package, *infos):
                (self.site / entry.name).symlink_to(entry)
        (self.site / "vllm").mkdir()
        (self.site / "vllm/__init__.py").write_text("print('vllm itself')\n")
        (self.site / "vllm/platforms.py").write_text(PLATFORMS)
        info = self.site / "vllm-0.17.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.17.9\n")

    def pip(self, *arguments: str | Path) -> None:
        """Run the pip of the tests' environment on this one; nothing is downloaded."""
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", self.python, *arguments],
            check=True,
            env=dict(os.environ, KVPATCH="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INDEX="1"),
        )


def build(project: Path, folder: Path) -> Path:
    """Build the wheel of a project into an empty folder."""
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", *command, project], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of the working tree."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def host_wheel(tmp_path_factory):
    """The wheel of the host device."""
    return build(ROOT / "scripts/hostdevice", tmp_path_factory.mktemp("host-wheel"))


@pytest.fixture(scope="session")
def npu_wheel(tmp_path_factory):
    """The wheel of what is for NPUs."""
    return build(ROOT / "scripts/ascend", tmp_path_factory.mktemp("npu-wheel"))


@pytest.fixture(scope="session", params=["wheel", "editable"])
def installed(request, tmp_path_factory):
    """kvpatch installed from the wheel, and in place."""
    folder = tmp_path_factory.mktemp("installed")
    if request.param == "wheel":
        environment = Environment(folder)
        environment.pip("install", "--quiet", request.getfixturevalue("wheel"))
    else:
        environment = Environment(folder, REQUIREMENTS + BUILD)
        environment.pip("install", "--quiet", "--no-build-isolation", "--editable", ROOT)
    return environment


@pytest.fixture(params=["wheel", "sdist", "target", "editable"])
def alone(request, tmp_path, wheel):
    """kvpatch without kvpatch-hostdevice, and the variables with which Python finds it."""
    environment = Environment(tmp_path / "alone", REQUIREMENTS + BUILD)
    install = partial(environment.pip, "install", "--quiet", "--no-build-isolation")
    if request.param == "target":
        folder = tmp_path / "target"
        install("--no-deps", "--target", folder, wheel)
        return environment, {"PYTHONPATH": str(folder)}
    if request.param == "wheel":
        install(wheel)
    elif request.param == "sdist":
        command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        install(*tmp_path.glob("*.tar.gz"))
    else:
        install("--editable", ROOT)
    return environment, {}


@pytest.fixture
def fresh(tmp_path, wheel):
    """kvpatch installed from the wheel, for a test that changes the environment."""
    environment = Environment(tmp_path / "fresh")
    environment.pip("install", "--quiet", wheel)
    return environment


@pytest.fixture
def bare(tmp_path):
    """An environment without kvpatch."""
    return Environment(tmp_path / "bare")


Modules = Callable[..., set[str]]


@pytest.fixture
def modules(run):
    """Return the modules that ``python -c pass`` imports, as the interpreter reports them."""

    def modules(python: Path, *flags: str, **environment: str) -> set[str]:
        done = run(python, *flags, "-X", "importtime", "-c", "pass", **environment)
        assert (done.code, done.out) == (0, "")
        lines = done.err.splitlines()
        assert all(line.startswith("import time:") for line in lines)
        found = {line.rpartition("|")[2].strip() for line in lines[1:]}
        return found - {"encodings.utf_8_sig"}  # by which 3.13 reads any .pth file

    return modules
