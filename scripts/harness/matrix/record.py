"""Results of the matrix, written to docs/results/matrix."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
        executed: the digests of the units that it executed, by name.

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
        ran_on = {"commit": commit, "installed": provenance.installed()}
        if executed:
            ran_on["units"] = recorded.encode(_numbers(executed))
        key = hashlib.sha256(json.dumps(ran_on).encode()).hexdigest()[:8]
        done = {_axes(one): one for one in [*earlier["runs"], run | {"code": key}]}
        runs = [done[cell] for cell in sorted(done)]
        codes = earlier.get("code", {}) | {key: ran_on}
        used = {one.get("code") for one in runs}
        kept = {one: codes[one] for one in sorted(codes) if one in used}
        write(path, head | {"code": kept, "runs": runs})


def _numbers(executed: Mapping[str, str]) -> list[int]:
    """Return the numbers of units in the table, which gets those that it has not."""
    path = DATA / recorded.UNITS
    table = json.loads(path.read_text()) if path.exists() else []
    number = {unit: at for at, unit in enumerate(table)}
    named = [f"{name} {digest}" for name, digest in sorted(executed.items())]
    found = [number.setdefault(one, len(number)) for one in named]
    if len(number) > len(table):
        write(path, list(number))
    return found


def tidy() -> None:
    """Drop the units that no recorded run has executed from the table."""
    path = DATA / recorded.UNITS
    table = json.loads(path.read_text())
    results = {
        one: json.loads(one.read_text())
        for folder in (*recorded.FOLDERS, recorded.NPU)
        for one in sorted((DATA / folder).glob("*.json"))
    }
    codes = [code for result in results.values() for code in result["code"].values()]
    used = {at for code in codes for at in recorded.decode(code.get("units", ""))}
    kept = sorted(table[at] for at in used)
    number = {unit: at for at, unit in enumerate(kept)}
    for code in codes:
        if "units" in code:
            then = recorded.decode(code["units"])
            code["units"] = recorded.encode(number[table[at]] for at in then)
    write(path, kept)
    for one, result in results.items():
        write(one, result)


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


def write(path: Path, content: dict[str, Any] | list[str]) -> None:
    """Write one result file; a small change makes a small difference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(content, indent=1)}\n")
