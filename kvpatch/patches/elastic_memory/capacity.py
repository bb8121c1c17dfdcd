"""The blocks of a KV cache that kvcached can map: in whole pages, and no more than the device has.

vLLM counts the blocks of a last page that they do not fill: a request that needs them is admitted,
and waits for ever, and so does kvcached for block 0 of a KV cache smaller than a page.
"""

from __future__ import annotations

from typing import Any

from kvpatch.logs import log
from kvpatch.patch import argument
from kvpatch.refusal import Refusal
from kvpatch.sizes import readable
from kvpatch.upstream import kvcached_api, requests
from kvpatch.upstream.kvcached_api import Blocks


def around_kv_caches(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse an engine whose whole pages do not hold one request of the longest length."""
    cache = wrapped(*args, **kwargs)
    if cache.kv_cache_groups:
        require_one_request(instance, cache, kvcached_api.blocks_of(cache))
    return cache


def require_one_request(engine: Any, cache: Any, blocks: Blocks, lower: bool = True) -> None:
    """Refuse a KV cache that has no room for the longest request of an engine without scheduler.

    Args:
        blocks: those of the cache, as kvcached has them.
        lower: whether a length that vLLM chose (``--max-model-len auto``) is lowered instead.
    """
    config, model = engine.vllm_config, engine.vllm_config.model_config
    needed, usable = requests.longest_in_blocks(cache, config), blocks.usable
    if needed <= usable:
        return
    fits = requests.longest_that_fits(cache, config, usable)
    if lower and fits and model.original_max_model_len == -1:
        log.info(
            "kvpatch: max_model_len is %s instead of %s, because %s of the %s blocks are in whole "
            "pages of kvcached",
            fits,
            model.max_model_len,
            usable,
            blocks.number,
        )
        model.max_model_len = fits
        engine.collective_rpc("update_max_model_len", args=(fits,))  # as vLLM does
        return
    more = blocks.for_use(needed)
    size = blocks.bytes_of(more)
    room = f"{readable(size)} on each device"
    if config.cache_config.num_gpu_blocks_override is None:
        remedy = f"set --kv-cache-memory-bytes {size} or more ({room}, {more} blocks)"
    else:
        remedy = f"set --num-gpu-blocks-override {more} or more ({room})"
    raise Refusal(
        f"the KV cache has {blocks.number} blocks, of which kvcached's whole pages hold "
        f"{usable or 'none'}, and a request of {model.max_model_len} tokens needs {needed} with "
        "block 0",
        "kvcached maps no part of a page, and such a request would wait for ever",
        remedy + (f", or --max-model-len {fits} or less" if fits else ""),
        code="KVP425",
    )


def around_allocation(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a worker whose KV cache is larger than its device."""
    blocks = kvcached_api.blocks_of(argument(args, kwargs, 0, "config"))
    size = kvcached_api.device_size(argument(args, kwargs, 1, "device"))
    if not blocks.fit(size):
        raise Refusal(
            f"the KV cache of {readable(blocks.bytes_of(blocks.number))} is larger than the device "
            f"of {readable(size)}",
            "kvcached has addresses for the whole pages of the device only",
            "set a smaller --num-gpu-blocks-override or --kv-cache-memory-bytes",
            code="KVP426",
        )
    return wrapped(*args, **kwargs)
