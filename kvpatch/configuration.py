"""Refusing engine configurations that no test has covered, before an engine starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from kvpatch import connectors, gate, layouts, status
from kvpatch.codes import UNCODED
from kvpatch.errors import Refusal
from kvpatch.gate import in_words as words
from kvpatch.registry.releases import (
    HYBRID_RANGE,
    LATENT_RANGE,
    MULTI_RANGE,
    SIMPLE_RANGE,
    TIERS_RANGE,
    V1_ON_LATER,
)
from kvpatch.simple.copies import device_here
from kvpatch.versions import installed

# (spec_name, spec_module_path) pairs. The host device's copies were compared byte for
# byte; vLLM's own copies, on CUDA, are given the same regions.
PROVEN_SPECS = (
    ("CPUOffloadingSpec", None),
    ("TieringOffloadingSpec", None),
    ("HostOffloadingSpec", "kvpatch.hostdevice.offloading"),
    ("HostTieringOffloadingSpec", "kvpatch.hostdevice.tiering"),
)
PROVEN_CONNECTORS = (connectors.OFFLOADING, connectors.SIMPLE)
# Connectors that may be inside a MultiConnector, each once.
PROVEN_INSIDE = PROVEN_CONNECTORS
PROVEN_TIERS = ("fs",)
PROVEN_BACKENDS = (None, "cpu")  # SimpleCPUOffloadConnector's kv_offload_backend
PROVEN_SCHEDULERS = (
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
)
PROVEN_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Rule:
    """One configuration that is refused.

    Attributes:
        kind: what is refused, for the documentation.
        applies: whether a ``VllmConfig`` is of that kind.
        what, why, remedy: the sentence; ``what`` may name the config's values.
        with_connector: refused only when a KV connector is configured, since
            kvcached alone runs as it would without kvpatch.
        code: one of ``codes.CODES``.
    """

    kind: str
    applies: Callable[[Any], bool]
    what: Callable[[Any], str]
    why: str
    remedy: str
    with_connector: bool = True
    code: str = UNCODED

    def check(self, config: Any) -> None:
        """Raise the refusal when ``config`` is of that kind."""
        if self.applies(config):
            raise Refusal(self.what(config), self.why, self.remedy, self.code)


def _connector(config: Any) -> Any:
    return config.kv_transfer_config.kv_connector


def _leaves(config: Any) -> list[connectors.Leaf]:
    return connectors.leaves(config.kv_transfer_config)


def _simple(config: Any, key: str) -> list[Any]:
    """What ``key`` of its extra configuration is for each SimpleCPUOffloadConnector; or None."""
    return [leaf.extra.get(key) for leaf in _leaves(config) if leaf.name == connectors.SIMPLE]


def _is_simple(config: Any) -> bool:
    return any(leaf.name == connectors.SIMPLE for leaf in _leaves(config))


def _unproven_backends(config: Any) -> list[str]:
    return [
        str(backend)
        for backend in _simple(config, "kv_offload_backend")
        if backend not in PROVEN_BACKENDS
    ]


def _in_multi(config: Any) -> bool:
    transfer = config.kv_transfer_config
    return transfer.kv_connector == connectors.MULTI and transfer.kv_connector_module_path is None


def _unproven_inside(config: Any) -> list[str]:
    return [
        leaf.name
        for leaf in _leaves(config)
        if _in_multi(config) and (leaf.name not in PROVEN_INSIDE or leaf.module is not None)
    ]


def _twice_inside(config: Any) -> list[str]:
    names = [leaf.name for leaf in _leaves(config)]
    return [name for name in PROVEN_INSIDE if names.count(name) > 1]


def _unproven_specs(config: Any) -> list[str]:
    found = []
    for leaf in _leaves(config):
        if leaf.name == connectors.SIMPLE:  # has no specs, and does not read the key
            continue
        name = leaf.extra.get("spec_name", "CPUOffloadingSpec")
        own = name in ("CPUOffloadingSpec", "TieringOffloadingSpec")  # vLLM's, whatever the path
        if (name, None if own else leaf.extra.get("spec_module_path")) not in PROVEN_SPECS:
            found.append(name)
    return found


def _tiers(config: Any) -> list[str]:
    return [str(tier.get("type")) for leaf in _leaves(config) for tier in leaf.tiers]


def _unproven_tiers(config: Any) -> list[str]:
    return [tier for tier in _tiers(config) if tier not in (*PROVEN_TIERS, "example")]


def _scheduler(config: Any) -> str | None:
    """The full name of the scheduler class that was asked for; None is vLLM's choice."""
    asked = config.scheduler_config.scheduler_cls
    if asked is None:
        return None
    return f"{asked.__module__}.{asked.__qualname__}" if isinstance(asked, type) else str(asked)


