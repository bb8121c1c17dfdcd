"""Runs one engine in this process through one job, and writes down what it saw.

A job names the engine's arguments, the patches to take out, and rounds of prompts.
The result holds every round's tokens and log-probabilities, the bytes of the device
in use, and, for each block that came back from the CPU tier, whether its bytes are
the ones it had before it was evicted, read through the model's own KV tensors.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from vllm import SamplingParams

from harness.engines import disk_faults, failing_copies
from harness.engines.block_watch import BlockWatch
from harness.engines.engine import Engine
from harness.engines.inside import after, prepare, taken_and_evicted, tell, tiers_behind
from harness.engines.prompting import answer_of, params_of, prompt_of
from harness.engines.simple_watch import (
    SimpleWatch,
    remember_managers,
    shut_down_while_copying,
    simple_part,
    take_cpu_blocks,
)
from kvpatch import activation
from kvpatch.hostdevice import streams
from kvpatch.patches.fence.hooks import fence_of
from kvpatch.refusal import RefusedCall

STALLED_STEPS = 2000


def stalled(steps: int, seconds: float) -> None:
    """Tell the test that no request has ended for so many steps, which took so long."""
    if steps == STALLED_STEPS:
        tell("stalled")


def pause(job: dict[str, Any], word: str) -> None:
    """Tell a test that wants it where this engine is, and go on when the test says so."""
    if job.get("wait_before_reset"):
        tell(word)
        sys.stdin.readline()


class Evictions:
    """Counts the blocks that the CPU tier evicted."""

    def __init__(self, manager: Any) -> None:
        self.count = 0
        after(manager, "prepare_store", self.note)

    def note(self, output: Any, *args: Any, **kwargs: Any) -> None:
        self.count += len(taken_and_evicted(output)[1]) if output is not None else 0


def run_round(
    engine: Engine,
    prompts: list[dict[str, Any]],
    watch: BlockWatch | None,
    one_by_one: bool = False,
) -> list[Any]:
    """Run ``prompts`` to their end; return one record a prompt, in order.

    Together, or one after the other with every copy waited for, so that what happens
    when does not depend on the speed of the machine.
    """
    vllm, drafts = engine.llm.llm_engine, engine.drafts
    if one_by_one and len(prompts) > 1:
        return [one for prompt in prompts for one in run_round(engine, [prompt], watch, one_by_one)]
    model = vllm.vllm_config.model_config
    for index, prompt in enumerate(prompts):
        name = f"{id(prompts)}-{index}"
        vllm.add_request(name, prompt_of(model, prompt), params_of(model, prompt))
    records: dict[int, Any] = {}
    steps, begun = 0, time.monotonic()
    while vllm.has_unfinished_requests():
        steps += 1
        if steps % STALLED_STEPS == 0:
            stalled(steps, time.monotonic() - begun)
        for output in vllm.step():
            if output.finished:
                steps, begun = 0, time.monotonic()
                drafted = {"drafts": drafts.pop(output.request_id)} if drafts else {}
                records[int(output.request_id.split("-")[1])] = answer_of(output) | drafted
        if watch is not None:
            watch.after_step()
        if one_by_one:
            streams.synchronize()
    if one_by_one:
        for _ in range(4):  # the transfers of the last step are planned, run and reported
            vllm.step()
            streams.synchronize()
    return [records[index] for index in range(len(prompts))]


def abort_one(llm: Any, prompt: dict[str, Any], steps: int) -> None:
    """Let a request be aborted after so many steps, and hear of it."""
    wanted = SamplingParams(max_tokens=prompt["max_tokens"])
    llm.llm_engine.add_request("aborted", {"prompt_token_ids": prompt["tokens"]}, wanted)
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(steps):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["aborted"])
    for _ in range(4):
        core.step_fn()


def replace_weights(llm: Any, folder: str, reset: dict[str, bool] | None) -> str:
    """Load other weights into the running engine, as a training loop does; reset, if at all.

    Returns:
        The sentence of a refusal, after which the engine goes on; empty without one.
    """
    assert not llm.llm_engine.has_unfinished_requests()
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    except RefusedCall as refused:
        return str(refused)
    if reset is not None:
        assert llm.reset_prefix_cache(**reset)
    return ""


class EventLog:
    """Every KV cache event that the engine publishes, in order."""

    def __init__(self, scheduler: Any) -> None:
        self.events: list[Any] = []
        scheduler.kv_event_publisher.shutdown()
        scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        self.events += [{"event": type(one).__name__, **asdict(one)} for one in batch.events]

    def shutdown(self) -> None: ...


def declare_block_outermost_layout() -> None:
    """Let the CPU attention backend declare the stride order that GPU backends declare.

    It reads KV by block stride as they do but does not say so, and vLLM then never
    takes its cross-layer allocation on a CPU.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    def stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    CPUAttentionBackend.get_kv_cache_stride_order = staticmethod(stride_order)


