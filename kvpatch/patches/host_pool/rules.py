"""Configurations that are refused with ``KVPATCH_HOST_POOL``."""

from __future__ import annotations

from typing import Any

from kvpatch.patches.host_pool import presence
from kvpatch.rules import Rule
from kvpatch.sizes import readable
from kvpatch.upstream import connectors
from kvpatch.versions import Facts, in_words

# The releases whose engines passed tests/long/test_host_pool.py, or its file in tests/versions.
RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
# Those with secondary tiers, of tests/long/test_host_pool_tiers.py, and those in a MultiConnector.
WITH_TIERS: tuple[str, ...] = ()
IN_MULTI: tuple[str, ...] = ()
_SPECS = (None, "CPUOffloadingSpec", "HostOffloadingSpec")
_TIERING = ("TieringOffloadingSpec", "HostTieringOffloadingSpec")
_UNSET = "unset KVPATCH_HOST_POOL"


def _pooled(facts: Facts) -> bool:
    return presence.size(facts.environment) > 0


def _other_release(config: Any, facts: Facts) -> bool:
    return _pooled(facts) and not facts.vllm.is_one_of(RELEASES)


def _other_tier(config: Any, facts: Facts) -> bool:
    if not _pooled(facts):
        return False
    transfer = config.kv_transfer_config
    tiers = connectors.offloading(transfer)
    if len(tiers) != 1 or any(one.name == connectors.SIMPLE for one in connectors.leaves(transfer)):
        return True
    specs = _SPECS + (_TIERING if facts.vllm.is_one_of(WITH_TIERS) else ())
    if tiers[0].extra.get("spec_name") not in specs:
        return True
    if transfer.kv_connector == connectors.OFFLOADING:
        return False
    # The engine has one part in the pool, under its own name.
    inside = transfer.kv_connector_extra_config.get("connectors") or ()
    return not facts.vllm.is_one_of(IN_MULTI) or any("engine_id" in one for one in inside)


def _needed(config: Any, facts: Facts) -> int:
    """Return the bytes that an engine may still take of the pool; 0 if that is unknown."""
    asked = 0
    for leaf in connectors.offloading(config.kv_transfer_config):
        try:
            asked += int(leaf.extra.get("cpu_bytes_to_use") or 0)
        except (TypeError, ValueError):
            return 0  # vLLM's to refuse
    return min(asked, presence.size(facts.environment))


def _committed(facts: Facts) -> int:
    """Return the bytes that running engines have of the pool, and give back when they must."""
    from kvpatch.pool import ledger  # here, because without a pool nothing of it is imported

    try:
        shown = ledger.show(presence.home(facts.environment))
    except (ledger.Busy, ledger.Foreign, OSError):
        return 0
    return 0 if shown is None else sum(peer.owner.committed for peer in shown[1])


def _free(facts: Facts) -> int | None:
    memory = facts.memory() if facts.memory is not None else None
    if memory is None:
        return None
    free = memory.free + memory.swap
    return (free if memory.shm is None else min(free, memory.shm)) + _committed(facts)


def _too_large(config: Any, facts: Facts) -> bool:
    if not _pooled(facts):
        return False
    free = _free(facts)
    return free is not None and _needed(config, facts) > free


def _what_is_too_large(config: Any, facts: Facts) -> str:
    return (
        f"an engine may take {readable(_needed(config, facts))} of the host pool, and /dev/shm and "
        f"the memory of this machine and its container have {readable(_free(facts) or 0)} for it"
    )


RULES = (
    Rule(
        "KVP342",
        "`KVPATCH_HOST_POOL` on releases whose engines did not pass its tests",
        _other_release,
        "KVPATCH_HOST_POOL is set on this release",
        f"the host pool is validated on vLLM {in_words(RELEASES)} only",
        _UNSET,
    ),
    Rule(
        "KVP343",
        "`KVPATCH_HOST_POOL` with secondary tiers, SimpleCPUOffloadConnector or MultiConnector",
        _other_tier,
        "KVPATCH_HOST_POOL is set for a CPU tier that is not OffloadingConnector's own",
        "the host pool is validated with OffloadingConnector alone, without secondary tiers",
        f"{_UNSET}, or use --kv-offloading-size without secondary tiers",
    ),
    Rule(
        "KVP344",
        "`KVPATCH_HOST_POOL` on a GPU",
        lambda config, facts: _pooled(facts) and facts.device != "cpu",
        "KVPATCH_HOST_POOL is set on a GPU",
        "giving memory back while an engine runs is not validated on one",
        _UNSET,
    ),
    Rule(
        "KVP348",
        "`KVPATCH_HOST_POOL` of which an engine may take more than there is memory for",
        _too_large,
        _what_is_too_large,
        "the kernel would refuse it, or end a process for it",
        "set a smaller KVPATCH_HOST_POOL or --kv-offloading-size",
    ),
)
