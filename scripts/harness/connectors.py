"""The ``kv_transfer_config`` of every connector, in one place."""

from collections.abc import Sequence
from typing import Any

Config = dict[str, Any]


def connector(name: str, **extra: Any) -> Config:
    """Return the configuration of a connector by vLLM's name of it."""
    config: Config = {"kv_connector": name, "kv_role": "kv_both"}
    return config | ({"kv_connector_extra_config": extra} if extra else {})


def offloading(cpu_bytes: int, without_kvpatch: bool = False, **extra: Any) -> Config:
    """Return OffloadingConnector with a CPU tier of ``cpu_bytes``, over all ranks.

    Args:
        cpu_bytes: the size of the CPU tier.
        without_kvpatch: on a machine without a GPU, in an engine that runs without kvpatch.
        extra: more of ``kv_connector_extra_config``.
    """
    host = {"spec_name": "HostOffloadingSpec", "spec_module_path": "kvpatch.hostdevice.offloading"}
    return connector(
        "OffloadingConnector",
        cpu_bytes_to_use=cpu_bytes,
        **(host if without_kvpatch else {}) | extra,
    )


def tiering(
    cpu_bytes: int, tiers: Sequence[Config], without_kvpatch: bool = False, **extra: Any
) -> Config:
    """Return OffloadingConnector with secondary tiers, as vLLM's ``secondary_tiers`` has them."""
    spec: Config = {"spec_name": "TieringOffloadingSpec"}
    if without_kvpatch:
        spec = {
            "spec_name": "HostTieringOffloadingSpec",
            "spec_module_path": "kvpatch.hostdevice.tiering",
        }
    return offloading(cpu_bytes, **spec, secondary_tiers=list(tiers), **extra)


def simple(cpu_bytes: int, lazy: bool) -> Config:
    """Return SimpleCPUOffloadConnector in lazy or eager mode."""
    return connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=cpu_bytes, lazy_offload=lazy)


def multi(*inside: Config) -> Config:
    """Return MultiConnector with these connectors inside, in order."""
    return connector("MultiConnector", connectors=list(inside))
