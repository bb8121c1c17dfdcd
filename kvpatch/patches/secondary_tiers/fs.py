"""vLLM's file system tier with a timeout for unresponsive disks."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.tiering.async_lookup import LookupState
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.fs import thread_pool
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager, FsAsyncLookupManager

from kvpatch import state
from kvpatch.environ import PYTHONHASHSEED, TIER_SIZE
from kvpatch.logs import log
from kvpatch.patches.secondary_tiers.block_files import (
    SEAL,
    Damaged,
    Ledger,
    noted_in,
    own_folder,
    sweep,
)
from kvpatch.patches.secondary_tiers.capacity import Folder, Full, ledger_of, size_of
from kvpatch.patches.secondary_tiers.fewer_lines import FewerLines
from kvpatch.patches.secondary_tiers.fingerprint import unusable
from kvpatch.patches.secondary_tiers.timeout import Unanswered, patience
from kvpatch.patches.secondary_tiers.weights import Weights
from kvpatch.refusal import Refusal
from kvpatch.sizes import readable
from kvpatch.telemetry.disk import Disk
from kvpatch.upstream.vllm_api import lookup_results

_PROBE = "probe"
_AT_ONCE = 128  # blocks that are looked up before the disk counts as having responded
_MISS, _ = lookup_results()


class PatientLookups(FsAsyncLookupManager):  # type: ignore[misc]
    """vLLM's lookups, with the time of those that are pending."""

    def __init__(self, tier: Any, tier_type: str, unanswered: Unanswered) -> None:
        self._unanswered = unanswered
        self._disk = tier.disk
        self._folder = tier.folder
        super().__init__(tier=tier, tier_type=tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        """Return which blocks have files; runs on the tier's own thread."""
        found: list[bool] = []
        try:
            for start in range(0, len(keys), _AT_ONCE):
                self._unanswered.asked(_PROBE)
                found += super().batch_lookup(keys[start : start + _AT_ONCE], req_context)
            with noted_in(self._folder):  # they are about to be read
                for key in compress(keys, found):
                    self._folder.use(self._tier.file_mapper.get_file_name(key))
            return found
        except Exception:  # vLLM logs it, and takes them for misses
            self._disk.failed("lookup")
            raise
        finally:
            self._unanswered.answered(_PROBE)


class FirstAnswers(PatientLookups):
    """Lookups up to vLLM 0.29, with support for two results for one block."""

    def drain_results(self) -> None:
        """Keep the first result for each block: two requests, one aborted, produce two.

        vLLM 0.28 and 0.29 end the engine at the second; from 0.30 on lookups are numbered.
        """
        while not self._pending_results.empty():
            for key, found in self._pending_results.get_nowait():
                state = self._lookup_state.get(key)
                if state is not None and state.result is None:
                    state.result = found


Lookups = PatientLookups if hasattr(LookupState, "generation") else FirstAnswers
# Additional fields of a result; none up to 0.27.
_UNTIMED = {"transfer_time": 0.0} if "transfer_time" in JobResult.__dataclass_fields__ else {}


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def kind_of(error: Exception, what: str) -> str:
    """Return what kept a job from its end, by the name of its counter; ``what`` without one."""
    if isinstance(error, Damaged):
        return "damaged"
    no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
    return "full" if no_room or isinstance(error, Full) else what


class TimedTasks:
    """vLLM's pool of threads, with the time of the tasks that have started, and what they did."""

    def __init__(self, pool: Any, unanswered: Unanswered, disk: Disk, folder: Ledger) -> None:
        self._pool = pool
        self._folder = folder
        self._unanswered = unanswered
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def enqueue_load(self, job_id: int, n_tasks: int, tasks: Iterable[Callable[[], None]]) -> None:
        """Queue a job's tasks that read."""
        self._pool.enqueue_load(job_id, n_tasks, self._timed(job_id, tasks, "load"))

    def enqueue_store(self, job_id: int, n_tasks: int, tasks: Iterable[Callable[[], None]]) -> None:
        """Queue a job's tasks that write."""
        self._pool.enqueue_store(job_id, n_tasks, self._timed(job_id, tasks, "store"))

    def _timed(self, job_id: int, tasks: Iterable[Callable[[], None]], what: str) -> list[Any]:
        return [
            partial(self._run, (job_id, number), task, what) for number, task in enumerate(tasks)
        ]

    def _run(self, question: tuple[int, int], task: Callable[[], None], what: str) -> None:
        moved = partial(self._disk.moved, "stored" if what == "store" else "loaded")
        try:
            with noted_in(self._folder):
                self._unanswered.run(question, task, moved)
        except Exception as error:
            gone = isinstance(error, FileNotFoundError) and what == "load" and self._folder.kept
            self._disk.failed("gone" if gone else kind_of(error, what))
            raise


def _warn_of_random_hashes() -> None:
    if not PYTHONHASHSEED.read() and not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"):
        log.warning(
            "PYTHONHASHSEED is not set: this vLLM names blocks by a random seed, no later engine "
            "finds the files of this one, and the disk fills up with them; set PYTHONHASHSEED=0"
        )


def _folder_of(tier: Any, root: str) -> Folder:
    """Return a tier's folder, whose older files a thread finds; refused with less than a block."""
    limit, file = size_of(root), tier._block_size + SEAL
    if 0 < limit < file:
        raise Refusal(
            f"{TIER_SIZE} is {readable(limit)}",
            f"a block file of this engine has {readable(file)}, and none would be kept",
            f"set {TIER_SIZE} to the size of many of them, for example 500GiB",
            code="KVP385",
        )
    if limit:
        own_folder(ledger_of(Path(root)).parent)
    folder = Folder(root, limit, patience(), partial(tier.disk.moved, "evicted"))
    folder.begin()
    return folder


class PatientFileSystemTier(FileSystemTierManager):  # type: ignore[misc]
    """vLLM's ``fs`` tier; while it is late, it is not used. Its directories are this user's only.

    ``weights`` says whether the blocks of the engine are those of the tier's folder.
    """

    _lookup_manager: Any
    _pool: Any

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **config: Any
    ) -> None:
        self.disk = Disk()
        try:
            super().__init__(offloading_spec, primary_kv_view, tier_type, **config)
            self.folder = _folder_of(self, config["root_dir"])
        except OSError as error:  # a disk that cannot be written to
            raise unusable(config.get("root_dir"), error) from error
        self.unanswered = Unanswered(patience())
        self.weights = state.find(self.file_mapper, Weights)
        self._lookup_manager.shutdown()
        self._lookup_manager = Lookups(self, tier_type, self.unanswered)
        self._pool = TimedTasks(self._pool, self.unanswered, self.disk, self.folder)
        self._declined: list[Any] = []
        sweep(Path(f"{self.file_mapper.base_path}_r{self.file_mapper.rank}"))
        _warn_of_random_hashes()
        FewerLines.of(logging.getLogger(thread_pool.__name__))

    @property
    def late(self) -> bool:
        """Whether the disk has not responded within the timeout."""
        return self.unanswered.late

    @property
    def _passed_over(self) -> bool:
        return self.late or (self.weights is not None and not self.weights.usable())

    def lookup(self, key: Any, req_context: Any) -> Any:
        """Look up whether a block has a file; a miss if the tier is not used."""
        return _MISS if self._passed_over else super().lookup(key, req_context)

    def submit_store(self, job_metadata: Any) -> None:
        """Queue the writing of blocks; fail if the tier is not used, so that none is pinned."""
        if not self._decline(job_metadata):
            super().submit_store(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Queue the reading of blocks; fail if the tier is not used."""
        if not self._decline(job_metadata):
            super().submit_load(job_metadata)

    def _decline(self, job: Any) -> bool:
        if not self._passed_over:
            return False
        if self.late:  # and not passed over for its weights, which is no fault
            self.disk.failed("late")
        self._declined.append(JobResult(job.job_id, success=False, **_UNTIMED))
        return True

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that ended or were declined since the last call."""
        declined, self._declined = self._declined, []
        return declined + list(super().get_finished_jobs())

    def shutdown(self) -> None:
        """End the threads, without waiting indefinitely for those blocked by a disk."""
        self._lookup_manager._lookup_queue.put(None)
        self._pool.shutdown(wait=False)
        end = time.monotonic() + self.unanswered.limit
        for thread in (self._lookup_manager._thread, *self._pool._threads):
            thread.join(max(0.0, end - time.monotonic()))


def around_tier_class(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Return ``PatientFileSystemTier`` for vLLM's ``fs``, ``SealedObjectTier`` for its ``obj``."""
    found = wrapped(*args, **kwargs)
    if found.__name__ == "ObjectStoreSecondaryTierManager":
        from kvpatch.patches.secondary_tiers.objects import SealedObjectTier  # it needs NIXL

        return SealedObjectTier
    return PatientFileSystemTier if found is FileSystemTierManager else found


def replace_tier_class(original: Any) -> Any:
    """Return ``PatientFileSystemTier`` for vLLM's class, which up to 0.24 is not looked up."""
    return PatientFileSystemTier
