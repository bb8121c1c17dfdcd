"""Configurations that are refused with ``KVPATCH_HOST_POOL``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpatch import admitted, environ
from kvpatch.environ import HOST_POOL_FLOOR
from kvpatch.patches.host_pool import presence
from kvpatch.patches.offloading import cpu_tier, place
from kvpatch.patches.offloading.memory_rules import memory_of
from kvpatch.rules import Rule
from kvpatch.sizes import readable
from kvpatch.upstream import connectors
from kvpatch.versions import Facts

NAME = "host pool"  # in the table of what ran
_SPECS = (
    *(None, "CPUOffloadingSpec", "HostOffloadingSpec"),
    *("TieringOffloadingSpec", "HostTieringOffloadingSpec"),
)
_UNSET = "unset KVPATCH_HOST_POOL"


def _pooled(facts: Facts) -> bool:
    return presence.size(facts.environment) > 0


def floor(environment: Mapping[str, str]) -> int:
    """Return the bytes of the pool that the operator wants this engine to keep; 0 for none."""
    text = HOST_POOL_FLOOR.read(environment)
    return environ.size(text) if text else 0


def _other_release(config: Any, facts: Facts) -> bool:
    return _pooled(facts) and not place.ran_with(NAME, config, facts)


def _other_tier(config: Any, facts: Facts) -> bool:
    if not _pooled(facts):
        return False
    transfer = config.kv_transfer_config
    tiers = pooled(transfer)
    if len(tiers) != 1:
        return True
    if tiers[0].name == connectors.SIMPLE:
        return bool(transfer.kv_connector != connectors.SIMPLE)
    if tiers[0].extra.get("spec_name") not in _SPECS:
        return True
    # The engine has one part in the pool, under its own name.
    inside = transfer.kv_connector_extra_config.get("connectors") or ()
    return any("engine_id" in one for one in inside)


def pooled(transfer: Any) -> list[connectors.Leaf]:
    """Return the connectors of a ``KVTransferConfig`` whose CPU tiers are put into the pool."""
    simple = [leaf for leaf in connectors.leaves(transfer) if leaf.name == connectors.SIMPLE]
    return [*connectors.offloading(transfer), *simple]


def asked(config: Any) -> int:
    """Return the bytes of the CPU tiers that a ``VllmConfig`` asks for; 0 if unknown."""
    ranks = int(config.parallel_config.world_size)
    return sum(cpu_tier.asked(leaf, ranks) for leaf in pooled(config.kv_transfer_config))


class _Pool(NamedTuple):
    """What an engine finds when it starts: engines, and bytes, of which ``committed`` come back."""

    limit: int
    others: int
    committed: int
    ceiling: int


def _pool(facts: Facts) -> _Pool:
    return facts.read("host pool", lambda: _read_pool(facts))


def _read_pool(facts: Facts) -> _Pool:
    from kvpatch.pool import ledger  # here, because without a pool nothing of it is imported

    size = presence.size(facts.environment)
    try:
        shown = ledger.show(presence.home(facts.environment))
    except (ledger.Busy, ledger.Foreign, OSError):
        shown = None
    if shown is None:
        return _Pool(size, 0, 0, 0)
    limit, peers = shown
    others = sum(not peer.dying for peer in peers)
    return _Pool(limit.current if others else size, others, *ledger.taken(peers))


def _needed(config: Any, pool: _Pool) -> int:
    """Return the bytes that all engines may take of the pool; 0 if that of this one is unknown."""
    own = asked(config)
    return min(own + pool.ceiling, pool.limit) if own else 0


def _free(facts: Facts, pool: _Pool) -> int | None:
    memory = memory_of(facts)
    return None if memory is None else memory.free_in_shm + pool.committed


def _too_large(config: Any, facts: Facts) -> bool:
    if not _pooled(facts):
        return False
    pool = _pool(facts)
    free = _free(facts, pool)
    return free is not None and _needed(config, pool) > free


def _what_is_too_large(config: Any, facts: Facts) -> str:
    pool = _pool(facts)
    who = f"this engine and {pool.others} more" if pool.others else "an engine"
    return (
        f"{who} may take {readable(_needed(config, pool))} of the host pool, and /dev/shm and "
        f"the memory of this machine and its container have {readable(_free(facts, pool) or 0)} "
        "for it"
    )


RULES = (
    Rule(
        "KVP342",
        "`KVPATCH_HOST_POOL`" + admitted.but(NAME, how="on a machine without a GPU"),
        _other_release,
        "KVPATCH_HOST_POOL is set on this release, with this connector and this kind of model",
        f"the host pool is validated {admitted.with_connectors(NAME)} only",
        _UNSET,
    ),
    Rule(
        "KVP343",
        "`KVPATCH_HOST_POOL` with two CPU tiers, with SimpleCPUOffloadConnector in MultiConnector, "
        "or with an `engine_id` inside of it",
        _other_tier,
        "KVPATCH_HOST_POOL is set for CPU tiers that did not run in one",
        "the host pool is validated with one CPU tier, and with SimpleCPUOffloadConnector by "
        "itself",
        f"{_UNSET}, or use one of these",
    ),
    Rule(
        "KVP349",
        "`KVPATCH_HOST_POOL_FLOOR` without `KVPATCH_HOST_POOL`, or above it",
        lambda config, facts: floor(facts.environment) > presence.size(facts.environment),
        "KVPATCH_HOST_POOL_FLOOR is set to more than KVPATCH_HOST_POOL",
        "an engine keeps a part of a pool, of which there is no more",
        "set KVPATCH_HOST_POOL to the size of the pool, or unset KVPATCH_HOST_POOL_FLOOR",
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
        "`KVPATCH_HOST_POOL` of which engines may take more than there is memory for",
        _too_large,
        _what_is_too_large,
        "the kernel would refuse it, or end a process for it",
        "set a smaller KVPATCH_HOST_POOL or --kv-offloading-size",
    ),
)
