"""An engine of one seed, and what must always hold in it."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from kvcached import kv_cache_manager, tp_ipc_util
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import core as core_module
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload import worker as simple_worker

from harness import connectors
from harness.engines.inside import after, referenced
from harness.engines.scheduling import allow_async_scheduling
from harness.simulate import disks, pools
from harness.simulate.invariants import Violation
from harness.simulate.story import BLOCK, TOKENS, Story, tell
from harness.simulate.workers import BLANK, NO_STREAMS, SCRATCH, Worker
from kvpatch.environ import HOST_POOL
from kvpatch.patch import argument
from kvpatch.patches.elastic_memory import capacity
from kvpatch.patches.fence.hooks import fence_of
from kvpatch.patches.secondary_tiers import shared_memory

BLOCK_BYTES = 4096  # of one rank; the tier's files are of whole pages
PER_PAGE = 4  # blocks
PAGE_BYTES = PER_PAGE * BLOCK_BYTES
LONGEST = 160  # tokens of a request
LARGEST = LONGEST // TOKENS  # blocks of a request
OUTPUT = 20  # tokens that are generated at most
PATIENCE = 10.0  # seconds that a disk may take
KINDS = ("offloading", "tiers", "eager", "lazy")
# With the tier in a host pool, in processes of their own: the first one as offloading.
POOLED = ("pooled", "pooled eager", "pooled lazy")


@dataclass(frozen=True)
class Mode:
    """How an engine runs.

    Attributes:
        kind: the connector and its tiers, one of ``KINDS`` or of ``POOLED``.
        asynchronous: one step is scheduled ahead of the one that runs.
        workers: ranks, each with a part of every block.
        pages: of the device.
        chunks: blocks of the CPU tier.
    """

    kind: str
    asynchronous: bool
    workers: int
    pages: int
    chunks: int

    @staticmethod
    def of(seed: int, kind: str | None = None) -> Mode:
        """Return the mode of a seed."""
        source = random.Random(f"mode {seed}")
        return Mode(
            kind or source.choice(KINDS),
            source.random() < 0.5,
            source.choice((1, 2)),
            source.choice((4, 4, 5, 6)),
            source.choice((4, 8, 12, 20)),
        )

    @property
    def pooled(self) -> bool:
        """Whether the CPU tier is in a host pool."""
        return self.kind in POOLED

    @property
    def connector(self) -> str:
        """The one of ``KINDS`` that it is but for the pool."""
        return self.kind.removeprefix("pooled").strip() or KINDS[0]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


class Tier:
    """The memory of the CPU tier: vLLM's own where it has one in this process."""

    def __init__(self, view: memoryview | None) -> None:
        self._view = None if view is None else view.cast("B")
        self._row = 0 if view is None else view.shape[1] if view.shape else 0
        self._blocks: dict[tuple[int, int], bytes] = {}

    def read(self, chunk: int, rank: int) -> bytes:
        """Return the bytes of a rank's part of a chunk."""
        if self._view is None:
            return self._blocks.get((chunk, rank), BLANK)
        begin = chunk * self._row + rank * BLOCK
        return bytes(self._view[begin : begin + BLOCK])

    def write(self, chunk: int, rank: int, data: bytes) -> None:
        """Set the bytes of a rank's part of a chunk."""
        if self._view is None:
            self._blocks[chunk, rank] = data
        else:
            begin = chunk * self._row + rank * BLOCK
            self._view[begin : begin + BLOCK] = data

    def forget(self, chunks: Iterable[int], rank: int) -> None:
        """Lose a rank's part of chunks, which were given back."""
        for chunk in chunks:
            self._blocks.pop((chunk, rank), None)

    def close(self) -> None:
        """Let go of the memory, which is unmapped with the engine."""
        if self._view is not None:
            self._view.release()


