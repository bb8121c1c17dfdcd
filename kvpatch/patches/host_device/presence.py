"""Whether this machine needs the host device, and has it."""

from __future__ import annotations

from importlib.util import find_spec

from kvpatch.environ import HOST_DEVICE
from kvpatch.refusal import Refusal
from kvpatch.status import record
from kvpatch.versions import Installed

PACKAGE = "kvpatch.hostdevice"
ABSENT = "the host device is a distribution of its own, kvpatch-hostdevice, and is not installed"


def installed() -> bool:
    """Whether the host device is there, without importing it."""
    return find_spec(PACKAGE) is not None


def require_size() -> None:
    """Refuse a vLLM for CPUs whose host device has no size, before anything is imported.

    Raises:
        Refusal: it has none.
    """
    if record.facts is not None:
        size_for(record.facts.vllm)


def size_for(vllm: Installed) -> int | None:
    """Return the size of the host device in bytes; None where vLLM needs none or none is there.

    Raises:
        Refusal: it has none.
    """
    if not (is_for_cpus(vllm) and installed()):
        return None
    from kvpatch.hostdevice import ledger

    size: int = ledger.require_size()
    return size


def is_for_cpus(vllm: Installed) -> bool:
    """Whether a vLLM is built for CPUs, by its metadata."""
    local = "" if vllm.version is None else vllm.version.local or ""
    return vllm.distribution.endswith("-cpu") or local.startswith("cpu")


def wanted() -> bool:
    """Whether this vLLM runs on a CPU, where kvcached needs the host device.

    Raises:
        Refusal: it does, or the operator asked for the host device, which is not installed; or
            it has no size or a conflicting one.
    """
    from vllm.platforms import current_platform

    if installed():
        from kvpatch.hostdevice import adapt

        return adapt.wanted()
    if current_platform.is_cpu():
        raise Refusal(
            "this machine has no GPU",
            ABSENT,
            f"install it and run python -m {PACKAGE} install, or set KVPATCH=0",
            code="KVP504",
        )
    if HOST_DEVICE.read():
        raise Refusal(
            f"{HOST_DEVICE} is set",
            ABSENT,
            f"unset {HOST_DEVICE}, or install kvpatch-hostdevice, or set KVPATCH=0",
            code="KVP504",
        )
    return False
