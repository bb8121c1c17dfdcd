"""What the audits of both connectors share: checksums, violations, and what was checked."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvpatch.environ import DEBUG, VERIFY
from kvpatch.upstream import connectors

# A tensor with a row for each block, and how many bytes of a row are copied.
Region = tuple[Any, int]


class Violation(RuntimeError):
    """Stops an engine in debug mode: something touched memory that it must not touch."""

    def __init__(
        self, what: str, block: int, page: int | str, job: int | str, request: str
    ) -> None:
        super().__init__(
            f"kvpatch {DEBUG}: {what}: block {block} of page {page}, job {job}, request {request}"
        )


def wanted() -> bool:
    """Whether the operator asked for it."""
    return DEBUG.is_on()


def checksum(regions: Iterable[Region], block: int) -> int:
    """Return the checksum of a block over its regions; waits for the compute stream."""
    total = 0
    for rows, size in regions:
        total = zlib.crc32(rows[block][:size].cpu().numpy(), total)
    return total


class Audited:
    """An object of vLLM that copies blocks; what the audit does not define is its own."""

    def __init__(self, audited: Any) -> None:
        self._audited = audited
        self.blocks_per_page = 0
        self.checked = {"stored": 0, "loaded": 0, "unverified": 0}
        self._journal = None
        if VERIFY.read():
            from kvpatch.patches.debug.journal import Journal

            self._journal = Journal(Path(VERIFY.read()))
            self._journal.write(self.checked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._audited, name)

    def count(self, what: str) -> None:
        """Count one block that was verified, or that cannot be."""
        self.checked[what] += 1
        if self._journal is not None:
            self._journal.write(self.checked)

    def violation(self, what: str, block: int, job: int, request: str) -> Violation:
        """Return what stops the engine."""
        page = block // self.blocks_per_page if self.blocks_per_page else "unknown"
        return Violation(what, block, page, job, request)

    def check_loaded(
        self, regions: Iterable[Region], block: int, stored: int | None, job: int, request: str
    ) -> None:
        """Check that a load which has ended brought what was stored, or raise Violation."""
        if checksum(regions, block) != stored:
            raise self.violation("a load brought other bytes than were stored", block, job, request)
        self.count("loaded")


def audits() -> Iterator[Audited]:
    """Iterate over the audits in this worker's process, MultiConnector's too."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for part in connectors.parts(get_kv_transfer_group()):
        for holder, attribute in (("connector_worker", "worker"), ("worker_handler", "_backend")):
            audited = getattr(getattr(part, holder, None), attribute, None)
            if isinstance(audited, Audited):
                yield audited


def tell_page_size(worker: Any, blocks_per_page: int) -> None:
    """Let a worker name pages too; runs in the worker by RPC."""
    for audited in audits():
        audited.blocks_per_page = blocks_per_page


def checked(worker: Any) -> dict[str, int]:
    """Return what was checked in a worker so far; runs in the worker by RPC."""
    total: Counter[str] = Counter()
    for audited in audits():
        total.update(audited.checked)
    return dict(total)
