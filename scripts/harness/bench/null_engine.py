"""vLLM's ``EngineCore`` over an executor that computes nothing: what its own thread costs.

Engine, scheduler, connector and kvcached's pool and page manager are the real ones; of two workers,
which are not there, steps and copies end at once, and maps and unmaps are counted. So a step is the
engine's thread alone: its processor time, by ``thread_time``, and counts, which do not depend on
the machine. Run by ``engine_steps`` in a process for each load.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

Job = dict[str, Any]
BLOCK, LAYERS, WORKERS = 16, 4, 2  # tokens of a block
CACHED = 0.9  # of the blocks, before a limit is lowered
KEPT = 0.1  # of the blocks, by that limit
OWN = 480  # tokens of a tail


def run(job: Job) -> Job:
    """Run one load and return its figures.

    Args:
        job: ``load``, of ``LOADS``; ``model``, a folder with its configuration; ``blocks``;
            ``connector``; ``asynchronous``; ``tier``, in parts of ``blocks``; ``size`` of the load.
    """
    engine = Engine(job)
    return {**LOADS[job["load"]](engine, job), "steps": engine.steps}


class Engine:
    """The engine, its clients and what is counted."""

    def __init__(self, job: Job) -> None:
        self.blocks = int(job["blocks"])
        self.elastic = os.environ.get("KVPATCH") == "1"
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.load_steps = 1  # in which a load ends
        self.random = random.Random(1)
        self.collected = 0.0  # seconds of this thread in Python's collector
        gc.callbacks.append(self._note_collection)
        self._names = 0
        if self.elastic:
            self._count_pages()
        self.core = self._start(job)
        self._step = self.core.step_with_batch_queue if job["asynchronous"] else self.core.step
        if self.elastic:
            self.manager = self.pool.kv_cache_manager
            self.manager._wait_post_init()
            self.manager._get_cached_avail_physical_pages = self._free_pages
        self._hasher = _hasher()

    @property
    def pool(self) -> Any:
        """The block pool."""
        return self.core.scheduler.kv_cache_manager.block_pool

    @property
    def in_flight(self) -> bool:
        """Whether a batch is in flight."""
        return bool(self.core.batch_queue)

    def _free_pages(self) -> int:
        """There is no device: its free memory is no limit. Read as often as a device's."""
        self.manager._avail_physical_pages_cache = 100_000
        self.manager._avail_physical_pages_ts = time.monotonic()
        return 100_000

    def _note_collection(self, phase: str, _info: Any) -> None:
        self.collected += time.thread_time() if phase == "stop" else -time.thread_time()

    def _count_pages(self) -> None:
        from kvcached import kv_cache_manager, tp_ipc_util

        def count(name: str) -> Callable[..., None]:
            def counted(_workers: int, offsets: list[int], *_: Any) -> None:
                self.counts[name] += len(offsets)
                self.counts[f"{name} calls"] += 1

            return counted

        modules: list[Any] = [kv_cache_manager, tp_ipc_util]
        modules[0].broadcast_kv_tensors_created = lambda *_, **__: True
        modules[1].broadcast_map_to_kv_tensors = count("mapped")
        modules[1].broadcast_unmap_from_kv_tensors = count("unmapped")
        available = modules[0].KVCacheManager.available_size

        counts = self.counts

        def available_size(self: Any) -> int:
            counts["available_size"] += 1
            return int(available(self))

        modules[0].KVCacheManager.available_size = available_size

    def _start(self, job: Job) -> Any:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import core
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from harness import connectors
        from harness.engines.scheduling import allow_async_scheduling

        if job["asynchronous"]:
            allow_async_scheduling()
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=4, head_size=64, dtype=torch.float32
        )
        transfer = None
        if job["connector"]:
            tier = int(self.blocks * job["tier"]) * spec.page_size_bytes * LAYERS
            plain = not self.elastic
            transfer = connectors.offloading(tier, without_kvpatch=plain, offload_prompt_only=False)
        config = EngineArgs(
            model=job["model"],
            dtype="float32",
            max_model_len=16384,
            block_size=BLOCK,
            enforce_eager=True,
            max_num_seqs=128,
            max_num_batched_tokens=8192,
            tensor_parallel_size=WORKERS,
            distributed_executor_backend="mp",
            kv_transfer_config=transfer,
            async_scheduling=job["asynchronous"],
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            seed=0,
        ).create_engine_config()
        return core.EngineCore(config, _null_executor(self, spec, self.blocks), True)

    def add(self, tokens: int, answer: int, seed: int | None = None, tail: int = 0) -> str:
        """Let a request arrive; those of one seed have one prompt, and then a tail of their own."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._names += 1
        source = random.Random(self._names if seed is None else seed)
        own = random.Random(tail)
        parameters = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        request = Request(
            request_id=f"r{self._names}",
            prompt_token_ids=[source.randrange(2, 250) for _ in range(tokens)]
            + [own.randrange(2, 250) for _ in range(OWN if tail else 0)],
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            block_hasher=self._hasher,
        )
        self.core.add_request(request)
        return str(request.request_id)

    @property
    def there(self) -> int:
        """How many requests it has."""
        return sum(self.core.scheduler.get_request_counts())

    def step(self) -> float:
        """Step once; return the processor time of this thread, in seconds."""
        self.steps += 1
        begun = time.thread_time()
        self._step()
        return time.thread_time() - begun

    def drain(self) -> None:
        """Step until it has no request, and a few times more."""
        while self.core.scheduler.has_unfinished_requests() or self.in_flight:
            self.step()
        for _ in range(5):
            if self.core.scheduler.has_requests() or self.in_flight:
                self.step()

    def timed(self, steps: int, feed: Callable[[], None]) -> Job:
        """Return what so many steps cost, with what arrives before each."""
        before = Counter(self.counts)
        taken = []
        for _ in range(steps):
            feed()
            taken.append(self.step())
        found = self.counts - before
        return {
            "us_per_step": round(sum(taken) / steps * 1e6, 1),
            "measured_steps": steps,
            "barriers": found["barriers"],
            "barriers_in_flight": found["barriers in flight"],
            "mapped": found["mapped"],
            "unmapped": found["unmapped"],
            "maps_and_unmaps": found["mapped calls"] + found["unmapped calls"],
            "available_size_per_step": round(found["available_size"] / steps, 1),
        }


def _hasher() -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def _null_executor(engine: Engine, spec: Any, blocks: int) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingWorkerMetadata,
    )
    from vllm.v1.executor import Executor
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    answers = {
        "get_kv_cache_spec": {f"model.layers.{n}.self_attn.attn": spec for n in range(LAYERS)},
        "determine_available_memory": spec.page_size_bytes * LAYERS * blocks,
        "get_supported_kv_cache_layouts": ["BLHNC", "BLNHC"],
        "describe": {"rows": []},
    }

    class Null(Executor):  # type: ignore[misc]
        """Two workers that answer at once."""

        supports_async_scheduling: ClassVar[Any] = classmethod(lambda _cls: True)

        def _init_executor(self) -> None:
            self.now = 0  # steps with the connector's own part
            self.flying: list[tuple[int, int, str]] = []  # copies: when each ends, and what it is
            self.computed: dict[str, int] = {}
            self.needed: dict[str, int] = {}
            self.outputs: list[Any] = []

        def check_health(self) -> None:
            pass

        def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
            name = method if isinstance(method, str) else method.__name__
            if "barrier" in name:
                engine.counts["barriers"] += 1
                engine.counts["barriers in flight"] += engine.in_flight
                return [True] * WORKERS
            if name == "compile_or_warm_up_model":
                return []
            return [answers.get(name)] * WORKERS

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            for new in scheduler_output.scheduled_new_reqs:
                self.needed.setdefault(new.req_id, len(new.prompt_token_ids))
                self.computed[new.req_id] = new.num_computed_tokens
            names, tokens = [], []
            for name, count in scheduler_output.num_scheduled_tokens.items():
                self.computed[name] += count
                names.append(name)
                done = self.computed[name] >= self.needed[name]
                tokens.append([7] if done else [])
                if done:
                    self.needed[name] = self.computed[name] + 1
            output = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=tokens,
                kv_connector_output=self.copy(scheduler_output.kv_connector_metadata),
            )
            # An empty batch is not sampled.
            if non_block and not scheduler_output.total_num_scheduled_tokens:
                return _done(output)
            self.outputs.append(output)
            return _done(None) if non_block else None

        def copy(self, meta: Any) -> Any:
            if meta is None:
                return None
            self.now += 1
            stored, loaded = self.now + 1, self.now + engine.load_steps
            self.flying += [(stored, number, "") for number in meta.store_jobs]
            self.flying += [(loaded, number, job.req_id) for number, job in meta.load_jobs.items()]
            ended = [one for one in self.flying if one[0] <= self.now]
            self.flying = [one for one in self.flying if one[0] > self.now]
            told = OffloadingWorkerMetadata()
            for _, number, _ in ended:
                told.completed_jobs[number] = WORKERS
            return KVConnectorOutput(
                finished_sending=set(),
                finished_recving={request for _, _, request in ended if request},
                kv_connector_worker_meta=told if ended else None,
            )

        def sample_tokens(self, _grammar: Any, non_block: bool = False) -> Any:
            output = self.outputs.pop(0)
            return _done(output) if non_block else output

    return Null


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


# Loads


def decode(engine: Engine, job: Job) -> Job:
    """100 requests that decode, and nothing else."""
    for _ in range(100):
        engine.add(64, 400)
    for _ in range(6):
        engine.step()
    return engine.timed(job["size"], lambda: None)


def churn(engine: Engine, job: Job) -> Job:
    """64 short requests at a time: 1.6 end in a step."""

    def feed() -> None:
        while engine.there < 64:
            engine.add(512, engine.random.randrange(20, 60))

    # As many as fill the prefix cache to its cap.
    for _ in range(max(40, job.get("warm", 40))):
        feed()
        engine.step()
    return engine.timed(job["size"], feed)


def returning(engine: Engine, job: Job) -> Job:
    """40 prompts of 2,048 tokens that come again and again, 16 at a time."""

    def feed() -> None:
        while engine.there < 16:
            engine.add(2048, 8, seed=10**6 + engine.random.randrange(40))

    for _ in range(20):
        feed()
        engine.step()
    return engine.timed(job["size"], feed)


def waves(engine: Engine, job: Job) -> Job:
    """4 to 64 requests in flight, in waves of 60 steps."""
    import math

    now = 0

    def feed() -> None:
        nonlocal now
        wanted = int(34 + 30 * math.sin(now / 60 * 2 * math.pi))
        now += 1
        while engine.there < wanted:
            engine.add(engine.random.randrange(500, 3000), engine.random.randrange(20, 60))

    for _ in range(60):
        feed()
        engine.step()
    return engine.timed(job["size"], feed)


def giving(engine: Engine, job: Job) -> Job:
    """A limit of 10 % for an engine whose blocks are cached; ``busy`` requests decode meanwhile."""
    from kvpatch import state
    from kvpatch.patches.suspend import hooks
    from kvpatch.patches.suspend.giving import Giving
    from kvpatch.upstream import kvcached_api

    suspension = hooks.make(engine.core)
    given = state.find(engine.core, Giving)
    if given is None:
        raise RuntimeError(suspension.why_not())
    while len(engine.pool._evictable_blocks) < engine.blocks * CACHED:
        while engine.there < 16:
            engine.add(3000, 2)
        engine.step()
    engine.drain()
    for _ in range(job["busy"]):
        engine.add(64, 15_000)
    for _ in range(8):
        engine.step()
    normal = []
    for _ in range(100 if job["busy"] else 0):
        normal.append(engine.step())
        given.advance()
    cached, pages = len(engine.pool._evictable_blocks), kvcached_api.pages_in_use(engine.manager)
    before = Counter(engine.counts)
    taken: list[float] = []
    alone: list[float] = []  # without Python's collector, which looks at all that there is
    begun = time.thread_time()
    suspension.limit(int(kvcached_api.most(engine.manager) * KEPT))
    first = time.thread_time() - begun
    while (given.lowers or not taken) and len(taken) < 20_000:
        begun, collected = time.thread_time(), engine.collected
        if engine.core.scheduler.has_requests() or engine.in_flight:
            engine.step()
        given.advance()
        suspension.advance()
        taken.append(time.thread_time() - begun)
        alone.append(taken[-1] - (engine.collected - collected))
    found, left = engine.counts - before, kvcached_api.pages_in_use(engine.manager)
    if kvcached_api.is_above_limit(engine.manager) or left > pages * 0.2:
        raise RuntimeError(f"the limit was not reached: {left} of {pages} pages after {len(taken)}")
    blocks = cached - len(engine.pool._evictable_blocks)
    usual = statistics.median(normal) * len(taken) if normal else 0.0
    return {
        "blocks": blocks,
        "pages": pages - left,
        "lost": given.lost,
        "giving_steps": len(taken),
        "normal_ms": _ms(statistics.median(normal)) if normal else None,
        "median_ms": _ms(statistics.median(taken)),
        "p90_ms": _ms(sorted(taken)[int(len(taken) * 0.9)]),
        "longest_ms": _ms(max(first, *taken)),
        "longest_without_collector_ms": _ms(max(first, *alone)),
        "longest_five_ms": [_ms(one) for one in sorted(taken)[-5:]],
        "cpu_ms": _ms(first + sum(taken)),
        "us_per_block": round((first + sum(taken)) / blocks * 1e6, 2),
        "us_per_block_beside_steps": round((first + sum(taken) - usual) / blocks * 1e6, 2),
        "barriers": found["barriers"],
        "barriers_in_flight": found["barriers in flight"],
        "unmap_calls": found["unmapped calls"],
    }


def shared(engine: Engine, job: Job) -> Job:
    """Requests at once whose prefix is in the tier, against one by itself; or their tails too."""
    tails = range(1, job["size"] + 1) if job["tails"] else [0] * job["size"]

    def steps_for(tails: Sequence[int]) -> list[int]:
        engine.core.reset_prefix_cache()
        for _ in range(3):
            if engine.core.scheduler.has_requests() or engine.in_flight:
                engine.step()
        engine.load_steps = job["load_steps"]
        before = engine.steps
        left = {engine.add(3000, 1, seed=7, tail=tail) for tail in tails}
        ended = []
        while left:
            engine.step()
            gone = left - engine.core.scheduler.requests.keys()
            ended += [engine.steps - before] * len(gone)
            left -= gone
            if engine.steps - before > 5000:
                raise RuntimeError("the requests do not end")
        engine.drain()
        return ended

    for tail in dict.fromkeys(tails):
        engine.add(3000, 1, seed=7, tail=tail)
        engine.drain()
    (alone,), together = steps_for(tails[:1]), steps_for(tails)
    return {
        "alone": alone,
        "median": statistics.median(together),
        "together": together[-1],
        "requests": len(together),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


LOADS: dict[str, Callable[[Engine, Job], Job]] = {
    function.__name__: function for function in (decode, churn, returning, waves, giving, shared)
}
