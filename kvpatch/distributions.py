"""The distributions beside kvpatch: what they bring, and where one is needed.

kvpatch finds them by their entry points and names none of their modules, so that whatever it names
is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from itertools import islice
from types import ModuleType

from kvpatch.environ import HOST_DEVICE
from kvpatch.patch import Feature
from kvpatch.refusal import Refusal
from kvpatch.version import VERSION

HOST_DISTRIBUTION, NPU_DISTRIBUTION = "kvpatch-hostdevice", "kvpatch-ascend"
OF_NPUS = "vllm-ascend"
# Groups of entry points: features, OffloadingSpecs by their names in configurations, modules that
# ask a device what kvpatch needs to know of it, and the one that builds an emulator of ACL.
FEATURES, SPECS = "kvpatch.features", "kvpatch.offloading_specs"
PROBES, ACL = "kvpatch.probes", "kvpatch.acl"


@cache
def _entries(group: str) -> tuple[metadata.EntryPoint, ...]:
    # metadata.entry_points reads a file of each distribution, in every start of vLLM.
    found: list[metadata.EntryPoint] = []
    for name in (HOST_DISTRIBUTION, NPU_DISTRIBUTION):
        for distribution in islice(metadata.distributions(name=name), 1):
            found += (one for one in distribution.entry_points if one.group == group)
    return tuple(found)


def features() -> tuple[Feature, ...]:
    """Return the features that are not kvpatch's own; ImportError if built for another kvpatch."""
    found: list[Feature] = []
    for entry in sorted(_entries(FEATURES), key=lambda one: one.name):
        beside = entry.dist
        assert beside is not None  # of what is found in metadata
        if beside.version != VERSION:
            raise ImportError(
                f"{beside.name} {beside.version} is not for kvpatch {VERSION}; "
                "install both in one version"
            )
        found.append(entry.load()._replace(distribution=beside.name))
    return tuple(found)


def specs() -> tuple[tuple[str, str], ...]:
    """Return the OffloadingSpecs of other distributions, as (spec_name, spec_module_path)."""
    return tuple((entry.name, entry.module) for entry in _entries(SPECS))


def probes() -> tuple[ModuleType, ...]:
    """Return the modules that ask a device, of which each has ``needed`` and ``run``."""
    return tuple(entry.load() for entry in _entries(PROBES))


def acl_emulator() -> ModuleType | None:
    """Return the module that builds an emulator of ACL; None where none is installed."""
    for entry in _entries(ACL):
        module: ModuleType = entry.load()
        return module
    return None


def absent() -> tuple[str, ...]:
    """Return the distributions with rows that are not installed."""
    there = {entry.dist.name for entry in _entries(FEATURES) if entry.dist}
    return tuple(one for one in (HOST_DISTRIBUTION, NPU_DISTRIBUTION) if one not in there)


def of_npus() -> bool:
    """Return whether vLLM runs on an NPU here, as far as the installed packages say."""
    try:
        metadata.version(OF_NPUS)
    except metadata.PackageNotFoundError:
        return False
    return True


def refusal(on_cpu: bool, environment: Mapping[str, str]) -> Refusal | None:
    """Return why vLLM does not start, or None: it needs a distribution that is not installed."""
    lacking = absent()
    if NPU_DISTRIBUTION in lacking and of_npus():
        return Refusal(
            f"{OF_NPUS} is installed",
            f"what kvpatch does on an NPU is a distribution of its own, {NPU_DISTRIBUTION}, and is "
            "not installed",
            f"install it, or uninstall {OF_NPUS} where there is no NPU, or set KVPATCH=0",
            code="KVP607",
        )
    asked = bool(HOST_DEVICE.read(environment))
    if HOST_DISTRIBUTION not in lacking or not (on_cpu or asked):
        return None
    remedy = "install it and run python -m kvpatch.hostdevice install"
    return Refusal(
        "this machine has no GPU" if on_cpu else f"{HOST_DEVICE} is set",
        f"the host device is a distribution of its own, {HOST_DISTRIBUTION}, and is not installed",
        f"{remedy if on_cpu else f'unset {HOST_DEVICE}, or {remedy}'}, or set KVPATCH=0",
        code="KVP504",
    )