class Simulated(Executor):  # type: ignore[misc]
    """An executor whose workers are those of the current world."""

    supports_async_scheduling: ClassVar[Any] = classmethod(lambda cls: True)

    def _init_executor(self) -> None:
        self.world = World.current
        self.last: Any = None

    def check_health(self) -> None:
        """Do nothing."""

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        **more: Any,
    ) -> Any:
        """Answer what an engine asks its workers at its start, and the barrier."""
        world = self.world
        name = method if isinstance(method, str) else method.__name__
        if "barrier" in name:
            world.barrier()
            return [True] * world.mode.workers
        if name == "initialize_from_config":
            world.cache_configs = args[0]
            if world.host_pool is not None:
                world.host_pool.connect()
        if name == "compile_or_warm_up_model":
            return []
        answer = {
            "get_kv_cache_spec": {"model.layers.0.self_attn.attn": SPEC},
            "determine_available_memory": BLOCK_BYTES * PER_PAGE * world.mode.pages,
            "get_supported_kv_cache_layouts": ["BLHNC", "BLNHC"],
            "describe": {"rows": []},
        }.get(name)
        return [answer] * world.mode.workers

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Give a step to every worker."""
        self.last = self.world.submit(scheduler_output)
        return self.last if non_block else self.last.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the tokens of the step submitted last."""
        return self.last if non_block else self.last.result()


