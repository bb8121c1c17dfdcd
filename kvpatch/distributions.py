"""The distributions beside kvpatch: what they bring, and where one is needed.

kvpatch finds them by their entry points and names none of their modules, so that whatever it names
is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

from kvpatch.environ import HOST_DEVICE
from kvpatch.patch import Feature
from kvpatch.refusal import Refusal
from kvpatch.version import VERSION

HOST_DISTRIBUTION = "kvpatch-hostdevice"
# Groups of entry points: features, OffloadingSpecs by their names in configurations, and
# the module that builds an emulator of ACL.
FEATURES, SPECS, ACL = "kvpatch.features", "kvpatch.offloading_specs", "kvpatch.acl"


@cache
def _every() -> Any:
    return metadata.entry_points()  # reads a file of each distribution, in every start of vLLM


def _entries(group: str) -> tuple[metadata.EntryPoint, ...]:
    return tuple(_every().select(group=group))


def features() -> tuple[Feature, ...]:
    """Return the features that are not kvpatch's own, by their names.

    Raises:
        ImportError: a distribution was built for another kvpatch, or its code cannot be imported.
    """
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


def acl_emulator() -> ModuleType | None:
    """Return the module that builds an emulator of ACL; None where none is installed."""
    for entry in _entries(ACL):
        module: ModuleType = entry.load()
        return module
    return None


def host_device() -> bool:
    """Return whether the host device is installed."""
    return any(entry.dist and entry.dist.name == HOST_DISTRIBUTION for entry in _entries(FEATURES))


def host_device_refusal(on_cpu: bool, environment: Mapping[str, str]) -> Refusal | None:
    """Return why vLLM does not start, or None: it needs the host device, which is not installed.

    Args:
        on_cpu: vLLM computes on a CPU.
        environment: may ask for the host device, whatever vLLM computes on.
    """
    asked = bool(HOST_DEVICE.read(environment))
    if host_device() or not (on_cpu or asked):
        return None
    remedy = "install it and run python -m kvpatch.hostdevice install"
    return Refusal(
        "this machine has no GPU" if on_cpu else f"{HOST_DEVICE} is set",
        f"the host device is a distribution of its own, {HOST_DISTRIBUTION}, and is not installed",
        f"{remedy if on_cpu else f'unset {HOST_DEVICE}, or {remedy}'}, or set KVPATCH=0",
        code="KVP504",
    )
