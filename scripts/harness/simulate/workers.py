"""A rank: its memory, the steps it was given, and the copies that it runs.

The connector's worker side is vLLM's. It submits copies here, as it would to streams of a GPU,
and each copy takes as long as the world decides: it touches memory at its end, when a page that
was unmapped too early is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from harness.simulate.story import BLOCK, KV, TOKENS
from kvpatch.upstream.vllm_api import places

if TYPE_CHECKING:
    from harness.simulate.world import World

SCRATCH = b"\xee" * BLOCK  # an unmapped page
BLANK = b"\xbb" * BLOCK  # a page that was mapped, and not written


@dataclass(eq=False)
class Copy:
    """One transfer of blocks on one rank.

    Attributes:
        job: the connector's number of it.
        pairs: device block and chunk of the CPU tier.
        load: from the tier to the device.
        ended: it has touched all of its memory.
        lost: its end was not seen, and will be when it is looked for again.
    """

    job: int
    pairs: list[tuple[int, int]]
    load: bool
    ended: bool = False
    lost: bool = False

    @property
    def seen(self) -> bool:
        """Whether the worker learns that it has ended."""
        return self.ended and not self.lost


class Worker:
    """One rank of the engine.

    Attributes:
        memory: the bytes of every block.
        queue: steps it has not run, oldest first.
        speed: the chance that a copy ends during a step.
        loses: the chance that the end of a copy is not seen.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.memory: dict[int, bytes] = {}
        self.queue: list[tuple[int, Any]] = []
        self.outputs: dict[int, ModelRunnerOutput] = {}
        self.tables: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.copies: list[Copy] = []
        self.speed, self.loses = 0.4, 0.0
        self.connector: Any = None

    def connect(self, config: Any, kv_cache_config: Any) -> None:
        """Make the worker side of the connector, with copies of this world."""
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        offloading = getattr(self.connector, "connector_worker", None)
        if offloading is not None:
            offloading.worker = Streams(self)
        else:
            self.connector.worker_handler._backend = Backend(self)

    def execute(self) -> None:
        """Run the oldest step."""
        number, step = self.queue.pop(0)
        connector = self.connector
        meta = step.kv_connector_metadata
        connector.handle_preemptions(meta)
        connector.bind_connector_metadata(meta)
        if step.has_sync_kv_loads:
            connector.start_load_kv(None)
        sampled = self._compute(step)
        if not step.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        self.end_some()
        found = connector.get_transfer_results(step.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=found.finished_sending,
            finished_recving=found.finished_recving,
            failed_recving=found.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        names = list(sampled)
        self.outputs[number] = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=output,
        )

    def execute_through(self, number: int) -> None:
        """Run all steps up to one."""
        while self.queue and self.queue[0][0] <= number:
            self.execute()

    def _compute(self, step: Any) -> dict[str, list[int]]:
        for name in step.finished_req_ids:
            self.tables.pop(name, None)
        at: dict[str, tuple[int, int]] = {}  # computed and known tokens
        for new in step.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.prompts[new.req_id] = len(new.prompt_token_ids)
            at[new.req_id] = new.num_computed_tokens, len(new.prompt_token_ids)
        cached = step.scheduled_cached_reqs
        for name, blocks, computed, generated in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            if name in cached.resumed_req_ids:
                self.tables[name] = []
            if blocks is not None:
                self.tables[name] = [*self.tables.get(name, ()), *blocks[0]]
            at[name] = computed, self.prompts[name] + generated
        sampled: dict[str, list[int]] = {}
        for name, count in step.num_scheduled_tokens.items():
            computed, known = at[name]
            self._attend(name, computed, count)
            story = self.world.stories[name]
            end = computed + count
            sampled[name] = [story.tokens[end]] if end >= known else []
        return sampled

    def _attend(self, name: str, computed: int, count: int) -> None:
        """Read the KV of a request's computed tokens, and write that of the next ones."""
        story, table = self.world.stories[name], self.tables[name]
        for index in range(-(-(computed + count) // TOKENS)):
            block = table[index]
            self.world.touch(block, f"computing {name}")
            begin = index * TOKENS
            valid = max(0, min(computed, begin + TOKENS) - begin) * KV
            held = self.memory[block]
            want = story.block(index)
            if held[:valid] != want[:valid]:
                self.world.violate(
                    "bytes", f"{name} reads {self.world.tell(held)} as its block {index} ({block})"
                )
            upto = min(computed + count, begin + TOKENS) - begin
            self.memory[block] = want[: upto * KV] + held[upto * KV :]

    def submit(self, job: int, pairs: list[tuple[int, int]], load: bool) -> Copy:
        """Start a copy."""
        copy = Copy(job, pairs, load)
        self.copies.append(copy)
        self.world.counts["copies"] += 1
        return copy

    def end(self, copy: Copy) -> None:
        """Let a copy touch its memory."""
        tier, rank = self.world.tier, self.rank
        for block, chunk in copy.pairs:
            self.world.touch(block, f"the {'load' if copy.load else 'store'} {copy.job}")
            if copy.load:
                if self.world.is_mapped(block):
                    self.memory[block] = tier.read(chunk, rank)
            else:
                tier.write(chunk, rank, self.memory[block])
        copy.ended = True
        copy.lost = self.world.random.random() < self.loses
        if copy.lost:
            self.world.counts["reports lost"] += 1

    def end_some(self, least: int = 0) -> None:
        """Let some of the copies in flight end, in any order."""
        for copy in self.copies:  # looked for in every step, and found at some time
            copy.lost = copy.lost and self.world.random.random() < 0.97
        flying = [copy for copy in self.copies if not copy.ended]
        self.world.random.shuffle(flying)
        for position, copy in enumerate(flying):
            if position < least or self.world.random.random() < self.speed:
                self.end(copy)

    def look_again(self) -> None:
        """See the ends that were not seen."""
        for copy in self.copies:
            copy.lost = False

    def take_seen(self) -> list[Copy]:
        """Return the copies seen to end since the last call, in any order."""
        seen = [copy for copy in self.copies if copy.seen]
        self.copies = [copy for copy in self.copies if not copy.seen]
        self.world.random.shuffle(seen)
        return seen


class Streams:
    """The copies of OffloadingConnector: what its specs give to a worker (``OffloadingWorker``)."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start a copy from the device to the CPU tier."""
        self.worker.submit(job_id, self._pairs(src_spec, dst_spec), load=False)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start a copy from the CPU tier to the device."""
        self.worker.submit(job_id, self._pairs(dst_spec, src_spec), load=True)
        return True

    def _pairs(self, device: Any, tier: Any) -> list[tuple[int, int]]:
        return [(block, place.chunk) for block, place in places(device, tier, 1)]

    def get_finished(self) -> list[TransferResult]:
        """Return the copies seen to end since the last call."""
        return [TransferResult(copy.job, True) for copy in self.worker.take_seen()]

    def wait(self, job_ids: set[int]) -> None:
        """Let these copies end."""
        for copy in self.worker.copies:
            if copy.job in job_ids and not copy.ended:
                self.worker.end(copy)

    def shutdown(self) -> None:
        """Do nothing: the world ends with its copies."""


class Backend:
    """The copies of SimpleCPUOffloadConnector (``DmaCopyBackend``)."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Start a copy, with an event for its end."""
        device, tier = (src_blocks, dst_blocks) if is_store else (dst_blocks, src_blocks)
        pairs = list(zip(device, tier, strict=True))
        copy = self.worker.submit(event_idx, pairs, load=not is_store)
        events_list.append((event_idx, Event(self.worker, copy)))

    def shutdown(self) -> None:
        """Do nothing: the world ends with its copies."""


@dataclass
class Event:
    """The end of a copy, as ``torch.Event``."""

    worker: Worker
    copy: Copy

    def query(self) -> bool:
        """Return whether the copy is seen to have ended."""
        if self.copy.seen and self.copy in self.worker.copies:
            self.worker.copies.remove(self.copy)
        return self.copy.seen

    def synchronize(self) -> None:
        """Let the copy end."""
        if not self.copy.ended:
            self.worker.end(self.copy)
        self.copy.lost = False
        self.query()


# What stands for ``torch`` in the simple connector's worker: a step has computed when its copies
# are launched, and no event has to be recorded for that.
NO_STREAMS = SimpleNamespace(
    Event=lambda: SimpleNamespace(record=lambda stream: None),
    cuda=SimpleNamespace(current_stream=lambda: None),
)
