"""Shapes: whether each row of the registry finds its target in each release.

``data/shapes`` holds, for every release of vLLM and kvcached, what its sources say of
each target; ``scripts/matrix shapes`` reads it from the unpacked sources. The gates
decide on it as they decide on the imported objects at start-up.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvpatch import gate, registry
from kvpatch.patch import Feature, Outcome, Patch
from kvpatch.registry import faults
from kvpatch.versions import Installed

DATA = Path(__file__).parent / "data"
PACKAGES = ("vllm", "kvcached")

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
# What the axes of the matrix need of a release.
PRESENCE = {
    "OffloadingConnector": f"{_V1}.offloading_connector:OffloadingConnector",
    "SimpleCPUOffloadConnector": f"{_V1}.simple_cpu_offload_connector:SimpleCPUOffloadConnector",
    "TieringOffloadingSpec": "vllm.v1.kv_offload.tiering.spec:TieringOffloadingSpec",
    "MultiConnector": f"{_V1}.multi_connector:MultiConnector",
    "Model Runner V2": "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
}
# Classes that kvcached adds to vLLM's modules, and the classes of vLLM they are made from.
ADDED = {"vllm.v1.core.block_pool:ElasticBlockPool": "vllm.v1.core.block_pool:BlockPool"}


@dataclass(frozen=True)
class Shapes:
    """What one release has of the targets.

    Attributes:
        package, version: the release.
        archive, sha256: the file its sources came from.
        targets: by target, its parameters in brackets, ``property``, ``class`` or
            ``value``; None where it is not there.
    """

    package: str
    version: str
    archive: str
    sha256: str
    targets: dict[str, str | None]


def targets() -> list[str]:
    """Every target that is recorded of a release."""
    rows = {patch.target for feature in registry.FEATURES for patch in feature.patches}
    fixes = {fault.target for fault in faults.FAULTS if fault.target}
    return sorted(rows | set(map(inherited, rows)) | set(PRESENCE.values()) | fixes)


def inherited(target: str) -> str:
    """Return where a class that kvcached adds has ``target`` from, if not of its own."""
    owner, _, name = target.rpartition(".")
    return f"{ADDED[owner]}.{name}" if owner in ADDED else target


@cache
def releases(package: str, data: Path = DATA) -> dict[str, Shapes]:
    """Return the recorded releases of ``vllm`` or ``kvcached``, oldest first."""
    found = [
        Shapes(**json.loads(path.read_text())) for path in (data / "shapes").glob(f"{package}-*")
    ]
    found.sort(key=lambda one: Version(one.version))
    return {one.version: one for one in found}


def release(package: str, version: str) -> Installed:
    """Return a release as the gates see an installed one."""
    return Installed(package, package, version, Version(version))


def look(vllm: Shapes, kvcached: Shapes) -> gate.Look:
    """Look at targets in two recorded releases instead of importing them.

    What vLLM's classes do not have, kvcached may add to them.
    """

    def look(target: str) -> Callable[[], Collection[str]]:
        owner = next(one for one in (vllm, kvcached) if target.startswith(f"{one.package}."))
        if target not in owner.targets:
            raise LookupError(f"{owner.package} {owner.version} has no record of it")
        said = owner.targets[target] or kvcached.targets.get(target)
        if said is None:
            said = owner.targets[inherited(target)]
        if said is None:
            raise AttributeError(target)
        return lambda: parameters(said)

    return look


def parameters(signature: str) -> list[str]:
    """Return the names a recorded signature takes.

    Raises:
        TypeError: it is not that of a function.
    """
    if not signature.startswith("("):
        raise TypeError(f"it is a {signature}")
    (function,) = ast.parse(f"def function{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    every: list[Any] = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs]
    return [one.arg for one in [*every, given.kwarg] if one is not None]


def check_row(feature: Feature, patch: Patch, vllm: Shapes, kvcached: Shapes) -> gate.Verdict:
    """Return what becomes of one row of the registry on two releases."""
    versions = (Version(vllm.version), Version(kvcached.version))
    for specifier, version in zip((patch.vllm, patch.kvcached), versions, strict=True):
        if not SpecifierSet(specifier).contains(version, prereleases=True):
            return gate.Verdict(Outcome.NOT_NEEDED, f"its range is {specifier}")
    verdict = gate.check_target(patch, look(vllm, kvcached))
    if not verdict.passed:
        return verdict
    for shapes, specifier in ((vllm, feature.vllm), (kvcached, feature.kvcached)):
        if not gate.in_range(release(shapes.package, shapes.version), specifier):
            reason = f"{shapes.package} {shapes.version} is outside {specifier}"
            return gate.Verdict(Outcome.OUTSIDE, reason)
    return gate.PASSED


def check_rows(vllm: Shapes, kvcached: Shapes) -> dict[str, gate.Verdict]:
    """Return what becomes of every row on two releases, by its id."""
    return {
        patch.id: check_row(feature, patch, vllm, kvcached)
        for feature in registry.FEATURES
        for patch in feature.patches
    }


def is_red(verdict: gate.Verdict) -> bool:
    """Whether a row names a range in which its target is not what the row says."""
    return verdict.outcome in (Outcome.ABSENT, Outcome.MOVED)
