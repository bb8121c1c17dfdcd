"""Whether the device is an Ascend NPU."""

from __future__ import annotations


def wanted() -> bool:
    """Whether vLLM runs on vllm-ascend's platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.device_type == "npu")
