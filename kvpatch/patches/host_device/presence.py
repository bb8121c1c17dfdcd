"""Whether this machine needs the host device, and has it."""

from __future__ import annotations

from importlib.util import find_spec

from kvpatch.environ import HOST_DEVICE
from kvpatch.refusal import Refusal

PACKAGE = "kvpatch.hostdevice"
ABSENT = "the host device is a distribution of its own, kvpatch-hostdevice, and is not installed"


def installed() -> bool:
    """Whether the host device is there, without importing it."""
    return find_spec(PACKAGE) is not None


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
