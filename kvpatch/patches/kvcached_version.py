"""kvcached 0.1.6 on vLLM releases that it rejects.

kvcached supports Model Runner V1 up to vLLM 0.28 and Model Runner V2 up to 0.30, and rejects
later releases in five places, where it selects the variant of a patch by vLLM's version. Each of
these is a row, which substitutes the version that has the variant; overriding one check alone
results in an engine with kvcached's scheduler and vLLM's own memory. What has changed in vLLM
since is in ``kvcached_adapters``, a feature of its own because kvcached checks the version before
it patches vLLM, and kvpatch patches vLLM after that.
"""

from __future__ import annotations

from typing import Any

from kvpatch.patch import argument
from kvpatch.rows import Row, feature
from kvpatch.supported import FLOOR

_PATCHES = "kvcached.integration.vllm.patches"
_ITSELF = "kvcached 0.1.6 patches these releases itself"

# Patches that kvcached registers for vLLM <0.31, and that later releases need as well.
_FOR_LATER = ("model_runner_v2", "kv_layout_v2")
_LATER = ">=0.29.0"

FEATURE = feature(
    __name__,
    summary="kvcached applies its patches for vLLM 0.30 to later releases, and its patches of "
    "EngineCore to Model Runner V1 from 0.29 on",
    since=FLOOR,
    upstream="ovg-project/kvcached, VLLM_MRV2_RANGE in 0.1.6",
    until="kvcached supports vLLM 0.31 and later itself",
    rules="kvpatch.patches.kvcached_adapters.rules:RULES",
    before_kvcached=True,
    seams=(
        Row(
            "kvcached_version.runner_v2",
            "kvcached.integration.patch_base:PatchManager.register_patches_with_versions",
            ":register_for_later_releases(self, patches)",
            "kvcached's V2 adapter is for vLLM <0.31, so the workers bypass its memory",
            since="0.31",
            earlier=_ITSELF,
        ),
        Row(
            "kvcached_version.block_pool",
            f"{_PATCHES}:ElasticBlockPoolPatch.inject_elastic_block_pool",
            ":as_on_0_30(self, block_pool_mod)",
            "the block pool lacks vLLM's hash maps, and the first lookup fails",
            "ovg-project/kvcached, inject_elastic_block_pool in 0.1.6",
            since="0.31",
            earlier=_ITSELF,
        ),
        Row(
            "kvcached_version.coordinator",
            f"{_PATCHES}:KVCacheCoordinatorPatch.patch_coordinator",
            ":as_on_0_30(self, kvcoord_mod)",
            "the scheduler sizes blocks by the old layouts, unlike the workers",
            since="0.31",
            earlier=_ITSELF,
        ),
        Row(
            "kvcached_version.allocate_slots",
            f"{_PATCHES}:KVCacheManagerAllocateSlotsPatch.patch_allocate_slots",
            ":as_on_0_30(self, kvcache_manager_mod)",
            "a partially failed allocation is not rolled back",
            "ovg-project/kvcached, patch_allocate_slots in 0.1.6",
            since="0.31",
            earlier=_ITSELF,
        ),
        Row(
            "kvcached_version.engine_core",
            f"{_PATCHES}:EngineCorePatch.patch_engine_init",
            ":as_on_0_28(self, engine_mod)",
            "EngineCore rejects vLLM 0.31 and later, and Runner V1 from 0.29 on",
            until="kvcached supports vLLM 0.31 and later itself, and Runner V1",
            since="0.29",
            earlier="kvcached 0.1.6 supports Model Runner V1 of these releases",
        ),
    ),
)


def _with_version(version: str, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    actual = instance.detected_version
    instance.detected_version = version
    try:
        return wrapped(*args, **kwargs)
    finally:
        instance.detected_version = actual


def as_on_0_30(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Make kvcached apply a patch as on vLLM 0.30: what it patches is the same up to 0.33."""
    return _with_version("0.30.0", wrapped, instance, args, kwargs)


def as_on_0_28(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Make kvcached patch ``EngineCore.__init__`` as on vLLM 0.28, where it takes both runners."""
    return _with_version("0.28.0", wrapped, instance, args, kwargs)


def register_for_later_releases(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Register kvcached's adapter for Model Runner V2 for later releases too."""
    patches = argument(args, kwargs, 0, "patches")
    return wrapped(
        [(patch, _LATER if patch.patch_name in _FOR_LATER else own) for patch, own in patches]
    )