class Exhaustion:
    """Lets allocations fail in the middle, as when a neighbour takes the last page.

    A model with two groups asks for the blocks of one after the other.
    """

    def __init__(self, pool: Any, every: int) -> None:
        from kvcached.utils import KVCachePoolExhausted

        self.pool = pool
        self.failed = self.asked = 0
        get_new_blocks = pool.get_new_blocks

        def sometimes(count: int) -> Any:
            self.asked += 1
            if self.asked % every == 0:
                self.failed += 1
                raise KVCachePoolExhausted("taken by a neighbour")
            return get_new_blocks(count)

        pool.get_new_blocks = sometimes

    def result(self) -> dict[str, int]:
        """How often it failed, and the blocks that nobody gave back."""
        leaked = sum(block.ref_cnt > 0 for block in self.pool.kv_block_pool if not block.is_null)
        return {"failed": self.failed, "leaked": leaked}


def device_bytes() -> dict[str, int]:
    """Return this process's bytes of the host device: charged, and resident."""
    from kvpatch.hostdevice import ledger

    resident = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("/memfd:kvpatch-host-device"):
                resident += entry.stat().st_blocks * 512
        except OSError:
            continue
    return {"charged": ledger.usage().get(os.getpid(), 0), "resident": resident}


def write_down(result: dict[str, Any], path: str, core: Any, leave: bool = False) -> None:
    """Write the result; with ``leave`` end here, without a shutdown.

    A CPU tier with tiers behind it lies in a file, which nobody else would remove.
    """
    Path(path).write_text(json.dumps(result, default=bytes.hex))  # hashes of events
    transfer = core.vllm_config.kv_transfer_config
    if transfer is not None:
        for name in (transfer.engine_id, core.vllm_config.instance_id):  # the latter up to 0.25
            Path(f"/dev/shm/vllm_offload_{name}.mmap").unlink(missing_ok=True)
    if leave:
        os._exit(0)


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    result: dict[str, Any] = {"rounds": []}
    prepare(job)
    if job.get("fail"):
        failing_copies.install(**job["fail"])
    if job.get("cross_layer"):
        declare_block_outermost_layout()
    if job.get("events"):
        from vllm.config import KVEventsConfig

        job["engine"]["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="null"
        )
    on_device = os.environ.get("KVPATCH", "0") != "0"
    if on_device:
        remember_managers()
        result["patches"] = [applied.patch.id for applied in activation.transaction.applied]
    engine = Engine(job)
    llm, core, pool = engine.llm, engine.core, engine.pool
    result |= engine.ran()
    if job.get("take_cpu_blocks"):
        result["charged"] = take_cpu_blocks(core, lambda: device_bytes()["charged"])
        write_down(result, result_path, core, leave=True)  # two pools on one memory hang
    evictions = Evictions(engine.planner.manager) if engine.planner else None
    # Copies of a worker in a process of its own are watched through the model's tensors alone.
    is_simple = simple_part(core.scheduler.connector) is not None and engine.ranks == 1
    simple = SimpleWatch(core) if is_simple else None
    on_ranks = engine.ranks > 1 and hasattr(pool, "kv_block_pool")  # plain vLLM restores nothing
    watch = BlockWatch(core) if job.get("watch") or on_ranks else None
    exhaustion = Exhaustion(pool, job["exhaust"]) if job.get("exhaust") else None
    events = EventLog(core.scheduler) if job.get("events") else None
    for steps in job.get("abort_after", ()):
        abort_one(llm, job["rounds"][0][0], steps)
    for index, prompts in enumerate(job["rounds"]):
        if index in job.get("reload", ()):
            reset = job.get("reset_on_reload", {"reset_connector": True})
            result["refused"] = replace_weights(llm, job["reload_from"], reset)
        if str(index) in job.get("faults", {}):
            before, after = (getattr(disk_faults, name) for name in job["faults"][str(index)])
            before(Path(job["disk"]))
            llm.reset_prefix_cache(reset_connector=True)  # what is left is on the disk
            after(Path(job["disk"]))
        result["rounds"].append(run_round(engine, prompts, watch, job.get("one_by_one", False)))
        if tiers_behind(engine.planner) and "faults" not in job:
            engine.rest(with_tiers=True)
        if simple is not None:
            result.setdefault("stored", []).append(simple.stored)
    if watch is not None:
        result["returned"], result["changed"] = watch.returned, watch.changed
    held = fence_of(core)
    result["fence"] = vars(held.counters) if held is not None else None
    result["evicted"] = evictions.count if evictions is not None else 0
    if simple is not None:
        if not job.get("forced"):
            engine.rest()
        result["simple"] = simple.result()
    if exhaustion is not None:
        engine.rest()
        result["exhaustion"] = exhaustion.result()
    result["checked"] = engine.checked()
    if job.get("forced"):
        # With its fault an engine may never come to rest.
        write_down(result, result_path, core, leave=True)
    if events is not None:
        result["reset"] = llm.reset_prefix_cache()
        run_round(engine, job["rounds"][0][:1], None, one_by_one=True)  # publishes the reset
        result["events"] = events.events
    elif on_device:
        result["after_load"] = device_bytes()
        pause(job, "loaded")
        result["reset"] = llm.reset_prefix_cache()
        result["after_reset"] = device_bytes()
        pause(job, "reset")
    write_down(result, result_path, core)
    if job.get("shut_down_while_copying"):
        shut_down_while_copying(llm, job["rounds"][0][0])