class StepResult(Future):  # type: ignore[type-arg]
    """The output of a step, which the workers run when it is asked for."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__()
        self._world, self._number = world, number
        self._output: Any = None

    def result(self, timeout: float | None = None) -> Any:
        """Run the step on every worker, unless it has run."""
        if self._output is None:
            self._output = self._world.run_through(self._number)
        return self._output


SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)


def install() -> None:
    """Put the simulated parts into the places of what needs a device or threads. Once."""
    # Its devices have less than one of kvcached's pages, and its requests fit into their blocks.
    capacity.require_one_request = lambda *given, **more: None
    # No worker has made the tier's memory before the scheduler maps it.
    vars(shared_memory)["argument"] = lambda args, kwargs, at, name: (
        0 if name == "rank" else argument(args, kwargs, at, name)
    )
    kv_cache_manager.PAGE_SIZE = PAGE_BYTES
    kv_cache_manager.broadcast_kv_tensors_created = lambda *args, **kwargs: True
    tp_ipc_util.broadcast_map_to_kv_tensors = lambda *args: World.current.map(args[1])
    tp_ipc_util.broadcast_unmap_from_kv_tensors = lambda *args: World.current.unmap(args[1])
    # Neither is of this world: the heap of many engines, and a group of real processes.
    core_module.freeze_gc_heap = lambda: None
    core_module.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
    simple_worker.torch = NO_STREAMS
    allow_async_scheduling()
    disks.install()
    if HOST_POOL.read():
        pools.install(lambda: World.current.clock)


class World:
    """An engine and everything around it, from one seed.

    Args:
        seed: what every choice follows.
        mode: how the engine runs.
        model: the folder of a model, of which only the configuration is used.
        folder: for the files of the disk.
    """

    current: ClassVar[Any] = None

    def __init__(self, seed: int, mode: Mode, model: str, folder: Path) -> None:
        World.current = self
        self.seed, self.mode = seed, mode
        self.random = random.Random(f"world {seed}")
        self.counts: Counter[str] = Counter()
        self.found: Violation | None = None
        self.mapped: set[int] = set()
        self.neighbour = 0
        self.clock, self.wall = 1000.0, 1e9
        self.exhausts = 0.0
        self.weights = 0
        self.stories: dict[str, Story] = {}
        self.requests: dict[str, Any] = {}
        self.texts: dict[str, tuple[int, ...]] = {}
        self.expected: dict[bytes, bytes] = {}
        self.given: dict[str, list[int]] = {}
        self.steps = 0
        self.cache_configs: list[Any] = []
        self.root = folder / f"disk-{seed}"
        shutil.rmtree(self.root, ignore_errors=True)
        self.workers = [Worker(self, rank) for rank in range(mode.workers)]
        self.aggregator: Any = None
        row = BLOCK_BYTES * mode.workers
        self.host_pool = pools.Pool(self, row) if mode.pooled else None
        self.engine = self._engine(model)
        self.scheduler = self.engine.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.manager = self.pool.kv_cache_manager
        self.limit = mode.pages
        self._take_over_memory()
        self.manager._wait_post_init()
        self.planner = getattr(self.scheduler.connector, "connector_scheduler", None)
        self.simple = getattr(self.scheduler.connector, "scheduler_manager", None)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, mode.workers)
        for worker, config in zip(self.workers, self.cache_configs, strict=True):
            worker.connect(self.config, config)
        tiers = list(getattr(self.offloaded, "secondary_tiers", ()))
        self.disk = disks.Disk(self, tiers, self.root)
        view = self.offloaded.primary_tier.get_kv_memoryview() if tiers else None
        self.tier = Tier(view)
        self.fence = fence_of(self.engine)
        self.retired_reports: list[int] = []
        self._watch_reports()
        if self.host_pool is not None:
            self.host_pool.begin()
        source = random.Random(f"prompts {seed}")
        self.pool.max_cached_blocks = source.choice((0, 3, 8, -1))
        self.prompts = list(self._prompts(source))

    def _engine(self, model: str) -> Any:
        mode = self.mode
        size = mode.chunks * BLOCK_BYTES * mode.workers
        disk = {"type": "fs", "root_dir": str(self.root)}
        connector = {
            "offloading": connectors.offloading(size, offload_prompt_only=False),
            "tiers": connectors.tiering(size, [disk], offload_prompt_only=False),
            "eager": connectors.simple(size, lazy=False),
            "lazy": connectors.simple(size, lazy=True),
        }[mode.connector]
        connector["engine_id"] = f"simulated-{os.getpid()}-{self.seed}"
        self.config = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=LONGEST,
            block_size=TOKENS,
            enforce_eager=True,
            max_num_seqs=5,
            max_num_batched_tokens=48,
            tensor_parallel_size=mode.workers,
            distributed_executor_backend="mp" if mode.workers > 1 else "uni",
            kv_transfer_config=connector,
            async_scheduling=mode.asynchronous,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            seed=0,
        ).create_engine_config()
        self.config.scheduler_config.async_scheduling = mode.asynchronous
        return EngineCore(self.config, Simulated, False)

    def _take_over_memory(self) -> None:
        manager, alloc = self.manager, self.manager.alloc
        manager._get_cached_avail_physical_pages = self._free_pages

        def exhausted(need_size: int) -> Any:
            if need_size and self.random.random() < self.exhausts:
                self.counts["exhaustions"] += 1
                return None
            return alloc(need_size)

        manager.alloc = exhausted

    def _watch_reports(self) -> None:
        if (fence := self.fence) is None:
            return

        def remember(result: Any, job_id: int, workers: int) -> None:
            if job_id not in fence.transfers:
                self.retired_reports.append(job_id)

        after(fence, "report", remember)

    @property
    def offloaded(self) -> Any:
        """The manager of OffloadingConnector's tiers, or None."""
        return None if self.planner is None else self.planner.manager

    def _prompts(self, source: random.Random) -> Iterator[tuple[int, ...]]:
        made: list[tuple[int, ...]] = []
        for index in range(8):
            length = source.randrange(8, LONGEST - OUTPUT)
            head = source.choice(made)[: length // 2 + 8] if index % 2 else ()
            rest = (source.randrange(2, 252) for _ in range(length - len(head)))
            made.append((*head, *rest))
            yield made[-1]

    # Memory

    def _free_pages(self) -> int:
        return max(0, self.mode.pages - len(self.mapped) - self.neighbour)

    def map(self, offsets: list[int]) -> None:
        """Map pages, as the driver does in every worker."""
        self.mapped |= self._filled(offsets, BLANK)
        if len(self.mapped) + self.neighbour > self.mode.pages:
            self.violate("limit", f"{len(self.mapped)} pages on a device of {self.mode.pages}")
        above = hasattr(self, "manager") and len(self.mapped) > self.limit
        if above:
            self.violate("limit", f"mapped {len(self.mapped)} pages, the limit is {self.limit}")

    def unmap(self, offsets: list[int]) -> None:
        """Unmap pages, as the driver does in every worker."""
        self.mapped -= self._filled(offsets, SCRATCH)
        self.counts["pages unmapped"] += len(offsets)

    def _filled(self, offsets: list[int], content: bytes) -> set[int]:
        """Let the blocks of pages have a content in every worker; return the pages."""
        pages = {offset // PAGE_BYTES for offset in offsets}
        blocks = [page * PER_PAGE + index for page in pages for index in range(PER_PAGE)]
        for worker in self.workers:
            worker.memory.update(dict.fromkeys(blocks, content))
        return pages

    def is_mapped(self, block: int) -> bool:
        """Return whether a block's page is mapped."""
        return block // PER_PAGE in self.mapped

    def touch(self, block: int, who: str) -> None:
        """Note that somebody touches a block."""
        if not self.is_mapped(block):
            self.violate("mapped", f"{who} touches block {block}")

    def tell(self, data: bytes) -> str:
        """Say what bytes are of."""
        if data == SCRATCH:
            return "an unmapped page"
        if data == BLANK:
            return "a page that nobody wrote"
        known = next((key for key, kv in self.expected.items() if kv == data), None)
        return "bytes of no block" if known is None else f"the block of hash {known.hex()[:8]}"

    def violate(self, invariant: str, what: str) -> None:
        """Record that an invariant does not hold; the first is raised after the step."""
        if self.found is None:
            self.found = Violation(invariant, what)

    # Workers

    def submit(self, output: Any) -> StepResult:
        """Give a step to the workers."""
        self.steps += 1
        for worker in self.workers:
            step = copy(output)  # each process has its own, and vLLM's worker takes jobs out of it
            step.kv_connector_metadata = copy(output.kv_connector_metadata)
            jobs = getattr(step.kv_connector_metadata, "store_jobs", None)
            if jobs is not None:
                step.kv_connector_metadata.store_jobs = dict(jobs)
            worker.queue.append((self.steps, step))
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        return StepResult(self, self.steps)

    def run_through(self, number: int) -> Any:
        """Run a step on all workers and return their output as one."""
        for worker in self.workers:
            worker.execute_through(number)
        outputs = [worker.outputs.pop(number) for worker in self.workers]
        self.disk.work(self.random.choice((0, 1, 2)))
        return self.aggregator.aggregate(outputs, 0)

    def barrier(self) -> None:
        """Wait for the computation of all steps that were given to the workers."""
        for worker in self.workers:
            while worker.queue:
                worker.execute()

    # The engine

    def add(self, index: int, generated: int, half: bool = False) -> None:
        """Start a request with one of the prompts, or with its first half."""
        name = f"r{self.counts['requests']}"
        prompt = self.prompts[index % len(self.prompts)]
        prompt = prompt[: len(prompt) // 2] if half else prompt
        generated = 1 + generated % OUTPUT
        self.counts["requests"] += 1
        self.texts[name] = prompt
        self.stories[name] = tell(prompt, OUTPUT + 8, self.weights)
        self.given[name] = []
        request = Request(
            name,
            list(prompt),
            SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True),
            None,
            arrival_time=self.wall,
            block_hasher=self.engine.request_block_hasher,
        )
        self.requests[name] = request
        self.engine.add_request(request)

    def abort(self, index: int) -> None:
        """Abort a request."""
        names = sorted(self.requests)
        if names:
            name = names[index % len(names)]
            self.engine.abort_requests([name])
            del self.requests[name]
            self.counts["aborts"] += 1

    @property
    def has_work(self) -> bool:
        """Whether the engine's own loop would step it."""
        return bool(self.scheduler.has_requests() or self.engine.batch_queue)

    def step(self) -> None:
        """Step the engine if its own loop would, and check everything."""
        self.clock += 0.05
        self.wall += 0.05
        if self.host_pool is not None and self.random.random() < 0.5:
            self.host_pool.look()
        if not self.has_work:
            self.counts["idle"] += 1
            self.disk.work(1)
            return
        self.counts["steps"] += 1
        outputs, _ = self.engine.step_fn()
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                self._take(output)
        self.check()

    def _take(self, output: Any) -> None:
        name = output.request_id
        if name not in self.requests:
            return
        self.given[name] += output.new_token_ids
        if output.finish_reason is None:
            return
        request = self.requests.pop(name)
        self.counts["finished"] += 1
        story, length = self.stories[name], len(self.texts[name])
        want = story.tokens[length : length + request.max_tokens]
        if str(output.finish_reason) != "length" or self.given[name] != want:
            self.violate("tokens", f"{name} ended by {output.finish_reason} with wrong tokens")

    def check(self) -> None:
        """Check what must hold after every step.

        Raises:
            Violation: something does not.
        """
        for name, request in self.requests.items():
            story = self.stories[name]
            for index, key in enumerate(request.block_hashes):
                if key not in self.expected:
                    self.expected[bytes(key)] = story.block(index)
        for key, chunk in self._ready_chunks():
            want = self.expected.get(key[:-4])
            for rank in range(self.mode.workers):
                held = self.tier.read(chunk, rank)
                if want is not None and held != want:
                    self.violate("tier", f"chunk {chunk} of rank {rank} has {self.tell(held)}")
        if not self.manager.in_shrink and len(self.mapped) > self.limit:
            self.violate("limit", f"{len(self.mapped)} pages are mapped, {self.limit} allowed")
        if self.found is not None:
            raise self.found

    def _ready_chunks(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over the blocks that a load could read from the CPU tier now."""
        if self.simple is not None:
            for key, found in self.simple.cpu_block_pool.cached_block_hash_to_block._cache.items():
                blocks = found.values() if isinstance(found, dict) else (found,)
                for block in blocks:
                    yield bytes(key), block.block_id
            return
        tier = getattr(self.offloaded, "primary_tier", self.offloaded)
        for known in self.expected:
            key = known + bytes(4)
            chunk = tier._policy.get(key)
            if chunk is not None and chunk.is_ready:
                yield key, chunk.chunk_id

    # Operators and neighbours

    def set_limit(self, pages: int) -> None:
        """Move the limit on this engine's pages."""
        self.limit = max(3, min(self.mode.pages, pages))
        self.counts["limit moves"] += 1
        self.manager.resize(self.limit * PAGE_BYTES)
        self.manager.trim()

    def set_neighbour(self, pages: int) -> None:
        """Let another engine take free pages of the device, or give some back."""
        spare = self.mode.pages - len(self.mapped)
        self.neighbour = max(0, min(pages, spare))
        self.counts["neighbour moves"] += 1

    def reset(self, running: bool, connector: bool) -> None:
        """Reset the prefix cache; with new weights where vLLM promises that this is safe."""
        if running and any(
            request.status.name == "WAITING_FOR_REMOTE_KVS" for request in self.requests.values()
        ):
            running = False  # vLLM refuses this with an error
        self.counts["resets"] += 1
        try:
            done = self.engine.reset_prefix_cache(running, connector)
        except RuntimeError as refused:
            # While a copy or a loaded request holds references; the caller tries again.
            if "Failed to reset KV cache" not in str(refused):
                raise
            self.counts["resets refused"] += 1
            return
        idle = not self.requests and not self.engine.batch_queue
        if done and idle and connector and self.mode.kind != "tiers" and not self._loads:
            self.weights += 1
            self.expected.clear()
            self.counts["new weights"] += 1

    @property
    def _loads(self) -> bool:
        return any(copy.load for worker in self.workers for copy in worker.copies)

    def repeat_reports(self) -> None:
        """Report ended transfers once more: the fence must not change."""
        fence = self.fence
        if fence is None or not self.retired_reports:
            return
        before = (dict(fence.transfers), dict(fence._named), dict(fence._reports))
        for job in self.random.sample(self.retired_reports, min(3, len(self.retired_reports))):
            type(fence).report(fence, job, self.mode.workers)
            self.counts["reports repeated"] += 1
        if before != (dict(fence.transfers), dict(fence._named), dict(fence._reports)):
            self.violate("once", "the fence counts a transfer that has ended")

    def fail_plan(self) -> None:
        """Apply rows of which the last cannot be applied: none may stay."""
        from kvpatch.patch import Transaction, load
        from kvpatch.patches import deadlock, fence

        rows = [deadlock.FEATURE.patches[0], *(fence.FEATURE.patches[-3:-1])]
        missing = "vllm.v1.request:Request.no_such_method"
        broken = rows[0]._replace(id="simulated", target=missing)
        before = [load(row.target) for row in rows]
        plan = Transaction()
        self.counts["plans rolled back"] += 1
        with suppress(AttributeError):
            plan.apply_all([*rows, broken])
        if [load(row.target) for row in rows] != before or plan.applied:
            self.violate("rollback", "a failed plan left patches in force")
            while plan.applied:  # for the worlds after this one
                plan.applied.pop().revert()

    # The end

    def calm_down(self, memory: bool) -> None:
        """End all faults; with ``memory`` limit, device and disk are whole again too."""
        for worker in self.workers:
            worker.speed, worker.loses = 0.9, 0.0
            worker.look_again()
        self.exhausts = 0.0
        disks.FAULTY.fault = None
        if memory and self.host_pool is not None:
            self.host_pool.set_limit(100)
        if memory:
            self.disk.hangs = False
            self.neighbour = 0
            self.set_limit(self.mode.pages)

    def finish(self) -> None:
        """Let everything end, first with the memory that there is, and check what is left.

        Raises:
            Violation: something does not end, or something is left.
        """
        # No request needs more; the rest of the device may stay somebody else's.
        enough = -(-(LARGEST + 1) // PER_PAGE)  # and the null block
        if self.limit < enough:
            self.set_limit(enough)
        self.neighbour = max(0, min(self.neighbour, self.mode.pages - enough))
        self.calm_down(memory=False)
        self._run("with the memory that is free", 6000)
        self.calm_down(memory=True)
        self._run("with all memory", 6000)
        if self.random.random() < 0.5:  # copies are in flight, and vLLM forgets them
            self.reset(False, True)
        self._drain(400)
        if self.found is not None:
            raise self.found
        if self.manager._retired_pages:
            raise Violation("fence", f"an idle engine holds {self.manager._retired_pages}")
        cached, cap = len(self.pool._evictable_blocks), self.pool.max_cached_blocks
        if self.mode.connector == "lazy" and 0 <= cap < cached:
            raise Violation("leaks", f"an idle engine caches {cached} blocks above its cap {cap}")
        before = len(self.mapped)
        self.pool.max_cached_blocks = 0
        self.engine.reset_prefix_cache(False, True)
        self._drain(400)
        self.manager.trim()
        left = {name: count for name, count in self.left().items() if count}
        if left:
            raise Violation("leaks", f"{left}, of {before} pages mapped before the reset")

    def _run(self, when: str, limit: int) -> None:
        for _ in range(limit):
            if not self.requests:
                return
            if not self.has_work:
                break
            self.disk.work(4)
            self.step()
        if self.requests:
            reasons = {name: self.reason(request) for name, request in self.requests.items()}
            raise Violation("ends", f"{when} nothing ends these: {reasons}")

    def _drain(self, limit: int) -> None:
        """Step for as long as the engine asks for it; it must become idle."""
        for _ in range(limit):
            if not self.has_work and not self.disk.pending:
                return
            self.disk.work(4)
            self.step()
        if self.has_work:
            raise Violation("fence", f"the engine does not become idle: {self.left()}")

    def reason(self, request: Any) -> str:
        """Name what a request waits for."""
        status = request.status.name
        if status == "RUNNING":
            return "runs"
        if status == "WAITING_FOR_REMOTE_KVS":
            return f"its load, which {'runs' if self._loads else 'nothing runs'}"
        if self.disk.pending:
            return "the disk"
        return f"memory: {self.manager.available_size()} blocks free, status {status}"

    def left(self) -> dict[str, int]:
        """Return what must be 0 once all is finished and the caches are reset."""
        fence, planner, simple = self.fence, self.planner, self.simple
        capacity = self.mode.pages * PER_PAGE
        found = {
            "requests": len(self.requests) + len(self.scheduler.requests),
            "blocks referenced": referenced(self.pool),
            "blocks missing": capacity - 1 - self.manager.available_size(),
            "blocks cached": len(self.pool._evictable_blocks),
            "pages retired": len(self.manager._retired_pages),
            "pages mapped": len(self.mapped) - 1,
            "pages held": fence.holding if fence is not None else 0,
            "transfers of the fence": len(fence.transfers) if fence is not None else 0,
            "blocks named": len(fence._named) if fence is not None else 0,
            "copies": sum(len(worker.copies) for worker in self.workers),
        }
        if self.host_pool is not None:
            found |= self.host_pool.left()
        if planner is not None:
            tier = getattr(planner.manager, "primary_tier", planner.manager)
            found |= {
                "transfers of the connector": len(planner._jobs),
                "chunks pinned": tier._num_allocated_chunks
                - len(tier._free_list)
                - tier._num_evictable_cache_chunks,
                "chunks being written": tier._num_write_pending_chunks,
                "files unfinished": len(list(self.root.rglob("*.tmp"))),
            }
        if simple is not None:
            found |= {
                "stores": len(simple._store_event_to_blocks),
                "loads": len(simple._reqs_to_load),
                "CPU blocks": sum(block.ref_cnt > 0 for block in simple.cpu_block_pool.blocks),
            }
        return found

    def close(self) -> None:
        """End the engine."""
        self.tier.close()
        for worker in self.workers:
            worker.connector = None
        self.engine.shutdown()
        if self.host_pool is not None:
            self.host_pool.close()
        shutil.rmtree(self.root, ignore_errors=True)
        World.current = SimpleNamespace(map=lambda _: None, unmap=lambda _: None)
