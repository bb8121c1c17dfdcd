"""What the engine on the emulated NPU ran with: ``tests/npu/test_npu_engine.py``.

An NPU has code of its own for most settings of vLLM, so that one of them that the engine did not
have is not known to be right there. Sizes and names are not compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kvpatch.environ import DEBUG, FIRST_LIMIT, HOST_POOL, IDLE, VERIFY
from kvpatch.upstream import combination, connectors
from kvpatch.versions import Facts

_SIMPLE = f"vllm:{connectors.SIMPLE} "
_UNSET = (None,)
# By the names of ``settings``; the first that differs is in the sentence. What is compared and not
# here is refused.
RAN: dict[str, tuple[Any, ...]] = {
    "kv_transfer_config.kv_connector": (connectors.SIMPLE,),
    "connector 0": (
        f"{_SIMPLE}{{}}",
        f'{_SIMPLE}{{"lazy_offload": false}}',
        f'{_SIMPLE}{{"lazy_offload": true}}',
    ),
    "kv_transfer_config.kv_role": ("kv_both",),
    "kv_transfer_config.kv_load_failure_policy": ("fail",),
    "parallel_config.data_parallel_size": (1,),
    "parallel_config.tensor_parallel_size": (1,),
    "parallel_config.pipeline_parallel_size": (1,),
    "parallel_config.prefill_context_parallel_size": (1,),
    "parallel_config.decode_context_parallel_size": (1,),
    "parallel_config.nnodes": (1,),
    "parallel_config.distributed_executor_backend": ("uni",),
    "parallel_config.enable_expert_parallel": (False,),
    "parallel_config.enable_dbo": (False,),
    "parallel_config.enable_eplb": (False,),
    "parallel_config.enable_elastic_ep": (False,),
    "parallel_config.worker_cls": ("vllm_ascend.worker.worker.NPUWorker",),  # of A2 and A3
    "parallel_config.worker_extension_cls": ("",),
    "model_config.architecture": ("LlamaForCausalLM",),
    "model_config.dtype": ("torch.float32",),
    "model_config.enforce_eager": (True,),
    "model_config.enable_sleep_mode": (False,),
    "model_config.enable_prompt_embeds": (False,),
    "model_config.model_impl": ("auto",),
    "model_config.multimodal_config": _UNSET,
    "model_config.override_attention_dtype": _UNSET,
    "model_config.quantization": _UNSET,
    "model_config.runner_type": ("generate",),
    "quant_config": _UNSET,
    "cache_config.block_size": (128,),
    "cache_config.cache_dtype": ("auto",),
    "cache_config.kv_cache_memory_bytes": ("set",),  # else it is profiled
    "cache_config.num_gpu_blocks_override": _UNSET,
    "cache_config.enable_prefix_caching": (True,),
    "cache_config.prefix_caching_hash_algo": ("sha256",),
    "cache_config.mamba_cache_mode": ("none",),
    "cache_config.kv_sharing_fast_prefill": (False,),
    "kvcached's layout": ("non-contiguous",),
    "compilation_config.mode": (0,),
    "compilation_config.cudagraph_mode": ("NONE",),
    "attention_config.backend": _UNSET,
    "scheduler_config.async_scheduling": (True,),
    "scheduler_config.disable_hybrid_kv_cache_manager": (False,),
    "scheduler_config.enable_chunked_prefill": (True,),
    "scheduler_config.policy": ("fcfs",),
    "scheduler_config.scheduler_cls": _UNSET,
    "speculative_config.method": _UNSET,
    "speculative_config.num_speculative_tokens": _UNSET,
    "kv_events_config.enable_kv_cache_events": (None, False),
    "lora_config.max_lora_rank": _UNSET,
    "offload_config.prefetch.offload_group_size": (0,),
    "offload_config.uva.cpu_offload_gb": (0,),
    "ec_transfer_config": _UNSET,
    "weight_transfer_config": _UNSET,
    "use_v2_model_runner": (False,),
    "additional_config": ("",),
    "VLLM_ASCEND variables": ("",),
    "KVCACHED_PAGE_PREALLOC_ENABLED": _UNSET,
    "KVCACHED_PAGE_SIZE_MB": (None, "2"),
    "TRITON_INTERPRET": _UNSET,
    "VLLM_ATTENTION_BACKEND": _UNSET,
    "VLLM_ENABLE_V1_MULTIPROCESSING": (None, "1"),
    "VLLM_KV_CACHE_LAYOUT": _UNSET,
    "VLLM_USE_V2_MODEL_RUNNER": (None, "0"),
    HOST_POOL.name: (False,),
    IDLE.name: (False,),
    FIRST_LIMIT.name: (False,),
    DEBUG.name: (False,),
}
# What vllm-ascend writes into its own additional_config; it is read with graphs, and for experts.
_WRITTEN = ("ascend_compilation_config", "ascend_fusion_config")
_OWN_VARIABLES = "VLLM_ASCEND_"
# Of these, what is a setting as it is, by its path, and what a variable.
PATHS = tuple(
    name
    for name in RAN
    if re.fullmatch(r"[a-z0-9_.]+", name)
    and name not in ("additional_config", "cache_config.kv_cache_memory_bytes")
)
_VARIABLES = tuple(name for name in RAN if re.fullmatch(r"(KVCACHED|TRITON|VLLM)_[A-Z0-9_]+", name))


def settings(config: Any, facts: Facts) -> dict[str, Any]:
    """Return the settings of a ``VllmConfig`` that are compared with what ran."""
    found = combination.settings(config, PATHS)
    found |= {name: facts.environment.get(name) for name in _VARIABLES}
    found |= {one.name: bool(one.read(facts.environment)) for one in combination.OURS}
    for number, leaf in enumerate(connectors.leaves(config.kv_transfer_config)):
        extra = json.dumps(combination.without_sizes(leaf.extra), sort_keys=True, default=str)
        found[f"connector {number}"] = f"{leaf.module or 'vllm'}:{leaf.name} {extra}"
    cache = combination.settings(config, ["cache_config.kv_cache_memory_bytes"])
    additional = getattr(config, "additional_config", None) or {}
    return {
        **found,
        **{name: "set" if value else "not set" for name, value in cache.items()},
        "kvcached's layout": "contiguous" if facts.contiguous else "non-contiguous",
        "additional_config": ", ".join(sorted(set(additional) - set(_WRITTEN))),
        "VLLM_ASCEND variables": ", ".join(
            sorted(name for name in facts.environment if name.startswith(_OWN_VARIABLES))
        ),
        # Of the run of kvpatch verify it is a part, which finds out whether it is right.
        DEBUG.name: DEBUG.is_on(facts.environment) and not VERIFY.read(facts.environment),
    }


def differences(config: Any, facts: Facts) -> Iterator[str]:
    """Iterate over what of a ``VllmConfig`` the engine did not have, in words."""
    found = settings(config, facts)
    for name in [*RAN, *sorted(found.keys() - RAN.keys())]:
        value, ran = found.get(name), RAN.get(name, _UNSET)
        if value not in ran:
            yield f"{name} is {_word(value)} and not {_word(ran[0])}"


def _word(value: Any) -> str:
    return "unset" if value in (None, "") else str(value)
