"""What an engine needs and could have: for ``kvpatch balance`` and other controllers."""

from __future__ import annotations

from typing import Any

from kvpatch import state
from kvpatch.environ import HOST_DEVICE_DIR
from kvpatch.patches.suspend.giving import Giving
from kvpatch.patches.suspend.suspension import Cannot
from kvpatch.upstream import kvcached_api, requests


def demand(engine: Any) -> dict[str, Any]:
    """Return what an engine needs, in bytes but for names; on its own thread, or raise Cannot."""
    manager = kvcached_api.manager_of(engine)
    return {
        "device": device(engine),  # the same for engines that share their memory
        "mapped": kvcached_api.mapped(manager),  # read before what nobody has
        "free": kvcached_api.free(manager),
        "page": kvcached_api.page_bytes(manager),
        "least": requests.longest(engine),  # for one request of so many tokens:
        "longest": int(engine.vllm_config.model_config.max_model_len),
        "needs": requests.present(engine),  # for the requests that are there
        "lends": state.find(manager, Giving) is not None,  # it stores what it gives
    }


def device(engine: Any) -> str:
    """Return the name of an engine's devices, no other's on the machine; Cannot without one."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"host device {HOST_DEVICE_DIR.read() or '/dev/shm'}"
    ranks = range(engine.vllm_config.parallel_config.world_size)
    try:
        names = sorted(str(current_platform.get_device_uuid(rank)) for rank in ranks)
    except Exception as error:  # of a library of the device's maker
        raise Cannot(f"vLLM does not know its device: {type(error).__name__}: {error}") from error
    if not all(names):
        raise Cannot("vLLM does not know its device")
    return ", ".join(names)
