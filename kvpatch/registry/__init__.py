"""The table: every feature and patch of kvpatch, one file a feature, and nothing else.

docs/patches.md and docs/support.md are generated from it by scripts/docs.
"""

from __future__ import annotations

from kvpatch.registry import (
    audit,
    elastic_memory,
    fence,
    host_device,
    kv_events,
    kvcached_releases,
    observing,
    offloading_connector,
    simple_connector,
    standstill,
    tiers,
)
from kvpatch.registry.releases import KVCACHED_RANGE, VLLM_RANGE

__all__ = ["FEATURES", "KVCACHED_RANGE", "VLLM_RANGE"]

# In the order they are applied.
FEATURES = (
    kvcached_releases.TOLD,
    host_device.FEATURE,
    kvcached_releases.ADAPTED,
    elastic_memory.FEATURE,
    offloading_connector.FEATURE,
    simple_connector.FEATURE,
    fence.FEATURE,
    standstill.FEATURE,
    kv_events.FEATURE,
    tiers.FEATURE,
    audit.FEATURE,
    observing.FEATURE,
)
