"""Every feature of kvpatch, one folder or file each, in the order in which they are applied.

What another distribution brings is a device: it comes after what changes kvcached's own patches,
and before what uses the device.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from kvpatch import distributions
from kvpatch.patch import Feature, Patch
from kvpatch.patches import (
    data_parallel,
    deadlock,
    debug,
    elastic_memory,
    fence,
    first_limit,
    host_pool,
    kv_events,
    kvcached_adapters,
    kvcached_version,
    metrics,
    offloading,
    secondary_tiers,
    simple_offload,
    sleep,
    suspend,
)

FEATURES = (
    kvcached_version.FEATURE,
    *distributions.features(),
    kvcached_adapters.FEATURE,
    elastic_memory.FEATURE,
    first_limit.FEATURE,
    offloading.FEATURE,
    simple_offload.FEATURE,
    host_pool.FEATURE,
    fence.FEATURE,
    deadlock.FEATURE,
    kv_events.FEATURE,
    data_parallel.FEATURE,
    secondary_tiers.FEATURE,
    suspend.FEATURE,
    sleep.FEATURE,
    debug.FEATURE,
    metrics.FEATURE,
)


def at(release: Version) -> Iterator[tuple[Feature, tuple[Patch, ...]]]:
    """Iterate over a release's features and their patches; LookupError where a seam has no part."""
    for feature in FEATURES:
        if release in feature.span:
            yield feature, feature.at(release)
