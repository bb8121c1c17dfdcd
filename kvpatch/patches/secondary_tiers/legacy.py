"""Secondary tiers before vLLM 0.28, in the terms of later releases."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

from kvpatch.patch import argument
from kvpatch.patches.secondary_tiers.block_files import load_blocks, store_blocks


def split_promotions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Promote each block in a job of its own: vLLM discards all of one with a damaged file."""
    for tier, waiting in instance._pending_load_submissions.items():
        instance._pending_load_submissions[tier] = {
            (request, key): replace(entry, keys=[key], block_ids=[block])
            for request, entry in waiting.items()
            for key, block in zip(entry.keys, entry.block_ids, strict=True)
        }
    wrapped(*args, **kwargs)


def around_prepare_store(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Store the last blocks of a request that has finished, whose state vLLM has dropped."""
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
    """Write one block, as vLLM's function of that name; raises as ``store_blocks``."""
    folder = _folder(dest_path)
    try:
        store_blocks([dest_path], buffer, [offset], block_size, folder not in _buffered)
    except OSError as error:
        if error.errno != errno.EINVAL or folder in _buffered:
            raise
        _buffered.add(folder)
        store_blocks([dest_path], buffer, [offset], block_size, False)


def load_block(source_path: str, view: memoryview, offset: int, block_size: int) -> None:
    """Read one block, as vLLM's function of that name; raises as ``load_blocks``."""
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
