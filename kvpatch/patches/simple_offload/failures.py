"""Copies of SimpleCPUOffloadConnector that fail, which vLLM does not expect.

Its copy thread ends without a word at the first error: nothing is copied from then on, loads
never end, and the engine stands still. Here the thread goes on with the next copy, and puts the
failure in the place of the event that the worker asks for:

- A store: the worker reports it as failed, the scheduler lets its blocks go, and the CPU tier
  does not offer them.
- A load: its blocks are reported to vLLM as invalid, which fails the requests or computes the
  blocks again, by ``kv_load_failure_policy``. vLLM can do so for one KV cache group.

The engine ends with one sentence when that is no way out: a load into one of several groups, a
device that cannot copy any more (CUDA's errors stay), and ``TOLERATED`` failures in a row, after
which requests could be loaded, or wait to be stored, for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpatch import state
from kvpatch.logs import log
from kvpatch.patch import argument
from kvpatch.patches.offloading.failures import ended, named, says_itself

# Failed copies in one direction, without one between them that succeeded.
TOLERATED = 3


class CopyFailed(Exception):
    """Raised to the worker that asks for the event of a failed copy."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(named(failure.error))
        self.failure = failure


@dataclass
class Failure:
    """A failed copy, in the place of its event."""

    error: BaseException  # what the copy raised
    event: int  # its number
    is_store: bool
    blocks: list[int]  # the blocks of its destination
    in_a_row: int  # how many copies of its direction have failed since one succeeded
    lost: bool  # the stream cannot be waited for either, so that no copy will succeed
    noted: bool = False  # the worker has taken note of it

    def query(self) -> bool:
        """Return True: nothing of the copy is under way; CopyFailed until it was noted."""
        if not self.noted:
            raise CopyFailed(self)
        return True

    def synchronize(self) -> None:
        """Return at once; raises as ``query``."""
        self.query()


class Taken:
    """The queue of a copy thread, and the copy that the thread took last."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.last: Any = None  # that copy, None before the first one and after one that failed
        # Failures since a copy succeeded, by whether they were stores.
        self.in_a_row = {True: 0, False: 0}

    def get(self) -> Any:
        """Wait for the next copy; the one before it was launched."""
        if self.last is not None:
            self.in_a_row[self.last[3]] = 0
        self.last = self._queue.get()
        return self.last

    def failed(self) -> Any:
        """Return the copy that failed: the last one, or the next if the thread had none yet."""
        copy, self.last = self.last, None
        if copy is None:
            copy = self._queue.get()
        if copy is not None:
            self.in_a_row[copy[3]] += 1
        return copy


def around_copy_loop(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Go on after a copy that failed, and tell the worker.

    A copy in the queue is a tuple: source, destination, parameters, whether it is a store, the
    number of its event, the worker's list of events, and more from 0.24 on.
    """
    queue, device, load_stream, store_stream = _loop_arguments(*args, **kwargs)
    taken = Taken(queue)
    while True:
        try:
            wrapped(taken, device, load_stream, store_stream)
            return
        except Exception as error:
            copy = taken.failed()
            if copy is None:
                return
            _, blocks, _, is_store, event, events, *_ = copy
            failures = taken.in_a_row[is_store]
            lost = not _is_idle(store_stream if is_store else load_stream)
            events.append((event, Failure(error, event, is_store, blocks, failures, lost)))


def _loop_arguments(q: Any, device: Any, load_stream: Any, store_stream: Any) -> tuple[Any, ...]:
    return q, device, load_stream, store_stream


def _is_idle(stream: Any) -> bool:
    """Wait for what was launched of a copy: its blocks may be given away afterwards."""
    try:
        stream.synchronize()
    except Exception:
        return False
    return True


class Failures:
    """Failed copies that are not reported yet; kept on the ``SimpleCPUOffloadWorker``."""

    def __init__(self) -> None:
        self.stores: set[int] = set()  # numbers of events
        self.loads: set[int] = set()  # blocks of the device that were not loaded


