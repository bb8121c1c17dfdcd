"""Runs interleavings of frees and transfers, and checks every stored block.

With ``"reference"`` it writes the true bytes of every block of the prompts, by
block hash, as one engine with room for all of them computes them. Otherwise it runs
scenarios one after another and compares, for each, what the CPU tier holds for the
blocks it would serve.
"""

import faulthandler
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from harness.engines import patience, simple_scenarios
from harness.engines.engine import Engine
from harness.engines.inside import (
    after,
    block_of,
    come_to_rest,
    group_of,
    keys_of,
    layers_of,
    prepare,
    taken_and_evicted,
    tiers_behind,
)
from harness.engines.patience import steps
from harness.engines.prompting import greedy
from harness.engines.simple_scenarios import SimpleTier, copies_of, judged
from kvpatch.hostdevice import ledger, streams
from kvpatch.patches.fence.fence import Fence
from kvpatch.patches.fence.hooks import fence_of
from kvpatch.upstream import connectors

MISSING = 23  # tokens to the end of the last block of most prompts


class Stage(Engine):
    """An engine in this process, driven step by step."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.prompts = job["prompts"]
        self.delays = job.get("delays", ())
        self.scenario = ""
        self.may_hold = job["may_hold"]
        # A step loop without a request to compute would starve the copies it waits for.
        self.waits_for_copies = bool(job.get("simple"))
        self.finished: set[str] = set()
        self.preemptions = 0
        self.most_held = 0
        self.notes: dict[str, Any] = {}  # of a scenario, for its verdict
        self.holding = False

    def begin(self, scenario: str) -> None:
        """Start a scenario on a device with nothing cached and nothing counted."""
        self.pool.max_cached_blocks = 0
        self.llm.reset_prefix_cache()
        self.scenario = scenario
        self.finished.clear()
        self.most_held = 0
        self.notes = {}
        if self.drafts is not None:
            self.drafts.counts.clear()

    def add(self, name: str, max_tokens: int) -> None:
        """Start request ``name`` on the prompt of that name."""
        self.llm.llm_engine.add_request(
            f"{self.scenario}/{name}",
            {"prompt_token_ids": self.prompts[f"{self.scenario}/{name}".rstrip("+")]},
            greedy(max_tokens),
        )

    def complete(self, name: str, max_tokens: int) -> None:
        """Run request ``name`` to its end."""
        self.add(name, max_tokens)
        self.finish(name)

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([f"{self.scenario}/{name}"])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.finished.add(output.request_id.partition("/")[2])
            held = fence_of(self.core)
            self.most_held = max(self.most_held, held.holding if held else 0)

    def finish(self, *names: str) -> None:
        """Step until the requests have finished; they must, though copies are held."""
        for count in steps(400):
            if self.finished >= set(names):
                return
            self.step()
            if not self.holding and (count > 200 or self.waits_for_copies):
                streams.synchronize()  # a request may wait for its own transfers
        left = {
            name: (str(request.status), request.num_computed_tokens, request.num_preemptions)
            for name, request in self.scheduler.requests.items()
        }
        raise AssertionError(f"did not finish in 400 steps: {left}")

    def quiet(self) -> None:
        """Step until the engine would go to sleep."""
        come_to_rest(self.scheduler, self.step, tiers_behind(self.planner))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold copies in flight, where waiting for them would not stop the engine."""
        with ledger.hold_copies() if self.may_hold else nullcontext():
            self.holding = self.may_hold
            yield
        self.holding = False


def tier_of(connector: Any) -> Any:
    """The rows of an OffloadingConnector's CPU tier; runs in the worker."""
    worker = connector.connector_worker.worker
    if hasattr(worker, "_store_handler"):
        directions = [worker._store_handler]
    else:  # up to 0.24 one handler for each direction is registered
        directions = [one for one in worker.handlers if one.gpu_to_cpu]
    ((tier,),) = (one.dst_tensors for one in directions)
    return tier


def read_rows(worker: Any, rows: list[int]) -> list[Any]:
    """Read rows of a worker's CPU tier as float32; runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    (connector,) = [
        part
        for part in connectors.parts(get_kv_transfer_group())
        if type(part).__name__ == connectors.OFFLOADING
    ]
    return copies_of(tier_of(connector), rows)


def read_blocks(worker: Any, wanted: list[tuple[int, int]]) -> list[Any]:
    """Read (group, block) pairs through the model's KV tensors; runs in the worker."""
    groups = layers_of(worker.model_runner)
    return [
        np.concatenate([block_of(cache, block).numpy().ravel() for cache in groups[group]])
        for group, block in wanted
    ]


