"""Refusing engine configurations that no test has covered, before an engine starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpatch import status
from kvpatch.codes import UNCODED
from kvpatch.errors import Refusal

# (spec_name, spec_module_path) pairs. The host device's copies were compared byte for
# byte; vLLM's own copies, on CUDA, are given the same regions.
PROVEN_SPECS = (
    ("CPUOffloadingSpec", None),
    ("HostOffloadingSpec", "kvpatch.hostdevice.offloading"),
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


def _extra(config: Any) -> dict[str, Any]:
    return config.kv_transfer_config.kv_connector_extra_config or {}


def _spec(config: Any) -> tuple[str, str | None]:
    extra = _extra(config)
    name = extra.get("spec_name", "CPUOffloadingSpec")
    return name, None if name == "CPUOffloadingSpec" else extra.get("spec_module_path")


NOT_COMPARED = "its blocks were never compared with plain vLLM's after a round trip"

RUNNER = Rule(
    "Model Runner V2",
    lambda c: bool(c.use_v2_model_runner),
    lambda c: "this configuration runs on Model Runner V2",
    "kvpatch is tested on Model Runner V1 only",
    "set VLLM_USE_V2_MODEL_RUNNER=0, or set KVPATCH=0",
    with_connector=False,
    code="KVP301",
)

RULES = (
    RUNNER,
    Rule(
        "connectors other than vLLM's own OffloadingConnector",
        lambda c: (
            _connector(c) != "OffloadingConnector"
            or c.kv_transfer_config.kv_connector_module_path is not None
        ),
        lambda c: f"the KV connector {_connector(c)} is configured",
        "only vLLM's own OffloadingConnector is known to be right on kvcached's memory",
        "use OffloadingConnector, or set KVPATCH=0",
        code="KVP302",
    ),
    Rule(
        "offloading specs other than the ones above",
        lambda c: _spec(c) not in PROVEN_SPECS,
        lambda c: f"the offloading spec {_spec(c)[0]} is configured",
        NOT_COMPARED,
        "remove spec_name from kv_connector_extra_config, or set KVPATCH=0",
        code="KVP303",
    ),
    Rule(
        "`canonical_layout`",
        lambda c: bool(_extra(c).get("canonical_layout")),
        lambda c: "canonical_layout is set in kv_connector_extra_config",
        "vLLM cannot certify that layout on kvcached's memory",
        "remove canonical_layout, or set KVPATCH=0",
        code="KVP304",
    ),
    Rule(  # before the next rule: on a CPU vLLM turns prefix caching off for these models
        "offloading of models with latent attention (MLA)",
        lambda c: c.model_config is not None and c.model_config.use_mla,
        lambda c: f"a KV connector is configured for {c.model_config.architecture}",
        "the KV cache of models with latent attention was never compared with plain vLLM's",
        "run this model without a KV connector, or set KVPATCH=0",
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
        "offloading of hybrid and encoder-decoder models",
        lambda c: (
            c.model_config is not None
            and (c.model_config.is_hybrid or c.model_config.is_encoder_decoder)
        ),
        lambda c: f"a KV connector is configured for {c.model_config.architecture}",
        "the KV cache of hybrid and encoder-decoder models was never compared with plain vLLM's",
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
    if instance.model_config is not None and os.environ.get("VLLM_USE_V2_MODEL_RUNNER"):
        # vLLM would say what this machine lacks for that runner, as if adding it helped.
        RUNNER.check(instance)
    result = wrapped(*args, **kwargs)
    if instance.model_config is not None:
        check(instance)
        status.on_frontend_config()
    return result
