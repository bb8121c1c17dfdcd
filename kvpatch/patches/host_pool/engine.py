"""The engine's side: its part in the pool, from before its workers start until they have ended."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvpatch import claims, private, state
from kvpatch.patch import argument
from kvpatch.patches.host_pool import connected, presence, rules
from kvpatch.patches.host_pool.tier import Pooled
from kvpatch.pool import ledger, member
from kvpatch.pool.keeper import Keeper
from kvpatch.pool.ranks import Failed, Ranks
from kvpatch.pool.record import Owner
from kvpatch.refusal import Refusal
from kvpatch.sizes import readable
from kvpatch.telemetry.host_pool import HostPool
from kvpatch.upstream import connectors
from kvpatch.upstream.vllm_api import region_path

EXTENT = 64 << 20  # bytes, about
# Of a small pool an extent is smaller, so that engines have several.
_PARTS, _SMALLEST = 64, 1 << 20
_OTHER_ID = "give each engine its own engine_id in kv_transfer_config"
_ALONE = "leave KVPATCH_HOST_POOL unset, or set KVPATCH=0"


def around_engine_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Let an engine with a CPU tier take part in the pool; refused if it cannot be used."""
    config = argument(args, kwargs, 0, "vllm_config")
    if not rules.pooled(config.kv_transfer_config):
        wrapped(*args, **kwargs)
        return
    gc.collect()  # ends the part of an engine that was dropped before
    part = Part(config)
    try:
        wrapped(*args, **kwargs)
        part.begin(instance)
    except BaseException:
        part.close()
        raise


def around_shutdown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Give everything back once the workers have ended. Wraps ``EngineCore.shutdown``."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        pooled = state.find(instance, Pooled)
        if pooled is not None:
            pooled.close()


def after_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Give back the extents of a reset tier.

    One in the caller's process is stepped here until no transfer is left.
    """
    pooled = state.find(instance, Pooled)
    if pooled is None:
        return wrapped(*args, **kwargs)
    with pooled.lock:  # it goes through the policy's blocks outside of a step
        result = wrapped(*args, **kwargs)
    while (
        pooled.extents.transferring
        and not hasattr(instance, "run_busy_loop")
        and not instance.scheduler.has_unfinished_requests()
    ):
        instance.step_fn()
    pooled.keeper.wake()
    return result


class Part:
    """The part in the pool of an engine that starts; refused if the pool cannot be used."""

    def __init__(self, config: Any) -> None:
        transfer = config.kv_transfer_config
        engine_id = transfer.engine_id
        self._workers = int(config.parallel_config.world_size)
        self._size = presence.size()
        self._extent = max(_SMALLEST, min(EXTENT, self._size // _PARTS))
        self._path = region_path(engine_id)
        self._file = -1
        name = str(config.model_config.served_model_name)
        # Until it is known, what others that start meanwhile have to leave it.
        ceiling = min(rules.asked(config), self._size)
        floor = rules.floor(os.environ)
        owner = Owner(
            committed=0,
            resident=0,
            ceiling=ceiling,
            floor=min(floor, ceiling or floor),
            extent=self._extent,
            coldest=0.0,
            looked=time.monotonic(),
            namespace=ledger.pid_namespace(),
            name=name,
        )
        # That of OffloadingConnector is claimed already, see secondary_tiers.shared_memory.
        claim = None if connectors.offloading(transfer) else self._claim(engine_id)
        try:
            self._member = _join(ledger.record_of(presence.home(), engine_id), self._size, owner)
        except BaseException:
            claims.release(self)
            raise
        self._ranks: Ranks | None = None
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._file = os.open(self._path, flags, 0o600)
            if claim is not None:
                claim.cover(self._path.name)  # of an engine that is killed before its name is gone
            self._ranks = Ranks(ledger.socket_of(self._member.path))
        except FileExistsError as error:
            self.close()
            raise _exists(self._path, engine_id) from error
        except OSError as error:
            self.close()
            raise claims.no_room(self._path, error) from error

    def _claim(self, engine_id: str) -> claims.Claim:
        """Claim the name of the tier's file for as long as it has one, in whichever pool."""
        try:
            return claims.hold(self, "tier", engine_id)
        except claims.Taken as taken:
            raise Refusal(
                f"{taken.holder} has the engine_id {engine_id}",
                f"the two would share {self._path}, and load each other's blocks",
                _OTHER_ID,
                code="KVP413",
            ) from taken

    def begin(self, engine: Any) -> None:
        """Start the thread of an engine whose workers have mapped the tier; refused otherwise."""
        assert self._ranks is not None
        size = os.fstat(self._file).st_size
        tier = connected.of(engine.scheduler.connector) if size else None
        if tier is None:
            self.close()  # a tier without chunks stores nothing
            return
        try:
            workers = self._ranks.accept(self._workers)
            memory, extents = tier.lay_out(self._file, self._extent, [one.about for one in workers])
        except Failed as error:
            raise Refusal(
                "a worker did not open the CPU tier of the host pool",
                str(error),
                f"report this with your command line, or {_ALONE}",
                code="KVP421",
            ) from error
        if (least := extents.place(0)[1]) > self._size:
            raise Refusal(
                f"a part of the CPU tier takes at least {readable(least)} and the host pool has "
                f"{readable(self._size)}",
                "nothing could be stored",
                "set KVPATCH_HOST_POOL to many times that",
                code="KVP346",
            )
        self._member.held_by({one.pid for one in workers} - {os.getpid()})
        self._path.unlink(missing_ok=True)  # its memory goes with the last process now
        self._member.bounded_by(extents.chunks * extents.chunk_bytes)
        lock = threading.RLock()
        keeper = Keeper(extents, memory, self._member, self._ranks, lock, tier.evict)
        tier.begin(keeper)
        pooled = Pooled(extents, keeper, lock, self._workers, tier.disks)
        for host in (engine, engine.scheduler, *tier.hosts):
            state.attach(host, pooled)
        state.attach(engine, HostPool(keeper.describe))
        weakref.finalize(engine, pooled.close)  # of an engine that is dropped without a shutdown
        self._file = -1  # the keeper's from now on
        claims.release(self)
        keeper.start()

    def close(self) -> None:
        """End the part of an engine that has not started; again, for one that has."""
        if self._ranks is not None:
            self._ranks.close()
        if self._file >= 0:
            os.close(self._file)
            self._path.unlink(missing_ok=True)
            self._file = -1
        claims.release(self)
        self._member.leave()


