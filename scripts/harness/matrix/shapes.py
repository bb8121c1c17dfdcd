"""Recorded signatures: whether each patch finds its target in each release.

``docs/results/matrix/signatures`` contains the signature of each target in the sources of every
inspected release of vLLM and kvcached; ``scripts/matrix shapes`` reads it from the sources.
The gates use it as they use the imported objects at start-up.
"""

import ast
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness import ROOT
from kvpatch import gate, patches, supported
from kvpatch.patch import Outcome

DATA = ROOT / "docs/results/matrix"
PACKAGES = ("vllm", "kvcached", "vllm_ascend")

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
# What the axes of the matrix require of a release.
PRESENCE = {
    "OffloadingConnector": f"{_V1}.offloading_connector:OffloadingConnector",
    "SimpleCPUOffloadConnector": f"{_V1}.simple_cpu_offload_connector:SimpleCPUOffloadConnector",
    "TieringOffloadingSpec": "vllm.v1.kv_offload.tiering.spec:TieringOffloadingSpec",
    "MultiConnector": f"{_V1}.multi_connector:MultiConnector",
    "Model Runner V2": "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
}
# Classes that kvcached adds to vLLM's modules, and the classes of vLLM that they derive from.
ADDED = {"vllm.v1.core.block_pool:ElasticBlockPool": "vllm.v1.core.block_pool:BlockPool"}


@dataclass(frozen=True)
class Signatures:
    """The signatures of the targets in one release.

    Attributes:
        archive, sha256: the file that its sources came from.
        targets: by target, its parameters in parentheses, ``property``, ``class`` or
            ``value``; None if it does not exist.
    """

    package: str
    version: str
    archive: str
    sha256: str
    targets: dict[str, str | None]


def targets() -> list[str]:
    """Return every target that is recorded for a release."""
    rows = {patch.target for feature in patches.FEATURES for patch in feature.patches}
    fixes = {fault.target for fault in supported.FAULTS if fault.target}
    return sorted(rows | set(map(inherited, rows)) | set(PRESENCE.values()) | fixes)


def inherited(target: str) -> str:
    """Return the target from which a class that kvcached adds may inherit ``target``."""
    owner, _, name = target.rpartition(".")
    return f"{ADDED[owner]}.{name}" if owner in ADDED else target


@cache
def releases(package: str, data: Path = DATA) -> dict[str, Signatures]:
    """Return the recorded releases of one of ``PACKAGES``, oldest first."""
    found = [
        Signatures(**json.loads(path.read_text()))
        for path in (data / "signatures").glob(f"{package}-*")
    ]
    found.sort(key=lambda one: Version(one.version))
    return {one.version: one for one in found}


def look(vllm: Signatures, kvcached: Signatures) -> gate.Look:
    """Return a look-up of targets in two recorded releases, in place of importing them.

    kvcached may add methods that vLLM's classes do not have. vllm-ascend has one recorded release.
    """

    def look(target: str) -> Callable[[], Collection[str]]:
        every = (vllm, kvcached, *releases("vllm_ascend").values())
        owner = next(one for one in every if target.startswith(f"{one.package}."))
        if target not in owner.targets:
            raise LookupError(f"{owner.package} {owner.version} has no record of it")
        signature = owner.targets[target] or kvcached.targets.get(target)
        if signature is None:
            signature = owner.targets[inherited(target)]
        if signature is None:
            raise AttributeError(target)
        return lambda: parameters(signature)

    return look


def parameters(signature: str) -> list[str]:
    """Return the parameter names of a recorded signature.

    Raises:
        TypeError: it is not the signature of a function.
    """
    if not signature.startswith("("):
        raise TypeError(f"it is a {signature}")
    (function,) = ast.parse(f"def function{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    every: list[Any] = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs]
    return [one.arg for one in [*every, given.kwarg] if one is not None]


def check_rows(vllm: Signatures, kvcached: Signatures) -> dict[str, gate.Verdict]:
    """Return the outcome of every patch on a release of vLLM and one of kvcached, by id."""
    found = {}
    for feature in patches.FEATURES:
        for patch in feature.patches:
            verdict = gate.by_range(feature, patch, vllm.version)
            if verdict.outcome is not Outcome.NOT_NEEDED:
                of_target = gate.check_target(patch, look(vllm, kvcached))
                verdict = verdict if of_target.passed else of_target
            found[patch.id] = verdict
    return found


def holes(vllm: str) -> list[str]:
    """Return the seams that have no part, or several, for a release of vLLM."""
    found = []
    for feature in patches.FEATURES:
        if Version(vllm) in feature.span:
            try:
                feature.at(Version(vllm))
            except LookupError as error:
                found.append(str(error))
    return found


def is_red(verdict: gate.Verdict) -> bool:
    """Return whether a patch's target is missing or has changed within the patch's range."""
    return verdict.outcome in (Outcome.ABSENT, Outcome.MOVED)