class Tier:
    """What the CPU tier would serve: the row of every block it has committed."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.rows: dict[bytes, int] = {}
        self.committed: set[bytes] = set()
        manager = stage.planner.manager
        complete_store = manager.complete_store

        def on_complete(keys: Any, *args: Any, **kwargs: Any) -> Any:
            keys = list(keys)
            self.committed.update(keys_of(keys))
            return complete_store(keys, *args, **kwargs)

        after(manager, "prepare_store", self._prepared)
        manager.complete_store = on_complete

    def _prepared(self, output: Any, *args: Any, **kwargs: Any) -> None:
        if output is not None:
            taken, evicted = taken_and_evicted(output)
            self.committed.difference_update(evicted)
            self.rows.update(zip(taken, map(int, output.store_spec.block_ids), strict=True))

    def forget(self) -> None:
        """Judge none of these blocks in the next scenario."""
        self.committed.clear()

    def judge(self, truth: Mapping[str, Any]) -> dict[str, Any]:
        rows = {key: self.rows[key] for key in sorted(self.committed)}
        return judged(self.stage, read_rows, rows, truth) | self.stage.notes


def finish(stage: Stage, tokens: int = 1) -> None:
    """A request finishes in the step that planned its store, or some tokens later."""
    with stage.held():
        stage.complete("a", tokens)
        stage.step(3)


def finish_in_flight(stage: Stage) -> None:
    """A request finishes while the copy of its blocks runs."""
    finish(stage, tokens=3)


def finish_unplanned(stage: Stage) -> None:
    """A request's stores are planned only after its blocks were freed.

    The CPU tier has no room for ``a`` while the store of ``z`` is held, so nothing of
    ``a`` is planned. The store ends in the step in which ``a`` finishes; the next step
    plans all of it. ``z`` goes on, so that the queue of batches stays full.
    """
    with ledger.hold_copies():
        stage.add("z", 60)
        stage.step(3)
        stage.add("a", 4)
        stage.step(3)
    streams.synchronize()
    stage.finish("a", "z")


def preempt(stage: Stage) -> None:
    """A request is preempted in the step after its store was planned.

    The pool holds both prompts to the block, so that ``a`` needs one of ``b``'s when
    it grows; ``b`` starts just before.
    """

    def count(output: Any, *args: Any, **kwargs: Any) -> None:
        stage.preemptions += len(output.preempted_req_ids or ())

    after(stage.scheduler, "schedule", count)
    for delay in stage.delays:
        one, other = f"a{delay}", f"b{delay}"
        stage.add(one, 60)
        stage.step(delay)
        stage.add(other, 60)
        stage.finish(one, other)
        stage.quiet()


def abort_while_storing(stage: Stage, steps: int = 4) -> None:
    with stage.held():
        stage.add("a", 100)
        stage.step(steps)
        stage.abort("a")
        stage.step(3)


def abort_before_launch(stage: Stage) -> None:
    abort_while_storing(stage, steps=1)


def abort_while_loading(stage: Stage) -> None:
    stage.complete("a", 3)
    stage.quiet()
    with stage.held():
        stage.add("a+", 3)
        stage.step(3)
        stage.abort("a+")
        stage.complete("b", 3)


def window_skip(stage: Stage) -> None:
    """Blocks fall out of the sliding window in the step that would store them.

    Nothing is held: the next chunk takes freed blocks over, for which vLLM waits.
    """
    stage.complete("long", 3)


def cap_trim(stage: Stage) -> None:
    """kvcached's cap on cached tokens evicts a request whose store still runs."""
    stage.pool.max_cached_blocks = 41
    with stage.held():
        stage.complete("a", 3)
        stage.complete("b", 3)
        stage.step(3)


def generate(stage: Stage) -> None:
    """A request generates more than a block, step by step."""
    stage.complete("a", 65)


def last_token(stage: Stage) -> None:
    """A request ends with a block, whose last token was sampled and never computed."""
    finish(stage, tokens=MISSING)


def reset(stage: Stage) -> None:
    """The prefix cache is reset while a store was planned but not launched."""
    stage.pool.max_cached_blocks = -1
    stage.complete("a", 1)
    stage.llm.reset_prefix_cache()
    stage.step(3)


def shrink(stage: Stage) -> None:
    """An operator lowers the limit: reserved pages, freed a moment ago, are unmapped."""
    stage.complete("a", 1)
    manager = stage.pool.kv_cache_manager
    manager.resize(2 * manager.page_size)
    manager.trim()
    stage.step(3)


