"""SimpleCPUOffloadConnector in debug mode: stored blocks are checksummed, loads verified.

Its worker hands copies to a backend and polls their events. A block, to which the connector keeps a
reference, has one checksum: taken when its store is launched, and compared when a load has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch.patches.debug.audit import Audited, checksum
from kvpatch.patches.simple_offload.failures import Failure


class AuditedCopies(Audited):
    """The copy backend of a ``SimpleCPUOffloadWorker``, whose copies are verified."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker._backend)
        self._worker = worker
        self._regions = [(rows, rows.shape[1]) for rows in worker.gpu_kv_caches.values()]
        self._stored: dict[int, int] = {}  # by CPU block

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: Any,
        **more: Any,
    ) -> None:
        """Launch a copy; take checksums of what is stored, and verify loads when they end."""
        if is_store:
            for block, cpu_block in zip(src_blocks, dst_blocks, strict=True):
                self._stored[cpu_block] = checksum(self._regions, block)
                self.count("stored")
        else:
            expected = [
                (block, self._stored.get(cpu_block))
                for cpu_block, block in zip(src_blocks, dst_blocks, strict=True)
            ]
            metadata = self._worker._connector_metadata
            request = ", ".join(metadata.load_event_to_reqs.get(event_idx) or ("unknown",))

            def verify() -> None:
                for block, stored in expected:
                    self.check_loaded(self._regions, block, stored, event_idx, request)
                expected.clear()

            events_list = VerifyingEvents(events_list, verify)
        self._audited.launch_copy(
            src_blocks,
            dst_blocks,
            is_store=is_store,
            event_idx=event_idx,
            events_list=events_list,
            **more,
        )


class VerifyingEvents:
    """The worker's list of events, for the backend to append a load's event to."""

    def __init__(self, events: list[tuple[int, Any]], verify: Callable[[], None]) -> None:
        self._events = events
        self._verify = verify

    def append(self, entry: tuple[int, Any]) -> None:
        """Append ``(event_idx, event)``; who polls or waits for the event verifies the load."""
        index, event = entry
        self._events.append((index, VerifyingEvent(event, self._verify)))


class VerifyingEvent:
    """The end of a load: its blocks are verified before anybody is told of it."""

    def __init__(self, event: Any, verify: Callable[[], None]) -> None:
        self._event = event
        self._failed = isinstance(event, Failure)  # vLLM is told, and nobody uses what is there
        self._verify_load = verify

    def _verify(self) -> None:
        if not self._failed:
            self._verify_load()

    def query(self) -> bool:
        """Whether the load has ended."""
        ended = bool(self._event.query())
        if ended:
            self._verify()
        return ended

    def synchronize(self) -> None:
        """Wait for the load."""
        self._event.synchronize()
        self._verify()


def around_register(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Put the audit around the worker's copy backend, outside of what registers the regions."""
    wrapped(*args, **kwargs)
    if instance.gpu_kv_caches:
        instance._backend = AuditedCopies(instance)