def around_events(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Take note of failed copies among those whose events are asked for, or raise Halted.

    vLLM's methods can be called again after an error.
    """
    while True:
        try:
            return wrapped(*args, **kwargs)
        except CopyFailed as failed:
            _take_note(instance, failed.failure)
        except Exception as error:
            if says_itself(error):
                raise
            raise ended(f"a copy failed on the device with {named(error)}") from error


def _take_note(worker: Any, failure: Failure) -> None:
    failure.noted = True
    what = "store" if failure.is_store else "load"
    failed = f"a {what} of {len(failure.blocks)} blocks failed with {named(failure.error)}"
    if failure.lost:
        raise ended(f"{failed} and its stream cannot be used any more") from failure.error
    if failure.in_a_row > TOLERATED:
        raise ended(f"{failed} and so did the {TOLERATED} before it") from failure.error
    ours = state.of(worker, Failures)
    if failure.is_store:
        ours.stores.add(failure.event)
        log.warning("%s; the CPU tier does not offer them", failed)
        return
    if len(worker.kv_cache_config.kv_cache_groups) > 1:
        raise ended(
            f"{failed} and vLLM cannot compute blocks of several KV cache groups again"
        ) from failure.error
    ours.loads.update(failure.blocks)
    log.warning("%s; vLLM goes on by kv_load_failure_policy", failed)


def around_report(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Report failed stores, by numbers that no event has: vLLM adds up all ranks' by number."""
    meta = wrapped(*args, **kwargs)
    failures = state.find(instance, Failures)
    if meta is not None and failures is not None:
        events = meta.completed_store_events
        for event in failures.stores & events.keys():
            events[~event] = events.pop(event)
            failures.stores.discard(event)
    return meta


def around_load_errors(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> set[int]:
    """Report the blocks of failed loads, which vLLM asks for after ``get_finished`` in a step."""
    blocks: set[int] = wrapped(*args, **kwargs)
    failures = state.find(instance.worker_handler, Failures)
    if failures is None:
        return blocks
    blocks = blocks | failures.loads
    failures.loads = set()
    return blocks


class NotStored:
    """Kept on the ``SimpleCPUOffloadScheduler``."""

    def __init__(self) -> None:
        # For each store that failed on a rank and is not complete on all, the list of its blocks of
        # the CPU tier.
        self.rows: list[list[int]] = []


def around_output(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Hear of failed stores, which have ended like others."""
    output = argument(args, kwargs, 0, "connector_output")
    # Another connector's in a MultiConnector is left alone.
    events = getattr(output.kv_connector_worker_meta, "completed_store_events", {})
    for reported in [number for number in events if number < 0]:
        event = ~reported
        events[event] = events.get(event, 0) + events.pop(reported)
        # None if the connector was reset since: its blocks are not offered in any case.
        transfer = instance._store_event_to_blocks.get(event)
        if transfer is not None:
            state.of(instance, NotStored).rows.append(transfer.cpu_block_ids)
    return wrapped(*args, **kwargs)


def around_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Let the blocks of a failed store go, without offering them: these are to be stored again."""
    rows = argument(args, kwargs, 1, "cpu_block_ids")
    lost = state.find(instance, NotStored)
    if lost is None or not any(rows is one for one in lost.rows):
        wrapped(*args, **kwargs)
        return
    lost.rows = [one for one in lost.rows if one is not rows]
    tier, device = instance.cpu_block_pool, instance._gpu_block_pool
    blocks = [tier.blocks[row] for row in rows]
    for block in blocks:
        block.reset_hash()  # up to 0.29 it has one since it was chosen for the store
    tier.free_blocks(blocks)
    stored = argument(args, kwargs, 0, "gpu_block_ids")
    device.free_blocks([device.blocks[block] for block in stored])