def _exists(path: Path, engine_id: str) -> Refusal:
    with suppress(FileNotFoundError):  # since
        try:
            private.check_file(path, path.lstat())
        except private.Unsafe as error:
            return error.refusal(
                "another user could read and change the KV of this engine's requests", _OTHER_ID
            )
    return Refusal(
        f"the CPU tier's shared memory {path} already exists",
        f"another engine with engine_id {engine_id} is running or was killed, and two engines that "
        "share this memory would load each other's blocks",
        f"{_OTHER_ID}, or remove the file when no engine uses it",
        code="KVP413",
    )


def _join(path: Any, size: int, owner: Owner) -> member.Member:
    try:
        return member.join(path, size, owner)
    except member.Different as error:
        raise Refusal(
            f"KVPATCH_HOST_POOL is {readable(size)} here and {readable(error.size)} in running "
            "engines",
            "all engines of a user share one pool",
            "set KVPATCH_HOST_POOL to the same size everywhere, and change the limit of a running "
            "pool with kvpatch pool SIZE",
            code="KVP345",
        ) from error
    except member.Promised as error:
        raise Refusal(
            f"KVPATCH_HOST_POOL_FLOOR is {readable(owner.floor)}, and the running engines of the "
            f"host pool have floors of {readable(error.floors)}",
            f"the pool has {readable(size)}, so that not all of them could be kept",
            "set a lower KVPATCH_HOST_POOL_FLOOR, or a larger KVPATCH_HOST_POOL for all of them",
            code="KVP350",
        ) from error
    except member.Lingers as error:
        raise Refusal(
            "the host pool has an engine of this engine_id",
            str(error),
            f"start it again when the processes of the other one are gone, or {_ALONE}",
            code="KVP347",
        ) from error
    except (ledger.Foreign, ledger.Busy) as error:
        raise Refusal(
            f"the host pool's ledger {path.parent} cannot be used",
            "a running engine has another version of kvpatch"
            if isinstance(error, ledger.Foreign)
            else str(error),
            f"stop the other engines, or {_ALONE}",
            code="KVP347",
        ) from error
    except private.Unsafe as error:
        raise error.refusal("another user could change what it says", _ALONE) from error
    except OSError as error:
        raise claims.no_room(path, error) from error
