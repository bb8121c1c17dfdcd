"""Results of the matrix, written to docs/results/matrix."""

import contextlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

from packaging.version import Version

from harness import ROOT, provenance
from harness.console import HarnessError
from harness.matrix import below, plain, recorded, shapes, sharing, sources
from harness.matrix.shapes import Signatures
from harness.matrix.signatures import Sources
from kvpatch import supported
from kvpatch.matrix.verdicts import NONE
from kvpatch.versions import Span

# Of the checkout, also where kvpatch is installed from its wheel, which has a copy.
DATA = ROOT / "docs/results/matrix"
MOST_LISTS = 24  # of units
MOST_UNUSED = 0.75  # at least this part of the units in lists is used
_recording = Lock()  # releases run beside each other, and their files share the table of units


def read_signatures(source: sources.Source) -> Signatures:
    """Return the signature of every target in unpacked sources."""
    tree = Sources(source.folder)
    found: dict[str, str | None] = {}
    for target in shapes.targets():
        if target.startswith(f"{source.package}."):
            found[target] = tree.signature(target)
        elif source.package == "kvcached" and (added := tree.added(target)) is not None:
            found[target] = added
    return Signatures(source.package, source.version, source.archive, source.sha256, found)


def record_signatures(package: str, version: str, archives: Path | None = None) -> Signatures:
    """Unpack a release and record the signature of every target, and what is below them."""
    source = sources.unpack(package, version, archives)
    made = read_signatures(source)
    write(DATA / "signatures" / f"{package}-{version}.json", vars(made))
    if package == "vllm" and Version(version) in Span(supported.FLOOR):
        functions = below.below(Sources(source.folder), sharing.targets_of(version))
        found = sharing.Below(
            vllm=version,
            functions=len(functions),
            digest=below.digest(functions),
            targets=sharing.targets_digest(version),
        )
        write(DATA / sharing.LEVEL / f"vllm-{version}.json", found._asdict())
    return made


def record_run(
    level: str, head: dict[str, Any], run: dict[str, Any], executed: Mapping[str, str]
) -> None:
    """Write a run of one release; it takes the place of the same cell's earlier run.

    Args:
        level: ``engine``, ``synchronous``, ``bytes`` or ``npu``.
        head: what is said of the release's newest run: versions, machine, command.
        run: the axes of its cell, without ``feature`` where it has none, and the outcome.

    Raises:
        HarnessError: files of the checkout differ from its commit.
    """
    commit = provenance.commit()
    if commit.endswith(provenance.CHANGED):
        raise HarnessError(f"a run of {commit} is not recorded: commit first")
    folder = recorded.folder_of(level, run.get("feature", NONE))
    path = DATA / folder / f"vllm-{head['vllm']}-kvcached-{head['kvcached']}.json"
    with _recording:
        earlier = json.loads(path.read_text()) if path.exists() else {"runs": []}
        ran_on: dict[str, Any] = {"commit": commit, "installed": provenance.installed()}
        named = [f"{name} {digest}" for name, digest in executed.items()]
        if named:
            ran_on["units"] = recorded.bits_of(named, _with(named))
        key = recorded.key_of(commit, ran_on["installed"], named)
        done = {_axes(one): one for one in [*earlier["runs"], run | {"code": key}]}
        runs = [done[cell] for cell in sorted(done)]
        codes = earlier.get("code", {}) | {key: ran_on}
        used = {one.get("code") for one in runs}
        kept = {one: codes[one] for one in sorted(codes) if one in used}
        write(path, head | {"code": kept, "runs": runs})


def _with(named: Iterable[str]) -> recorded.Lists:
    """Return the lists of units, with one more of those that none has."""
    lists = recorded.lists(DATA)
    if new := sorted(set(named).difference(*lists.values())):
        lists[recorded.digest_of(new)] = new
        write_lists(lists)
    return lists


def tidy() -> None:
    """Drop the lists of units that no recorded run names.

    If there are many, or many units that no run has executed, make one list of all: a change of
    every file, which git does not merge with another.
    """
    results = _results()
    codes = [code for result in results.values() for code in result["code"].values()]
    with_units = [code for code in codes if "units" in code]
    lists = recorded.lists(DATA)
    units = [recorded.named(code["units"], lists) for code in with_units]
    kept = {name: lists[name] for code in with_units for name in code["units"]}
    used = sorted(set().union(*units))
    if len(kept) > MOST_LISTS or MOST_UNUSED * sum(map(len, kept.values())) > len(used):
        kept = {recorded.digest_of(used): used}
        for code, of in zip(with_units, units, strict=True):
            code["units"] = recorded.bits_of(of, kept)
        for path, result in results.items():
            write(path, result)
    write_lists(kept)


def repair() -> list[str]:
    """Take lists of units that a merge left out or changed from the history of the repository.

    Returns:
        the lists that runs name and that are nowhere.
    """
    codes = [code for result in _results().values() for code in result["code"].values()]
    wanted = {name for code in codes for name in code.get("units", ())}
    path = DATA / recorded.UNITS
    commits = _git("log", "--all", "--format=%H", "--", path.name).split()
    history = (_git("show", f"{commit}:./{path.name}") for commit in commits)
    found: dict[str, list[str]] = {}
    for text in chain([path.read_text()], history):
        with contextlib.suppress(ValueError):  # a merge left its marks in it
            if isinstance(then := json.loads(text), dict):  # once it was one list
                found |= {at: one for at, one in then.items() if at == recorded.digest_of(one)}
        if wanted <= found.keys():
            break
    write_lists({one: found[one] for one in wanted & found.keys()})
    return sorted(wanted - found.keys())


def write_lists(lists: recorded.Lists, data: Path | None = None) -> None:
    """Write the lists of units of a folder of results, of this checkout if none is given."""
    write((data or DATA) / recorded.UNITS, {name: lists[name] for name in sorted(lists)})


def _git(*words: str) -> str:
    command = ["git", "-C", str(DATA), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _results() -> dict[Path, Any]:
    """Return what the files of recorded runs have."""
    return {
        path: json.loads(path.read_text())
        for folder in (*recorded.FOLDERS, recorded.NPU)
        for path in sorted((DATA / folder).glob("*.json"))
    }


def record_plain(head: dict[str, Any], run: dict[str, Any]) -> None:
    """Write a run of plain vLLM; it takes the place of the same combination's earlier run."""
    path = DATA / plain.LEVEL / f"vllm-{head['vllm']}.json"
    earlier = json.loads(path.read_text())["runs"] if path.exists() else []
    names = ("runner", "model", "feature")
    done = {tuple(one[name] for name in names): one for one in [*earlier, run]}
    write(path, head | {"commit": provenance.commit(), "runs": [done[one] for one in sorted(done)]})


def _axes(run: dict[str, Any]) -> tuple[str, ...]:
    names = ("connector", "runner", "layout", "model")
    return (run.get("feature", ""), *(run[name] for name in names))


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write one result file; a small change makes a small difference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(content, indent=1)}\n")
