"""Which files of tests have to run: by the code that they executed when they last ran.

``scripts/test long --record-units`` writes ``docs/results/lanes.json``: of each file whose tests
all passed, the commit, and the units that its processes executed, with the files that it names.
``python -m harness.evidence.of_tests tests/long`` prints each file of which nothing has changed
since, and the commit it ran on. ``.ci/run`` leaves these out, and says so.

A pytest plug-in, and that command.
"""

import ast
import hashlib
import json
import re
import site
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT, provenance
from harness.console import HarnessError
from harness.evidence import executed, of_run, oracle, units
from harness.matrix.recorded import decode, digest_of, encode
from kvpatch import patches

RESULTS = ROOT / "docs/results/lanes.json"
OPTION = "record_units"
# What every file of tests stands on, whatever it executed.
_SHARED = ("tests/conftest.py",)
_SITE = str(executed.SITE / "sitecustomize.py")
_STARTUP = Path(site.getsitepackages()[0]) / "harness-executed.pth"
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)+")


class Recorder:
    """Has what a file's tests execute written into a file of its own.

    Args:
        folder: for those files; that of the process that started this one, under xdist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of xdist the folder."""
        node.workerinput[OPTION] = str(self.folder)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Switch to the file of a test before any of its fixtures starts an engine."""
        executed.switch(self.folder / _safe(item.nodeid.partition("::")[0]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Record the files whose tests passed."""
        outcomes: dict[str, Counter[str]] = {}
        for report in chain.from_iterable(terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport):
                of = outcomes.setdefault(report.nodeid.partition("::")[0], Counter())
                of[report.outcome] += report.when == "call" or report.outcome != "passed"
        right = {file: of["passed"] for file, of in outcomes.items() if set(+of) == {"passed"}}
        record({file: (right[file], self.folder / _safe(file)) for file in sorted(right)})
        _STARTUP.unlink(missing_ok=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--record-units", action="store_true", help=f"into {RESULTS.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to record, if asked to."""
    if not config.getoption(OPTION):
        return
    given = getattr(config, "workerinput", {}).get(OPTION)
    if given is None:
        if provenance.commit().endswith(provenance.CHANGED):
            raise pytest.UsageError("files of the checkout differ from its commit: commit first")
        # Engines and commands that tests start are told by their environment; a line in this
        # environment's startup files reads it, also where they are started without our path.
        line = f"import os; os.environ.get({executed.VARIABLE!r}) and exec(open({_SITE!r}).read())"
        _STARTUP.write_text(f"{line}\n")
    config.pluginmanager.register(Recorder(Path(given or tempfile.mkdtemp(prefix="units-"))))


def record(ran: Mapping[str, tuple[int, Path]]) -> None:
    """Write what files of tests executed, beside what others did.

    Args:
        ran: of each file, how many tests passed, and what its processes wrote.
    """
    before: dict[str, Any] = read()
    head = provenance.header("scripts/test --record-units")
    every = {name: of for name, of in before["files"].items() if (ROOT / name).exists()}
    tables = {name: _units_of(before, of) for name, of in every.items()}
    for name, (passed, wrote) in ran.items():
        every[name] = {"commit": head["commit"], "passed": passed}
        tables[name] = digests(name, units_executed(wrote))
    named = sorted({f"{unit} {digest}" for of in tables.values() for unit, digest in of.items()})
    number = {one: at for at, one in enumerate(named)}
    for name, of in every.items():
        lines = sorted(f"{unit} {one}" for unit, one in tables[name].items())
        of["units"] = encode(number[line] for line in lines)
        of["checksum"] = digest_of(lines)
    files = {name: every[name] for name in sorted(every)}
    provenance.write({**head, "files": files, "units": named}, RESULTS)


def units_executed(wrote: Path) -> set[str]:
    """Return the names of the units that processes executed, by what they wrote."""
    return tree().executed(executed.read(wrote))


def digests(file: str, names: set[str]) -> dict[str, str]:
    """Return today's digests of what a file of tests stands on, by name; empty for what is gone."""
    found = {}
    for name in names:
        if name.startswith("file:"):
            found[name] = _digest(name.removeprefix("file:"))
        elif (unit := tree().get(name)) is not None:
            found[name] = unit.digest
        else:
            found[name] = ""
    wrappers = {f"{module}:{name}" for module, name in (one.split(":", 1) for one in names)}
    rows = units.of_rows()
    for feature in patches.FEATURES:
        for patch in feature.patches:
            if patch.wrapper in wrappers:
                found[f"row:{patch.id}"] = rows[f"row:{patch.id}"]
    texts = {file, *_SHARED, *_beside(file), *_named(file)}
    found |= {f"file:{one}": _digest(one) for one in texts}
    return found | of_run.native("engine") | oracle.fixed()


def unchanged(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a folder of tests of which nothing has changed, and their commits."""
    recorded = read()
    for path in sorted((ROOT / folder).glob("test_*.py")):
        name = str(path.relative_to(ROOT))
        if (of := recorded["files"].get(name)) is not None:
            then = tree().followed(_units_of(recorded, of))
            executed_then = {
                unit for unit in then if not unit.startswith(("row:", "oracle:", "file:"))
            }
            if digests(name, executed_then) == then:
                yield name, of["commit"]


def read() -> dict[str, Any]:
    """Return the recorded runs of files of tests."""
    if not RESULTS.exists():
        return {"files": {}, "units": []}
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


@cache
def tree() -> units.Tree:
    """Return the units of the checkout."""
    return units.Tree()


def _units_of(recorded: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, str]:
    lines = [recorded["units"][at] for at in decode(of["units"])]
    if of["checksum"] != digest_of(lines):
        raise HarnessError(
            f"{RESULTS}: units of {of['commit']} are others than it was recorded with, by a merge: "
            "take the file whole from one of the two, and record what the other has again"
        )
    return {unit: digest for unit, _, digest in (line.rpartition(" ") for line in lines)}


def _safe(file: str) -> str:
    return file.replace("/", "--")


def _beside(file: str) -> set[str]:
    """Return the helpers in the folder of a file of tests."""
    folder = (ROOT / file).parent
    return {
        str(path.relative_to(ROOT))
        for path in folder.glob("*.py")
        if not path.name.startswith("test_")
    }


def _named(file: str) -> set[str]:
    """Return the files and folders of the repository that a file of tests names in a text."""
    texts = (
        node.value
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    found = {match.group() for text in texts for match in _PATH.finditer(text)}
    return {one for one in found if (ROOT / one).exists() and not one.startswith(".")}


@cache
def _digest(path: str) -> str:
    """Return a digest of a file, or of the files of a folder that git has; empty if it is gone."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", path]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = hashlib.sha256()
    for one in filter(None, listed.split("\0")):
        if (ROOT / one).is_file():
            found.update(one.encode() + b"\0" + (ROOT / one).read_bytes())
    return found.hexdigest()[:8] if listed else ""


if __name__ == "__main__":
    for _file, _commit in unchanged(sys.argv[1]):
        print(_file, _commit)
