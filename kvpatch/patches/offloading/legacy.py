"""OffloadingConnector before vLLM 0.28, in the terms of later releases.

Up to 0.25 the connector behaves the same under other names. Each adapter presents the older object
under the newer names, and calls the code for those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from kvpatch import state
from kvpatch.patch import argument
from kvpatch.patches.offloading import registration, resets
from kvpatch.patches.offloading.registration import Rows
from kvpatch.refusal import Refusal, RefusedCall
from kvpatch.status import record
from kvpatch.supported import release_of
from kvpatch.telemetry.counters import refused
from kvpatch.upstream import connectors


def register_with_spec(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the worker of 0.25."""
    _register(instance, instance._init_worker, args, kwargs)


def register_with_handlers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the worker of 0.19 to 0.24."""
    _register(instance, instance._register_handlers, args, kwargs)


class OneRegion:
    """An attention backend whose KV cache is one region: blocks, tokens, bytes per token."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, int, int]:
        """Return the shape, from which vLLM derives the dimensions of blocks and tokens."""
        return num_blocks, block_size, num_kv_heads * head_size


def register_with_backends(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Register kvcached's regions with the worker of 0.16 to 0.18, each as a layer."""
    kv_caches = argument(args, kwargs, 0, "kv_caches")
    size = instance.spec.gpu_block_size  # in 0.18 one per group, of which there is one
    tokens = size if isinstance(size, int) else size[0]
    check_windows(instance.spec.kv_cache_config)
    regions = {
        f"region {index}": tensor.view(len(tensor), tokens, -1)
        for index, tensor in enumerate(
            registration.checked_regions(_later(instance), kv_caches).tensors
        )
    }
    instance._register_handlers(regions, dict.fromkeys(regions, OneRegion))


def block_bytes(spec: Any) -> int:
    """Return the bytes per block that the CPU tier was sized by."""
    if hasattr(spec, "cpu_page_size_per_worker"):  # the size of a chunk
        return int(spec.cpu_page_size_per_worker // spec.block_size_factor)
    plan = spec.kv_cache_config
    return int(sum(tensor.size for tensor in plan.kv_cache_tensors) // plan.num_blocks)


def _register(instance: Any, init: Callable[[Any], None], args: Any, kwargs: Any) -> None:
    later = _later(instance)
    check_windows(later.kv_cache_config)
    later._init_worker = init
    registration.register_regions(None, later, args, kwargs)
    rows = state.find(later, Rows)
    if rows is not None:
        state.attach(instance, rows)


def _later(worker: Any) -> SimpleNamespace:
    spec = worker.spec
    config = SimpleNamespace(worker_kv_bytes_per_block=block_bytes(spec))
    return SimpleNamespace(
        kv_cache_config=spec.kv_cache_config, spec=SimpleNamespace(config=config)
    )


def around_storable(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
    """Limit stores to the blocks of a request, and to the computed tokens of an aborted one."""
    group = argument(args, kwargs, 0, "group_config")
    held = len(instance.group_states[group.group_idx].block_ids)
    chunks: int = min(wrapped(*args, **kwargs), held // instance.config.blocks_per_chunk)
    if instance.req.status.name == "FINISHED_ABORTED":
        chunks = min(chunks, instance.req.num_computed_tokens // group.tokens_per_chunk)
    return chunks


def around_call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse to replace weights while a connector has blocks of them.

    The methods are those that count from 0.24 on: of vLLM's workers, with ``weight`` in their
    names. Functions are an operator's, and many things.
    """
    method = argument(args, kwargs, 0, "method")
    # First the method: an engine that starts calls its workers before it has a scheduler.
    if not isinstance(method, str) or "weight" not in method:
        return wrapped(*args, **kwargs)
    if instance.scheduler.connector is None:
        return wrapped(*args, **kwargs)
    refused(instance, "collective_rpc")
    raise RefusedCall(
        f"{method} is called on an engine with a KV connector",
        "before vLLM 0.24 a reset of the caches leaves blocks of the old weights in the CPU tier, "
        "which would be loaded as blocks of the new ones",
        "start the engine again with the new weights, or install vLLM 0.24 or later",
        code="KVP353",
    )


def around_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Reset the CPU tier, and forget the copies of every request as later releases do.

    The next store, preemption or end of a request would look them up; a load waits for ever.
    """
    result = resets.around_reset(wrapped, instance, args, kwargs)
    for status in instance._req_status.values():
        status.transfer_jobs.clear()
    return result


@dataclass(eq=False)
class PreemptedByReset:
    """The requests that the next step names; kept on the ``OffloadingConnectorScheduler``."""

    names: set[str] = field(default_factory=set)


def around_scheduler_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Keep the names of the requests that a reset preempts.

    The next step may write into their blocks while these are stored: before a step the workers wait
    only for the stores of requests that it names as preempted.
    """
    running = kwargs.get("reset_running_requests", args[0] if args else False)
    planner = connectors.scheduler_of(instance.connector)
    if running and planner is not None:
        names = {request.request_id for request in instance.running}
        state.of(planner, PreemptedByReset).names |= names
    return wrapped(*args, **kwargs)


def name_preempted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Name the requests that a reset has preempted in the step itself, as later releases do."""
    reset = state.find(instance, PreemptedByReset)
    if reset is not None and reset.names:
        output = argument(args, kwargs, 0, "scheduler_output")
        output.preempted_req_ids = reset.names.union(output.preempted_req_ids or ())
        reset.names = set()
    return wrapped(*args, **kwargs)


def name_preempted_of_jobs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """As ``name_preempted``, in 0.21 to 0.24, which flush a request of loads of this step too."""

    def build(*args: Any, **kwargs: Any) -> Any:
        return resets.around_build(wrapped, instance, args, kwargs)

    return name_preempted(build, instance, args, kwargs)


def around_lookup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let a request wait for its copies before it is looked up again, as from 0.24 on.

    A preempted one whose stores were not reported yet would be loaded: it has one load or stores.
    """
    status = instance._req_status.get(argument(args, kwargs, 0, "request").request_id)
    if status is None or not status.transfer_jobs:  # up to 0.22 a new request has none
        return wrapped(*args, **kwargs)
    for group in status.group_states:
        group.block_ids.clear()  # of before the preemption
    return None, False


def around_match(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Load nothing for a request that asks to compute every token, as from 0.24 on.

    The log-probabilities of a prompt, and what is pooled of each token, come of the computation;
    those of loaded tokens are memory that nobody wrote.
    """
    answer = wrapped(*args, **kwargs)  # from 0.20 on the request gets its state there
    return (0, False) if argument(args, kwargs, 0, "request").skip_reading_prefix_cache else answer


def around_load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let a load wait for the computation that was launched before it, as stores do.

    With asynchronous scheduling a step may still write into the blocks of a request that has ended.
    vLLM takes the stream of a copy from the end of its pool.
    """
    if not instance.gpu_to_cpu:
        module = sys.modules[type(instance).__module__]
        made = getattr(module, "current_platform", None) or module.torch.cuda  # up to 0.22
        stream = instance._stream_pool.pop() if instance._stream_pool else made.Stream()
        stream.wait_stream(made.current_stream())
        instance._stream_pool.append(stream)
    return wrapped(*args, **kwargs)


def check_windows(config: Any) -> None:
    """Refuse a model whose layers are all sliding windows, up to 0.20.

    There the connector takes the blocks of a request for those of full attention: it stores the
    null block, and blocks that left the window and are another request's, under the request's
    hashes. A model that has both kinds is one of full attention to it.
    """
    facts = record.facts
    if facts is None or release_of(facts.vllm) >= Version("0.21"):
        return
    groups = config.kv_cache_groups
    if all(type(group.kv_cache_spec).__name__ == "SlidingWindowSpec" for group in groups):
        raise Refusal(
            "all layers of this model are sliding windows",
            "before vLLM 0.21 OffloadingConnector stores blocks that have left the window",
            "install vLLM 0.21 or later, run it without a KV connector, or set KVPATCH=0",
            code="KVP423",
        )


@dataclass(eq=False)
class AbortedLoads:
    """Aborted requests that only their load keeps; on the ``OffloadingConnectorScheduler``."""

    names: set[str] = field(default_factory=set)


def around_finished(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let the load of an aborted request alone keep its blocks.

    One that was stored once counts as being stored until it ends, so that the workers report the
    end of its stores, and its blocks are freed, while they load it.
    """
    name = argument(args, kwargs, 0, "request").request_id
    keeps, parameters = wrapped(*args, **kwargs)
    stored = instance._reqs_being_stored.get(name)
    if stored is None or stored or not instance._reqs_being_loaded.get(name):
        return keeps, parameters
    del instance._reqs_being_stored[name]
    state.of(instance, AbortedLoads).names.add(name)
    return False, parameters


def without_aborted_loads(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Pass over the report that ``around_finished`` has made one too many."""
    aborted = state.find(instance, AbortedLoads)
    if aborted is not None and aborted.names:
        output = argument(args, kwargs, 0, "connector_output")
        reported = aborted.names.intersection(output.finished_sending or ())
        if reported:
            output.finished_sending = set(output.finished_sending) - reported
            aborted.names -= reported
    return wrapped(*args, **kwargs)
