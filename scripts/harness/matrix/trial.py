"""A tree in which a release is validated already, for the runs that validate it.

Rules refuse most cells of a release until ``RELEASES`` says validated, and the tests read their
lists from there. So the runs are those of a copy with the line; the checkout has none until a
person writes it. Environments and models are the checkout's, and results go back there. What is
turned on beside a connector has such a tree as well, with another ``admitted.json``.
"""

import re
import shutil
from pathlib import Path

from packaging.version import Version

from harness import ROOT
from harness.matrix import record, recorded

HIDDEN = (".ci", ".gitignore")  # copied too, so that git finds no file that is not there
ENVIRONMENTS = ".venvs"
LINKED = (".git", ".venv", ENVIRONMENTS)
REGISTRY = "kvpatch/supported.py"
DATA = record.DATA.relative_to(ROOT)
_LINE = re.compile(r'    "([^"]+)": (?:VALIDATED|INSPECTED_ONLY),')


def line_of(version: str) -> str:
    """Return the line of a validated release in ``RELEASES``."""
    return f'    "{version}": VALIDATED,'


def with_line(registry: str, version: str) -> str:
    """Return the text of the registry in which a release is validated, in its place."""
    kept = [line for line in registry.splitlines() if _release_in(line) != version]
    known = [at for at, line in enumerate(kept) if _release_in(line)]
    older = [at for at in known if Version(_release_in(kept[at])) < Version(version)]
    kept.insert(older[-1] + 1 if older else known[0], line_of(version))
    return "\n".join([*kept, ""])


def make(version: str, folder: Path) -> Path:
    """Make the tree for a release, anew."""
    copy(folder)
    registry = folder / REGISTRY
    registry.write_text(with_line(registry.read_text(), version))
    return folder


def copy(folder: Path) -> Path:
    """Make a copy of the checkout, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for source in ROOT.iterdir():
        if source.name.startswith(".") and source.name not in HIDDEN:
            continue
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
            shutil.copytree(source, folder / source.name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, folder)
    # A checkout that has made no environment yet gets those that the copy makes.
    (ROOT / ENVIRONMENTS).mkdir(exist_ok=True)
    for name in LINKED:
        (folder / name).symlink_to((ROOT / name).resolve())
    return folder


def bring_back(version: str, folder: Path, level: str = "*") -> list[Path]:
    """Copy what was recorded of the release to the checkout; return those files there.

    Args:
        level: one of the folders of ``docs/results/matrix``; all if not given.
    """
    data = folder / DATA
    found = []
    for path in sorted(data.glob(f"{level}/vllm-{version}-*.json")):
        there = ROOT / DATA / path.relative_to(data)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
        found.append(there)
    if found:  # lists of units of the checkout, and what the runs added
        record.write_lists(recorded.lists(ROOT / DATA) | recorded.lists(data), ROOT / DATA)
    return found


def _release_in(line: str) -> str:
    found = _LINE.fullmatch(line)
    return found[1] if found else ""
