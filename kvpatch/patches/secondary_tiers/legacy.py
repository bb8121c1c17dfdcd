"""Secondary tiers before vLLM 0.33, in the terms of later releases.

up to 0.31  stats do not say which hits came from a disk
up to 0.32  a tier may write to a chunk that a copy from before a reset still reads or writes
up to 0.27  a job succeeds or fails as a whole, with all of its blocks
up to 0.26  blocks are written to files one by one, only with direct I/O, and, from 0.25 on, a
            request's last blocks are stored after the manager has dropped the request
up to 0.24  a lookup returns True, False or None for later, and the class of a tier is not
            looked up
"""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.secondary_tiers.block_files import load_blocks, store_blocks
from kvpatch.patches.secondary_tiers.promotion import Promoted
from kvpatch.telemetry.counters import Totals


def hold_promotions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let promotions wait for the copies that were in flight when the CPU tier was reset.

    Wraps ``OffloadingConnectorScheduler.build_connector_meta``, which hands promotions to the
    tiers at once. A reset frees the chunks of all copies, and the workers wait for these copies
    only when they are given the step that is being built. vLLM forgets the copies with the reset,
    so that the fence is asked, which counts each until every worker has reported it.
    """
    fenced = state.find(instance, Fenced)
    manager = instance.manager
    waiting = getattr(manager, "_pending_load_submissions", None)  # without tiers there are none
    if fenced is None or not waiting or not _older_than_reset(fenced, instance):
        return wrapped(*args, **kwargs)
    manager._pending_load_submissions = {}
    try:
        return wrapped(*args, **kwargs)
    finally:
        manager._pending_load_submissions = waiting


def _older_than_reset(fenced: Fenced, planner: Any) -> bool:
    """Whether a copy is in flight that the last reset of the connector's cache has dropped."""
    return any(job < planner._stale_job_threshold for job in fenced.fence.transfers)


def count_disk_hits(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Count the tokens that a request loads of blocks that were promoted for it.

    Wraps ``OffloadingConnectorScheduler.update_state_after_alloc(request, blocks,
    num_external_tokens)``, after which vLLM counts a hit, in the same step.
    """
    result = wrapped(*args, **kwargs)
    totals = state.find(instance, Totals)
    if totals is None or totals.fuse.off:
        return result
    with totals.fuse:
        request = argument(args, kwargs, 0, "request")
        tokens = int(argument(args, kwargs, 2, "num_external_tokens"))
        if tokens and not request.num_preemptions:  # of which vLLM keeps a count of its own
            totals.from_disk += _promoted(instance, request, tokens)
    return result


def _promoted(planner: Any, request: Any, tokens: int) -> int:
    """Return how many of the tokens that a request loads are of blocks promoted for it."""
    status = planner._req_status[request.request_id]
    promoted = state.find(status.req_context, Promoted)
    if promoted is None:
        return 0
    begin, most = status.num_locally_computed_tokens, 0
    for config, group in zip(planner.config.kv_group_configs, status.group_states, strict=False):
        # The latter up to 0.25.
        size = getattr(config, "tokens_per_chunk", None) or config.offloaded_block_size
        keys = group.offload_keys[begin // size : -(-(begin + tokens) // size)]
        most = max(most, size * sum(key in promoted.keys for key in keys))
    return min(tokens, most)


def split_promotions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Promote every block in a separate job.

    Wraps ``TieringOffloadingManager._flush_pending_promotions``. vLLM discards all blocks of a
    job with one damaged file, including those that were read.
    """
    for tier, waiting in instance._pending_load_submissions.items():
        instance._pending_load_submissions[tier] = {
            (request, key): replace(entry, keys=[key], block_ids=[block])
            for request, entry in waiting.items()
            for key, block in zip(entry.keys, entry.block_ids, strict=True)
        }
    wrapped(*args, **kwargs)


def around_prepare_store(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Store the last blocks of a request that has finished.

    Wraps ``TieringOffloadingManager.prepare_store``, which 0.25 and 0.26 call one step after
    the manager has dropped the request's state, and which fails without it.
    """
    context = argument(args, kwargs, 1, "req_context")
    known = instance._req_state
    if context.req_id in known:
        return wrapped(*args, **kwargs)
    from vllm.v1.kv_offload.tiering.manager import RequestState

    request = known[context.req_id] = RequestState(context, is_finished=True)
    try:
        return wrapped(*args, **kwargs)
    finally:
        if not request.pending_primary_stores:  # otherwise dropped when they have completed
            del known[context.req_id]


# Folders on file systems without direct I/O, for which 0.27 checks in advance.
_buffered: set[str] = set()


def store_block(dest_path: str, buffer: memoryview, offset: int, block_size: int) -> None:
    """Write one block; replaces vLLM's function of that name.

    Raises:
        OSError, ValueError: as ``block_files.store_blocks``.
    """
    folder = _folder(dest_path)
    try:
        store_blocks([dest_path], buffer, [offset], block_size, folder not in _buffered)
    except OSError as error:
        if error.errno != errno.EINVAL or folder in _buffered:
            raise
        _buffered.add(folder)
        store_blocks([dest_path], buffer, [offset], block_size, False)


def load_block(source_path: str, view: memoryview, offset: int, block_size: int) -> None:
    """Read one block; replaces vLLM's function of that name.

    Raises:
        OSError, ValueError: as ``block_files.load_blocks``.
    """
    folder = _folder(source_path)
    try:
        load_blocks([source_path], view, [offset], block_size, folder not in _buffered)
    except OSError as error:
        # Not retried, because the disk may hang again: this block is a miss, its file is kept.
        if error.errno == errno.EINVAL:
            _buffered.add(folder)
        raise


def _folder(path: str) -> str:
    return path.rsplit("/", 3)[0]


def replace_store(original: Any) -> Any:
    """Return ``store_block`` for vLLM's own function."""
    return store_block


def replace_load(original: Any) -> Any:
    """Return ``load_block`` for vLLM's own function."""
    return load_block
