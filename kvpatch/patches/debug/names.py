"""What was stored under each block's hash: for ``kvpatch verify``, which alone imports this.

A load is compared with that too, so that a chunk which is looked up for another block shows. The
scheduler's manager is asked for the names, and a step's metadata takes them to the workers. From
vLLM 0.25 on; before, and in SimpleCPUOffloadConnector, chunks have no names.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from kvpatch import state
from kvpatch.patches.debug.audit import checksum
from kvpatch.patches.debug.checksums import AuditedWorker
from kvpatch.upstream.vllm_api import Place, places


@dataclass
class Names:
    """By chunk, the keys that one step's transfers name: the hash of its blocks, and its group."""

    stores: dict[int, bytes] = field(default_factory=dict)
    loads: dict[int, bytes] = field(default_factory=dict)


def follow(manager: Any) -> None:
    """Note what an ``OffloadingManager`` takes in and gives out, from now on."""
    if state.find(manager, Names) is not None:
        return
    names = state.attach(manager, Names())
    prepare_store, prepare_load = manager.prepare_store, manager.prepare_load

    def store(*args: Any, **kwargs: Any) -> Any:
        output = prepare_store(*args, **kwargs)
        if output is not None and output.keys_to_store:
            chunks = map(int, output.store_spec.block_ids)
            names.stores.update(zip(chunks, output.keys_to_store, strict=True))
        return output

    def load(keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = list(keys)
        spec = prepare_load(keys, *args, **kwargs)
        names.loads.update(zip(map(int, spec.block_ids), keys, strict=True))
        return spec

    manager.prepare_store, manager.prepare_load = store, load


def take(manager: Any, meta: Any) -> None:
    """Let a step's metadata take the names of its transfers to the workers."""
    names = state.of(manager, Names)
    state.attach(meta, Names(dict(names.stores), dict(names.loads)))
    names.stores.clear()
    names.loads.clear()


class NamedWorker(AuditedWorker):
    """An ``OffloadingWorker`` whose loads are compared with what was stored under their hashes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checked["named"] = 0
        self._names = Names()
        # By key and the place in its chunk. Computed twice, a block may have been rounded
        # differently, so that a key may have several.
        self._sums: dict[tuple[bytes, int, int], set[int]] = defaultdict(set)
        self._wanted: dict[int, list[tuple[int, Place, bytes]]] = {}

    def read_names(self, metadata: Any) -> None:
        """Read the names of a step's transfers."""
        self._names = state.find(metadata, Names) or Names()

    def hand_off(self, job_id: int, device: Any, tier: Any) -> None:
        """Take the checksums of a store, under the names of its chunks."""
        super().hand_off(job_id, device, tier)
        for place, one in self._handed.get(job_id, {}).items():
            if key := self._names.stores.get(place.chunk):
                self._sums[key, place.group, place.inside].add(one)

    def expect_load(self, job_id: int, device: Any, tier: Any) -> None:
        """Remember under which names the blocks of a load were looked up."""
        super().expect_load(job_id, device, tier)
        keys = self._names.loads
        self._wanted[job_id] = [
            (block, place, keys[place.chunk])
            for block, place in places(device, tier, self._chunk)
            if place.chunk in keys
        ]

    def end_load(self, job_id: int) -> None:
        """Verify what a load has brought, also under its names, or raise Violation."""
        super().end_load(job_id)
        for block, place, key in self._wanted.pop(job_id, ()):
            sums = self._sums.get((key, place.group, place.inside))
            if sums is None:
                continue  # another engine's, or another rank's
            if checksum(self._groups[place.group], block) not in sums:
                what = "a load brought other bytes than were stored under its hash"
                raise self.violation(what, block, job_id, self.request_of(job_id))
            self.count("named")
