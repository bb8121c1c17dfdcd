"""What one run executed, as units of today's code."""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from packaging.version import Version

from harness.evidence import executed, oracle, units
from kvpatch import patches
from kvpatch.distributions import HOST_DISTRIBUTION


def recording(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which all processes write what they execute into a new file."""
    file.unlink(missing_ok=True)
    path = os.pathsep.join((str(executed.SITE), environment["PYTHONPATH"]))
    return {**environment, "PYTHONPATH": path, executed.VARIABLE: str(file)}


def digests(level: str, file: Path, ids: Iterable[str]) -> dict[str, str]:
    """Return the digests of the units that a run executed, by name.

    Args:
        file: what its processes wrote.
        ids: the patches that were in force.
    """
    tree, wanted = _tree(), set(ids)
    ran = executed.read(file)
    names = tree.executed(ran) | oracle.judges(tree, level)
    found = {name: unit.digest for name in names if (unit := tree.get(name)) is not None}
    rows = units.of_rows()
    for feature in patches.FEATURES:
        if mine := wanted & {patch.id for patch in feature.patches}:
            found[f"feature:{feature.name}"] = rows[f"feature:{feature.name}"]
            found |= {f"row:{one}": rows[f"row:{one}"] for one in mine}
    return found | native(level) | oracle.fixed()


def on_host(vllm: str) -> list[str]:
    """Return the patches of an engine on the host device that cannot be asked for them."""
    return [
        patch.id
        for feature, rows in patches.at(Version(vllm))
        if feature.wanted is None or feature.distribution == HOST_DISTRIBUTION
        for patch in rows
    ]


def native(level: str) -> dict[str, str]:
    """Return the digests of what kvcached was compiled against, on the device of a level."""
    is_npu = level == "npu"
    return {
        name: digest
        for name, digest in units.of_files().items()
        if name.startswith("file:kvpatch/hostdevice/include") is not is_npu
    }


@cache
def _tree() -> units.Tree:
    return units.Tree()