def give_back(stage: Stage) -> None:
    """Memory of a request whose copies have ended, step by step after it finished."""
    before = charged()
    stage.add("a", 3)
    stage.step(2)
    stage.notes["most"] = charged() - before
    stage.finish("a")
    streams.synchronize()
    while charged() > before and stage.notes.setdefault("steps", 0) < 10:
        stage.step()
        stage.notes["steps"] += 1
    stage.notes["kept"] = charged() - before
    stage.notes["asks_for_steps"] = stage.scheduler.has_requests()


def charged() -> int:
    """Bytes of the device that this engine has."""
    return ledger.usage().get(os.getpid(), 0)


def standstill(stage: Stage) -> None:
    """The limit is lowered under two loads, to exactly what they fill."""
    for name in ("a", "b"):
        stage.complete(name, 1)
        stage.quiet()
        stage.llm.reset_prefix_cache()
    manager = stage.pool.kv_cache_manager
    for name in ("a+", "b+"):
        stage.add(name, 3)
    stage.step()
    loading = [request.status.name for request in stage.scheduler.requests.values()]
    assert loading == ["WAITING_FOR_REMOTE_KVS"] * 2, loading
    manager.resize(3 * manager.page_size)
    stage.waits_for_copies = True
    stage.finish("a+", "b+")


def corrupt(stage: Stage) -> None:
    """A bit of the CPU tier flips between a store and the load of it."""
    stage.complete("a", 3)
    stage.quiet()
    stage.llm.collective_rpc(flip_a_bit)
    stage.complete("a+", 3)


def flip_a_bit(worker: Any) -> None:
    """Change one bit of every row of the CPU tier; runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    tier = tier_of(get_kv_transfer_group())
    tier[:, 7] ^= 1


SCENARIOS: dict[str, Callable[[Stage], None]] = {
    action.__name__: action
    for action in (
        finish,
        finish_in_flight,
        finish_unplanned,
        preempt,
        abort_while_storing,
        abort_before_launch,
        abort_while_loading,
        window_skip,
        cap_trim,
        last_token,
        generate,
        reset,
        shrink,
        give_back,
        standstill,
        corrupt,
    )
} | simple_scenarios.SCENARIOS


@contextmanager
def snapshots(stage: Stage) -> Iterator[dict[str, Any]]:
    """Collect the bytes of every block as soon as it is full."""
    truth: dict[str, Any] = {}
    step = stage.step

    def watched(count: int = 1) -> None:
        for _ in range(count):
            step()
            new = {
                block.block_hash.hex(): (group_of(block.block_hash), block.block_id)
                for block in getattr(stage.pool, "kv_block_pool", None) or stage.pool.blocks
                if block.block_hash is not None and f"0:{block.block_hash.hex()}" not in truth
            }
            if new:
                wanted = list(new.values())
                for rank, found in enumerate(stage.llm.collective_rpc(read_blocks, args=(wanted,))):
                    truth.update(
                        (f"{rank}:{key}", block) for key, block in zip(new, found, strict=True)
                    )

    stage.step = watched  # type: ignore[method-assign]
    yield truth


def main(job_path: str, result_path: str) -> None:
    faulthandler.dump_traceback_later(500, exit=True)  # says where it hangs
    job = json.loads(Path(job_path).read_text())
    prepare(job)
    patience.PATIENCE = job.get("patience", patience.PATIENCE)
    if job.get("blind"):
        Fence.split = lambda self, retired, can_plan: (  # type: ignore[method-assign]
            [page for _, pages in retired for page in pages],
            [],
        )
    stage = Stage(job)
    if job.get("reference"):
        with snapshots(stage) as truth:
            for request, max_tokens in job["reference"].items():
                stage.scenario, _, name = request.partition("/")
                stage.finished.clear()
                stage.complete(name, max_tokens)
        np.savez(result_path, **truth)
        return
    tier: Any = SimpleTier(stage, job["unpinned"]) if job.get("simple") else Tier(stage)
    truth = np.load(job["truth"])  # reads what is asked for
    verdicts = {}
    for name in job["scenarios"]:
        print(f"scenario {name}", flush=True)
        stage.begin(name)
        SCENARIOS[name](stage)
        stage.quiet()
        verdicts[name] = tier.judge(truth)
        if stage.drafts is not None:
            verdicts[name]["drafted"], verdicts[name]["accepted"] = stage.drafts.total
        tier.forget()
    held = fence_of(stage.core)
    result = stage.ran() | {
        "scenarios": verdicts,
        "preemptions": stage.preemptions,
        "held_now": held.holding if held else 0,
        "counters": vars(held.counters) if held else {},
        "retired_now": len(getattr(stage.pool.kv_cache_manager, "_retired_pages", None) or ()),
        "charged": charged(),
        "checked": stage.checked(),
    }
    Path(result_path).write_text(json.dumps(result))
