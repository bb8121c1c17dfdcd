"""Why a test passes without kvpatch and not with it: each cause by the words of its error.

A cause says whose the difference is. One of kvpatch is what it changes on purpose; a difference
that fits no cause makes the lane fail.
"""

import re
from dataclasses import dataclass

from harness.upstream.runner import Outcome

KVCACHED = "kvcached"
KVPATCH = "kvpatch"
LANE = "the lane"


@dataclass(frozen=True)
class Cause:
    """A cause.

    Attributes:
        name: in docs/results and docs/upstream.md.
        of: whose it is: ``KVCACHED``, ``KVPATCH``, or ``LANE`` of the host device and of what the
            plug-ins do in the engine's place.
        why: a sentence.
        words: what the error has in it; a regular expression.
        tests: what the name of the test has in it; a regular expression.
        varies: the same test may pass in the next run.
    """

    name: str
    of: str
    why: str
    words: str = ""
    tests: str = ""
    varies: bool = False


CAUSES = (
    Cause(
        "connector",
        KVPATCH,
        "kvpatch refuses connectors that are not validated (KVP302, KVP391), also inside of "
        "MultiConnector (KVP319).",
        r"KVP302|KVP319|KVP391",
    ),
    Cause(
        "kinds of KV cache",
        KVCACHED,
        "kvcached has no pool for these kinds of KV cache: chunked local attention, cross "
        "attention, HiSparse and scratch groups, rings of compressors, Mamba without attention.",
        r"kvcached MRV2 (supports|requires an attention group)",
    ),
    Cause(
        "queue of free blocks",
        KVCACHED,
        "kvcached's pool has no free_block_queue, in which the test looks; what else the test "
        "checks is not seen.",
        r"'ElasticBlockPool' object has no attribute 'free_block_queue'",
    ),
    Cause(
        "numbers of blocks",
        KVCACHED,
        "kvcached does not hand out the free block that was freed first, and the test expects "
        "the numbers of vLLM's, or that a block that was just freed is not given away yet. Which "
        "numbers there are also depends on the pages that kvcached's thread has prepared.",
        r"\[6, 1, 2, 3\]|diff: \[[\d, ]+\] != \[|block_id=6|"
        r"^AssertionError \[v1/kv_connector/.*/utils\.py\]",
        r"test_prefix_caching\.py|test_request_finished_mixed_full_attn_and_sliding_window",
        varies=True,
    ),
    Cause(
        "NIXL",
        KVCACHED,
        "kvcached refuses NixlConnector in its contiguous layout.",
        r"kvcached NixlConnector requires",
    ),
    Cause(
        "kinds that are not validated",
        KVPATCH,
        "kvpatch refuses to offload a kind of KV cache that is not validated (KVP406).",
        r"KVP406",
    ),
    Cause(
        "release of vLLM",
        KVPATCH,
        "kvpatch tells kvcached which of its adapters the installed release has, and the test "
        "makes the pool of an older release, or of none.",
        r"can only concatenate str|NativeBlockPoolMixin",
        r"test_page_aware_eviction|test_prefix_cache|test_native_metadata_is_selected_from_026",
    ),
    Cause(
        "stand-ins of a pool",
        KVPATCH,
        "kvpatch reads attributes of kvcached's pool or page allocator that the test's stand-in "
        "lacks.",
        r"'KVCacheManager' object has no attribute '(pp_rank|mem_size)'|"
        r"PageAllocator' object has no attribute 'get_num_inuse_pages'",
    ),
    Cause(
        "configuration without a pipeline",
        KVCACHED,
        "kvcached reads pipeline_parallel_size, which the test's stand-in lacks.",
        r"'types\.SimpleNamespace' object has no attribute 'pipeline_parallel_size'",
    ),
    Cause(
        "disk backend",
        KVPATCH,
        "kvpatch refuses SimpleCPUOffloadConnector's own disk, which is not validated (KVP315).",
        r"KVP315",
    ),
    Cause(
        "cached tokens",
        KVCACHED,
        "kvcached keeps up to 16000 cached tokens (KVCACHED_MAX_CACHED_TOKENS), also of those "
        "that prefix_cache_retention_interval would keep.",
        r"assert 0 == 1024",
        r"test_hybrid_local_kv_retention_interval_survives_recycling",
    ),
    Cause(
        "names of folders",
        KVPATCH,
        "The folder of a secondary tier also names the layout of kvcached's blocks and the user, "
        "and its files are not shared between engines of different numbers of ranks, in whose "
        "blocks other layers' bytes would be.",
        tests=r"test_file_mapper\.py|cross_tp_round_trip|replicated_layout_collapses_mapper"
        r"|canonical_mla_dsa_rows_are_tp_independent",
    ),
    Cause(
        "folder refused",
        KVPATCH,
        "A folder that cannot be written to is refused in a sentence (KVP334), and not by an "
        "OSError.",
        r"KVP334",
        r"test_invalid_path_raises_at_construction",
    ),
    Cause(
        "links",
        KVPATCH,
        "A link in the place of a block's file is not followed; it is removed. The test makes a "
        "link that leads to itself.",
        tests=r"test_transient_load_failure_leaves_file",
    ),
    Cause(
        "device of its own",
        LANE,
        "The host device has its own torch.accelerator, where the test puts one.",
        r"'sync', 'region'",
        r"test_gpu_worker\.py",
    ),
)


def cause_of(test: str, found: Outcome) -> Cause | None:
    """Return the cause of a difference, the first that fits; None if none does."""
    for one in CAUSES:
        if re.search(one.words, found.words) and re.search(one.tests, test):
            return one
    return None


VARYING = frozenset(one.name for one in CAUSES if one.varies)
