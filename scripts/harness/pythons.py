"""scripts/pythons: the lanes that need no vLLM, on other Pythons and the oldest requirements.

    scripts/pythons              Python 3.10 to 3.13, as far as they are there; oldest requirements
    scripts/pythons 3.12 wrapt   some

The oldest wrapt that pyproject.toml allows runs in both lanes, the oldest packaging in the unit
lane, because what builds the wheel needs a newer one. The model of the fence is left out: it
takes longest, and is the same on each of them.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from harness import ROOT, console, venvs

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LANES = {"wrapt": ("unit", "wheel"), "packaging": ("unit",)}
BESIDE = [ROOT / "scripts" / name for name in ("ascend", "hostdevice")]
TOOLS = """
    pytest pytest-timeout pytest-xdist execnet httpx httpcore h11 anyio idna certifi sniffio
    typing_extensions iniconfig prometheus_client psutil rich markdown-it-py mdurl pluggy pygments
    hatchling hatch-fancy-pypi-readme editables pathspec trove-classifiers packaging wrapt shtab
    jinja2 markupsafe
"""
# Parts of the standard library from 3.11 on, which pytest needs.
BACKPORTS = ('exceptiongroup; python_version < "3.11"', 'tomli; python_version < "3.11"')


def pinned() -> list[str]:
    """Return the requirements of ``TOOLS``, as scripts/pins.txt pins them."""
    lines = (ROOT / "scripts/pins.txt").read_text().splitlines()
    # Their hashes are of the files for one Python only.
    pins = [line.partition(" ")[0] for line in lines if not line.startswith("#")]
    return [pin for pin in pins if pin.partition("==")[0].lower() in TOOLS.split()]


def oldest(name: str) -> str:
    """Return a requirement of pyproject.toml at its lowest version."""
    found = re.search(rf'"{name}>=([^",]*)', (ROOT / "pyproject.toml").read_text())
    if found is None:
        raise LookupError(f"pyproject.toml has no lowest {name}")
    return f"{name}=={found[1]}"


def interpreter(release: str) -> str | None:
    """Return a Python of a release, by its name or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [f"python{release}", *pyenv.glob(f"versions/{release}.*/bin/python3")]
    for one in filter(None, map(shutil.which, map(str, candidates))):
        if subprocess.run([one, "-c", ""], capture_output=True, check=False).returncode == 0:
            return one
    return None


def run_lanes(name: str) -> bool | None:
    """Run the lanes of a Python or of a requirement; None where its Python is not there."""
    release, extra = ("3.10", [oldest(name)]) if name in LANES else (name, [])
    python = interpreter(release)
    if python is None:
        print(f"== {name}: there is no Python {release} here", flush=True)
        return None
    print(f"== {name}: {python} {' '.join(extra)}", flush=True)
    folder = ROOT / ".venvs" / f"python-{name}"
    own = folder / "bin/python"

    def make() -> None:
        subprocess.run([python, "-m", "venv", folder], check=True)
        venvs.install(own, *pinned(), *BACKPORTS)
        venvs.install(
            own,
            "--no-deps",
            "--no-build-isolation",
            *(word for one in (ROOT, *BESIDE) for word in ("-e", one)),
        )
        if extra:
            venvs.install(own, "--no-deps", *extra)

    recipe = [python, *(one.name for one in BESIDE), *pinned(), *extra]
    try:
        venvs.made(folder, " ".join(recipe), make)
    except subprocess.CalledProcessError:
        return False
    lanes = [f"tests/{lane}" for lane in LANES.get(name, ("unit", "wheel"))]
    command = [str(own), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *lanes]
    environment = os.environ | {"KVPATCH": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main() -> int:
    """Run the command line; 1 when one failed, or none ran."""
    parser = console.parser("scripts/pythons", __doc__ or "")
    every = (*PYTHONS, *LANES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    names = parser.parse_args().names or every
    results = {name: passed for name in names if (passed := run_lanes(name)) is not None}
    failed = [name for name, passed in results.items() if not passed]
    print(f"passed: {len(results) - len(failed)}; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed) or not results)