def _at_least(release: str) -> bool:
    """Whether this vLLM is ``release`` or a later one."""
    vllm = installed("vllm")[0]
    return vllm.version is not None and vllm.version >= Version(release)


def _tested_on(releases: str) -> bool:
    """Whether this vLLM is one of ``releases``, of a feature that is off outside them."""
    return gate.in_range(installed("vllm")[0], releases)


def _by_kvcached(config: Any) -> bool:
    """Whether kvcached by itself runs on this vLLM with this runner."""
    if _at_least("0.31"):
        return False
    return bool(config.use_v2_model_runner) or not _at_least("0.29")


def _runs_v2(config: Any) -> bool:
    # Up to 0.21 the variable alone decides, and the configuration does not know.
    by_variable = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0")
    return bool(getattr(config, "use_v2_model_runner", by_variable))


def _loses_lazy_copies(config: Any) -> bool:
    return any(_simple(config, "lazy_offload")) and _at_least("0.29") and not _at_least("0.30")


def _stops_storing_windows(config: Any) -> bool:
    return (
        _is_simple(config)
        and _tested_on(SIMPLE_RANGE)
        and not _at_least("0.22")
        and not all(_simple(config, "lazy_offload"))
        and not config.scheduler_config.disable_hybrid_kv_cache_manager
        and config.model_config is not None
        and config.model_config.get_sliding_window() is not None
    )


def _keeps_reset_blocks(config: Any) -> bool:
    return bool(_tiers(config)) and not _at_least("0.24")


def _alone_on_v2(config: Any, releases: str) -> bool:
    """Whether one connector without tiers runs on Runner V2 of ``releases`` and one rank."""
    return (
        _tested_on(releases)
        and bool(config.use_v2_model_runner)
        and config.parallel_config.world_size == 1
        and not _in_multi(config)
        and not _tiers(config)
    )


def _hybrid_compared(config: Any) -> bool:
    """Whether state-space layers were compared on this release, runner and connector."""
    return (
        _alone_on_v2(config, HYBRID_RANGE)
        and not _is_simple(config)
        and not config.model_config.use_mla
    )


NOT_COMPARED = "its blocks were never compared with plain vLLM's after a round trip"

