"""The stages of a pipeline, whose KV caches kvcached maps alike."""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument
from kvpatch.refusal import Refusal
from kvpatch.sizes import readable


def around_kv_cache_configs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a pipeline whose stages have other layers: a page is mapped at one offset in all.

    kvcached has the offset of a page from the layers of the first stage; in another stage it is
    that of no page. Workers that share a CPU tier also place their part of a block by its size.
    """
    configs = wrapped(*args, **kwargs)
    parallel = argument(args, kwargs, 0, "vllm_config").parallel_config
    if parallel.pipeline_parallel_size == 1:
        return configs
    sizes = [[tensor.size for tensor in config.kv_cache_tensors] for config in configs]
    if any(one != sizes[0] for one in sizes):
        of_stages = [readable(sum(one)) for one in sizes[:: parallel.tensor_parallel_size]]
        raise Refusal(
            f"the stages of this pipeline have KV caches of {' and '.join(of_stages)}",
            "kvcached maps a page of each at one place, so that requests would wait for ever",
            "set VLLM_PP_LAYER_PARTITION so that each stage has as many layers of each kind, or "
            "use tensor parallelism, or run this model without kvcached (ENABLE_KVCACHED=false)",
            code="KVP428",
        )
    return configs