RULES = (
    Rule(
        "HiSparse",
        lambda c: (
            getattr(getattr(c, "attention_config", None), "hisparse_config", None) is not None
        ),
        lambda c: "HiSparse is configured",
        "it allocates its KV cache outside kvcached's memory",
        "remove the HiSparse configuration, or set KVPATCH=0",
        with_connector=False,
        code="KVP312",
    ),
    Rule(
        f"from vLLM 0.29 on, Model Runner V1 on other releases than {words(V1_ON_LATER)}",
        lambda c: _at_least("0.29") and not _tested_on(V1_ON_LATER) and not c.use_v2_model_runner,
        lambda c: "this configuration runs on Model Runner V1",
        "there kvcached has no adapter for it, and ours was compared on vLLM "
        f"{words(V1_ON_LATER)} only",
        "use Model Runner V2, or set KVPATCH=0",
        with_connector=False,
        code="KVP301",
    ),
    Rule(
        "hybrid models where kvcached alone would refuse to run: vLLM 0.31 and later, and "
        "Model Runner V1 from 0.29 on",
        lambda c: c.model_config is not None and c.model_config.is_hybrid and not _by_kvcached(c),
        lambda c: f"{c.model_config.architecture} has state-space layers",
        "kvcached's patches for them were not tried on this release and runner",
        "use Model Runner V2 of vLLM 0.30, or set KVPATCH=0",
        with_connector=False,
        code="KVP313",
    ),
    Rule(
        f"from vLLM 0.29 on, a `{layouts.ASKED}` that kvcached's memory does not have",
        lambda c: _at_least("0.29") and bool(layouts.disagree()),
        lambda c: (
            f"{layouts.ASKED}={layouts.disagree()} is set and kvcached's memory "
            f"{'is' if layouts.contiguous() else 'is not'} contiguous"
        ),
        f"kvcached has {' or '.join(layouts.LAYOUTS[True])} there, and with "
        f"{layouts.CONTIGUOUS}=false {' or '.join(layouts.LAYOUTS[False][:2])}",
        f"unset {layouts.ASKED} or change {layouts.CONTIGUOUS}, or set KVPATCH=0",
        with_connector=False,
        code="KVP314",
    ),
    Rule(
        "Model Runner V2 before vLLM 0.28",
        lambda c: not _at_least("0.28") and _runs_v2(c),
        lambda c: "this configuration runs on Model Runner V2",
        "kvcached has no adapter for it before vLLM 0.28",
        "set VLLM_USE_V2_MODEL_RUNNER=0, or set KVPATCH=0",
        with_connector=False,
        code="KVP301",
    ),
    Rule(
        "KV cache events before vLLM 0.26",
        lambda c: (
            not _at_least("0.26")
            and c.kv_events_config is not None
            and bool(c.kv_events_config.enable_kv_cache_events)
        ),
        lambda c: "kv_events_config switches KV cache events on",
        "kvcached's block pool gives none out, and kvpatch knows how to only from vLLM 0.26 on",
        "remove kv_events_config, install a later vLLM, or set KVPATCH=0",
        with_connector=False,
        code="KVP325",
    ),
    Rule(
        "connectors other than vLLM's own OffloadingConnector and SimpleCPUOffloadConnector",
        lambda c: (
            not _in_multi(c)
            and (
                _connector(c) not in PROVEN_CONNECTORS
                or c.kv_transfer_config.kv_connector_module_path is not None
            )
        ),
        lambda c: f"the KV connector {_connector(c)} is configured",
        "only vLLM's own OffloadingConnector and SimpleCPUOffloadConnector are known to be right "
        "on kvcached's memory",
        "use one of these, or set KVPATCH=0",
        code="KVP302",
    ),
    Rule(
        "`kv_offload_backend` other than `cpu` of SimpleCPUOffloadConnector",
        lambda c: bool(_unproven_backends(c)),
        lambda c: f"the kv_offload_backend {_unproven_backends(c)[0]} is configured",
        NOT_COMPARED,
        "remove kv_offload_backend from kv_connector_extra_config, or set KVPATCH=0",
        code="KVP315",
    ),
    Rule(
        "`lazy_offload` on vLLM 0.29",
        _loses_lazy_copies,
        lambda c: "lazy_offload is set in kv_connector_extra_config",
        "SimpleCPUOffloadConnector of vLLM 0.29 counts copies of idle steps as done without "
        "making them",
        "remove lazy_offload, install another vLLM, or set KVPATCH=0",
        code="KVP316",
    ),
    Rule(
        f"SimpleCPUOffloadConnector on other releases than vLLM {words(SIMPLE_RANGE)}",
        lambda c: _is_simple(c) and not _tested_on(SIMPLE_RANGE) and not _loses_lazy_copies(c),
        lambda c: "SimpleCPUOffloadConnector is configured on this release",
        f"it was compared with plain vLLM's on vLLM {words(SIMPLE_RANGE)} only",
        "use OffloadingConnector, or one of these releases, or set KVPATCH=0",
        code="KVP317",
    ),
    Rule(
        "SimpleCPUOffloadConnector in eager mode before vLLM 0.22, for models with a sliding "
        "window and the hybrid KV cache manager (on with `--kv-offloading-size`)",
        _stops_storing_windows,
        lambda c: (
            "SimpleCPUOffloadConnector is configured in eager mode for sliding windows whose "
            "blocks are given back"
        ),
        "before vLLM 0.22 it stops storing a request at the first block that has left its window "
        "and is gone, and some prompts never come back from the CPU tier",
        "set --disable-hybrid-kv-cache-manager or lazy_offload, install vLLM 0.22.1, or set "
        "KVPATCH=0",
        code="KVP317",
    ),
    Rule(
        f"MultiConnector on other releases than vLLM {words(MULTI_RANGE)}",
        lambda c: _in_multi(c) and not _tested_on(MULTI_RANGE),
        lambda c: "MultiConnector is configured on this release",
        f"it was compared with plain vLLM's on vLLM {words(MULTI_RANGE)} only",
        "use one connector, or one of these releases, or set KVPATCH=0",
        code="KVP317",
    ),
    Rule(
        "secondary tiers before vLLM 0.24",
        _keeps_reset_blocks,
        lambda c: "a secondary tier is configured",
        "the tiers of this vLLM keep their blocks when the cache is reset "
        "(vllm-project/vllm#44541) and ask a disk on the scheduler's own thread "
        "(vllm-project/vllm#44193)",
        "use OffloadingConnector without tiers, or install vLLM 0.24, or set KVPATCH=0",
        code="KVP317",
    ),
    Rule(
        f"secondary tiers on other releases than vLLM {words(TIERS_RANGE)}",
        lambda c: bool(_tiers(c)) and not _tested_on(TIERS_RANGE) and not _keeps_reset_blocks(c),
        lambda c: "a secondary tier is configured on this release",
        f"it was compared with plain vLLM's on vLLM {words(TIERS_RANGE)} only",
        "use OffloadingConnector without tiers, or one of these releases, or set KVPATCH=0",
        code="KVP317",
    ),
    Rule(
        "SimpleCPUOffloadConnector on devices other than CUDA, ROCm and the host device",
        lambda c: _is_simple(c) and device_here() is None,
        lambda c: "the KV connector SimpleCPUOffloadConnector is configured",
        "kvpatch knows no way to copy its blocks on this device",
        "use OffloadingConnector, or set KVPATCH=0",
        code="KVP318",
    ),
    Rule(
        "a MultiConnector with other connectors inside than the ones above",
        lambda c: bool(_unproven_inside(c)),
        lambda c: f"a MultiConnector is configured with {_unproven_inside(c)[0]} inside",
        "that connector's copies were never compared with plain vLLM's",
        f"leave only {' and '.join(PROVEN_INSIDE)} in it, or set KVPATCH=0",
        code="KVP319",
    ),
    Rule(
        "a MultiConnector with one connector twice",
        lambda c: bool(_twice_inside(c)),
        lambda c: f"a MultiConnector is configured with {_twice_inside(c)[0]} twice",
        "vLLM gives two OffloadingConnectors one host memory, and no two of another were compared",
        "leave one of them, or set KVPATCH=0",
        code="KVP320",
    ),
    Rule(
        "offloading specs other than the ones above",
        lambda c: bool(_unproven_specs(c)),
        lambda c: f"the offloading spec {_unproven_specs(c)[0]} is configured",
        NOT_COMPARED,
        "remove spec_name from kv_connector_extra_config, or set KVPATCH=0",
        code="KVP303",
    ),
    Rule(
        "the `example` tier",
        lambda c: "example" in _tiers(c),
        lambda c: "the secondary tier example is configured",
        "vLLM's example keeps the names of blocks and no bytes, so that what comes back from it "
        "is whatever lies in the CPU tier",
        "use the tier fs, or set KVPATCH=0",
        code="KVP321",
    ),
    Rule(
        "secondary tiers other than the ones above",
        lambda c: bool(_unproven_tiers(c)),
        lambda c: f"the secondary tier {_unproven_tiers(c)[0]} is configured",
        "no test of kvpatch ran on it",
        f"use the tier {' or '.join(PROVEN_TIERS)}, or set KVPATCH=0",
        code="KVP322",
    ),
    Rule(
        "secondary tiers with the scheduling policy `priority`",
        lambda c: bool(_tiers(c)) and c.scheduler_config.policy == "priority",
        lambda c: "a secondary tier is configured with the scheduling policy priority",
        "a request that waits for the tier can then keep those from running that hold the memory "
        "it needs",
        "use the scheduling policy fcfs, or set KVPATCH=0",
        code="KVP323",
    ),
    Rule(
        "`canonical_layout`",
        lambda c: any(leaf.extra.get("canonical_layout") for leaf in _leaves(c)),
        lambda c: "canonical_layout is set in kv_connector_extra_config",
        "vLLM cannot certify that layout on kvcached's memory",
        "remove canonical_layout, or set KVPATCH=0",
        code="KVP304",
    ),
    Rule(  # before the next rule: on a CPU vLLM turns prefix caching off for these models
        "offloading of models with latent attention (MLA), other than by OffloadingConnector or "
        f"SimpleCPUOffloadConnector alone on Model Runner V2 of vLLM {words(LATENT_RANGE)} and one "
        "rank",
        lambda c: (
            c.model_config is not None
            and c.model_config.use_mla
            and not _alone_on_v2(c, LATENT_RANGE)
        ),
        lambda c: f"a KV connector is configured for {c.model_config.architecture}",
        "the KV cache of models with latent attention was compared with plain vLLM's for "
        "OffloadingConnector and SimpleCPUOffloadConnector without tiers, on Model Runner V2 of "
        f"vLLM {words(LATENT_RANGE)} and one rank only",
        "use one of these, or run this model without a KV connector, or set KVPATCH=0",
        code="KVP305",
    ),
    Rule(
        "offloading with prefix caching off",
        lambda c: not c.cache_config.enable_prefix_caching,
        lambda c: "prefix caching is off while a KV connector is configured",
        "no test of kvpatch ran on it",
        "remove --no-enable-prefix-caching, or set KVPATCH=0",
        code="KVP306",
    ),
    Rule(
        "offloading with parallelism other than tensor parallelism",
        lambda c: (
            c.parallel_config.world_size != c.parallel_config.tensor_parallel_size
            or c.parallel_config.data_parallel_size > 1
            or c.parallel_config.decode_context_parallel_size > 1
        ),
        lambda c: "a KV connector is configured with parallelism other than tensor parallelism",
        "no test of kvpatch ran on it",
        "use tensor parallelism only, or set KVPATCH=0",
        code="KVP307",
    ),
    Rule(
        "offloading with an executor other than `uni` and `mp`",
        lambda c: c.parallel_config.distributed_executor_backend not in (None, "uni", "mp"),
        lambda c: (
            "a KV connector is configured with the executor "
            f"{c.parallel_config.distributed_executor_backend}"
        ),
        "kvpatch is tested with the executors uni and mp only",
        "set --distributed-executor-backend mp, or set KVPATCH=0",
        code="KVP308",
    ),
    Rule(
        "offloading with a scheduler class other than vLLM's own two",
        lambda c: _scheduler(c) not in (None, *PROVEN_SCHEDULERS),
        lambda c: f"a KV connector is configured with the scheduler {_scheduler(c)}",
        "it may free or hand out blocks in another order than the transfers are fenced for",
        "remove --scheduler-cls, or set KVPATCH=0",
        code="KVP324",
    ),
    Rule(
        "offloading with speculative decoding",
        lambda c: c.speculative_config is not None,
        lambda c: "a KV connector is configured with speculative decoding",
        NOT_COMPARED,
        "remove the speculative configuration, or set KVPATCH=0",
        code="KVP309",
    ),
    Rule(
        "offloading with KV cache dtypes other than the ones above",
        lambda c: c.cache_config.cache_dtype not in PROVEN_CACHE_DTYPES,
        lambda c: f"a KV connector is configured with the cache dtype {c.cache_config.cache_dtype}",
        NOT_COMPARED,
        f"use one of {', '.join(PROVEN_CACHE_DTYPES)}, or set KVPATCH=0",
        code="KVP310",
    ),
    Rule(
        "offloading of hybrid models, other than by OffloadingConnector alone on Model Runner V2 "
        f"of vLLM {words(HYBRID_RANGE)} and one rank",
        lambda c: (
            c.model_config is not None and c.model_config.is_hybrid and not _hybrid_compared(c)
        ),
        lambda c: f"a KV connector is configured for {c.model_config.architecture}",
        "the KV cache of hybrid models was compared with plain vLLM's for OffloadingConnector "
        f"without tiers, on Model Runner V2 of vLLM {words(HYBRID_RANGE)} and one rank only",
        "use that, or run this model without a KV connector, or set KVPATCH=0",
        code="KVP311",
    ),
    Rule(
        "offloading of encoder-decoder models",
        lambda c: c.model_config is not None and c.model_config.is_encoder_decoder,
        lambda c: f"a KV connector is configured for {c.model_config.architecture}",
        "the KV cache of encoder-decoder models was never compared with plain vLLM's",
        "run this model without a KV connector, or set KVPATCH=0",
        code="KVP311",
    ),
)


def check(config: Any) -> None:
    """Refuse a ``VllmConfig`` that no test has covered.

    Raises:
        Refusal: the first rule that the configuration breaks.
    """
    connector = config.kv_transfer_config is not None and _connector(config) is not None
    for rule in RULES:
        if connector or not rule.with_connector:
            rule.check(config)


def around_post_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Check a configuration as soon as vLLM has resolved it.

    Wraps ``VllmConfig.__post_init__``, which runs in the frontend process before any
    engine is started, so that the refusal is the last line the operator sees.

    Raises:
        Refusal: the first rule that the configuration breaks.
    """
    result = wrapped(*args, **kwargs)
    if instance.model_config is not None:
        check(instance)
        status.on_frontend_config()
    return result
