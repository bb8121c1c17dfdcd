"""Refusals: one sentence that stops vLLM or a call, its code, and what it is based on.

Constructing one has no side effect; ``refusal_report`` reports it to the operator.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


class Basis(str, Enum):
    """What a refusal is based on."""

    SETUP = "setup"
    INCOMPATIBLE = "incompatible"
    NOT_VALIDATED = "not validated"


class Code(NamedTuple):
    """One fault.

    Attributes:
        meaning: the fault, for the documentation.
        basis: what the refusal is based on.
        reference: for ``incompatible``, the upstream reference or the test that shows it.
        verifiable: for ``not validated``, whether ``kvpatch verify`` can tell if it is right.
    """

    meaning: str
    basis: Basis
    reference: str = ""
    verifiable: bool = False


UNCODED = "KVP000"


def _setup(meaning: str) -> Code:
    return Code(meaning, Basis.SETUP)


def _not_validated(meaning: str, verifiable: bool = True) -> Code:
    return Code(meaning, Basis.NOT_VALIDATED, verifiable=verifiable)


def _incompatible(meaning: str, reference: str) -> Code:
    return Code(meaning, Basis.INCOMPATIBLE, reference)


# A code means one fault permanently: it is never reused, and a fault that no longer exists
# leaves its number unused.
#
#     KVP1xx  the installation and the environment
#     KVP2xx  the patches
#     KVP3xx  the engine's configuration
#     KVP4xx  the engine's memory
#     KVP5xx  the host device
#     KVP6xx  Ascend NPUs
#
# What is not validated can be verified (``kvpatch verify``) unless a run cannot judge it: copies
# that no audit is known to see (KVP302, KVP319, KVP351), secondary tiers (KVP322, KVP330), KV cache
# events (KVP325), sleep (KVP375), prompts other than text (KVP331), no answers (KVP361),
# nothing to restore (KVP306, KVP358), no patch (KVP203), memory that engines share (KVP342,
# KVP343), an engine that is left alone (KVP370, KVP371, KVP372), limits (KVP373), several
# engines (KVP374), what no folder has (KVP386), what serves (KVP387), an NPU (KVP601, KVP603,
# KVP605, KVP606).
CODES = {
    "KVP101": _setup("`KVPATCH` has an unknown value"),
    "KVP102": _setup("kvcached is switched off by one of its own variables"),
    "KVP103": _setup("vllm or kvcached is not installed as a distribution"),
    "KVP104": _setup("two distributions of one package are installed in different versions"),
    "KVP105": _setup("the version of a package is not a valid PEP 440 version"),
    "KVP106": _not_validated("a package is a development build or a pre-release"),
    "KVP107": _not_validated("a release of vllm or kvcached that is not validated"),
    "KVP108": _setup("kvpatch itself, or wrapt or packaging, cannot be imported"),
    "KVP109": _setup(
        "the startup file did not run, or vllm was imported before kvpatch: nothing is patched"
    ),
    "KVP110": _setup("kvcached cannot be imported"),
    "KVP111": _incompatible(
        "a release of vLLM with a fault that kvpatch does not fix", "`supported.FAULTS`"
    ),
    "KVP112": _setup("vllm is not installed"),
    "KVP113": _setup("a variable of kvpatch or kvcached has a value that cannot be read"),
    "KVP201": _incompatible(
        "a feature cannot be applied: a target is missing or has changed",
        "`test_targets` in tests/unit/test_gate.py",
    ),
    "KVP202": _incompatible(
        "unexpected error while applying patches",
        "`test_an_error_of_our_own_is_a_refusal_too` in tests/unit/test_refusal_report.py",
    ),
    "KVP203": _not_validated("a feature has no patch, or several, for this release", False),
    "KVP204": _incompatible(
        "another package replaced the target of a patch after it was applied",
        "`test_what_vllm_ascend_replaces_after_us_is_refused` in tests/unit/test_ascend.py",
    ),
    "KVP301": _not_validated("Model Runner V1 of vLLM 0.29 or later"),
    "KVP302": _not_validated("a KV connector", False),
    "KVP303": _not_validated("an offloading spec"),
    "KVP304": _incompatible(
        "`canonical_layout`",
        "vllm-project/vllm, the worker certifies the layout on memory of its own allocation only",
    ),
    "KVP305": _not_validated("offloading of a model with latent attention (MLA)"),
    "KVP306": _not_validated("offloading with the prefix cache disabled", False),
    "KVP307": _not_validated("offloading with parallelism other than tensor parallelism"),
    "KVP308": _not_validated("offloading with an executor other than `uni` and `mp`"),
    "KVP309": _not_validated("offloading with speculative decoding"),
    "KVP310": _not_validated("offloading with a KV cache dtype"),
    "KVP311": _not_validated("offloading of a hybrid model"),
    "KVP312": _incompatible(
        "HiSparse", "vllm-project/vllm, HiSparse allocates KV cache outside the model runner"
    ),
    "KVP313": _not_validated("a hybrid model on a release or runner"),
    "KVP314": _incompatible(
        "a KV cache layout that kvcached's memory cannot have",
        "ovg-project/kvcached, kv_layout_v2 in 0.1.6",
    ),
    "KVP315": _not_validated("a `kv_offload_backend`"),
    "KVP316": _incompatible(
        "`lazy_offload` on a vLLM that drops lazy copies",
        "`test_forced.py` in tests/versions, lazy mode on vLLM 0.29",
    ),
    "KVP317": _not_validated("SimpleCPUOffloadConnector on a release"),
    "KVP318": _not_validated("SimpleCPUOffloadConnector on a device"),
    "KVP319": _not_validated("a connector inside MultiConnector", False),
    "KVP320": _incompatible(
        "a MultiConnector with one connector twice",
        "vllm-project/vllm, both name one shared memory by `engine_id`",
    ),
    "KVP321": _incompatible(
        "the `example` tier", "`test_forced.py` in tests/versions, the tier `example`"
    ),
    "KVP322": _not_validated("a secondary tier", False),
    "KVP323": _incompatible(
        "secondary tiers with the scheduling policy `priority`",
        "vllm-project/vllm#57841 (deadlock between requests that wait)",
    ),
    "KVP324": _not_validated("offloading with a scheduler class that is not vLLM's own"),
    "KVP325": _not_validated("KV cache events before vLLM 0.26", False),
    "KVP326": _incompatible(
        "Model Runner V2 before vLLM 0.28", "ovg-project/kvcached, VLLM_MRV2_RANGE in 0.1.6"
    ),
    "KVP327": _incompatible(
        "SimpleCPUOffloadConnector in eager mode with sliding windows before vLLM 0.22",
        "`test_forced.py` in tests/versions, eager windows on vLLM 0.19.1",
    ),
    "KVP328": _not_validated("MultiConnector on a release"),
    "KVP329": _incompatible(
        "secondary tiers before vLLM 0.24",
        "vllm-project/vllm#44541; `test_forced.py` in tests/versions, tiers on vLLM 0.22.1",
    ),
    "KVP330": _not_validated("secondary tiers on a release", False),
    "KVP331": _not_validated("offloading of an encoder-decoder model", False),
    "KVP332": _incompatible(
        "offloading with LoRA adapters", "vllm-project/vllm#27211, vllm-project/vllm#44701"
    ),
    "KVP333": _incompatible(
        "secondary tiers with a hash that is not collision resistant",
        "vllm-project/vllm, `_NON_CRYPTO_HASH_FUNCTIONS` in kv_cache_utils",
    ),
    "KVP334": _setup("the folder of a secondary tier is not this user's alone"),
    "KVP336": _setup("the CPU tier does not fit into /dev/shm"),
    "KVP337": _setup("the CPU tier does not fit into the memory limit of the container"),
    "KVP338": _setup("the CPU tier does not fit into the memory of the machine"),
    "KVP339": _incompatible(
        "a CPU tier that CUDA cannot pin in one range", "vllm-project/vllm#51080"
    ),
    "KVP340": _not_validated(
        "offloading with an fp8 KV cache that no setting turns off, before vLLM 0.22"
    ),
    "KVP341": _not_validated("offloading with sleep mode or the cumem allocator, on a GPU"),
    "KVP342": _not_validated("`KVPATCH_HOST_POOL` on a release", False),
    "KVP343": _not_validated("`KVPATCH_HOST_POOL` with a CPU tier of another kind", False),
    "KVP344": _not_validated("`KVPATCH_HOST_POOL` on a GPU"),
    "KVP345": _setup("`KVPATCH_HOST_POOL` has another size in running engines"),
    "KVP346": _setup("`KVPATCH_HOST_POOL` is smaller than an extent of the CPU tier"),
    "KVP347": _setup("the ledger of the host pool cannot be used"),
    "KVP348": _setup("the host pool does not fit into the memory of the machine"),
    "KVP349": _setup("`KVPATCH_HOST_POOL_FLOOR` is more than `KVPATCH_HOST_POOL`"),
    "KVP350": _setup("the floors of the engines of a host pool are more than the pool"),
    "KVP351": _not_validated("offloading with loads within a step, from vLLM 0.33 on", False),
    "KVP352": _not_validated("a CPU tier of SimpleCPUOffloadConnector that is sized in blocks"),
    "KVP353": _incompatible(
        "weights replaced in a running engine with a KV connector, before vLLM 0.24",
        "vllm-project/vllm, `reset_cache` of SimpleCPUOffloadConnector raises up to 0.23 and "
        "OffloadingConnector has none up to 0.21",
    ),
    "KVP354": _incompatible(
        "the eviction policy `arc` before vLLM 0.17", "vllm-project/vllm#34576"
    ),
    "KVP355": _incompatible(
        "chunks of several blocks of a model with sliding windows, before vLLM 0.33",
        "vllm-project/vllm, from 0.33 on a chunk that would be stored in part is left out",
    ),
    "KVP356": _incompatible(
        "heads of two sizes on memory that is not contiguous, before vLLM 0.30",
        "vllm-project/vllm#48959, vllm-project/vllm#49052",
    ),
    "KVP357": _not_validated("offloading with chunked prefill disabled"),
    "KVP358": _not_validated("`store_threshold`", False),
    "KVP359": _not_validated("chunks of several blocks"),
    "KVP360": _not_validated(
        "offloading of a model with sliding windows without the hybrid KV cache manager"
    ),
    "KVP361": _not_validated("offloading of a pooling model", False),
    "KVP362": _incompatible(
        "SimpleCPUOffloadConnector in a MultiConnector before vLLM 0.22",
        "vllm-project/vllm, MultiConnector has no bind_gpu_block_pool up to 0.21",
    ),
    "KVP363": _incompatible(
        "a hybrid model on Model Runner V2 of vLLM 0.28",
        "ovg-project/kvcached, model_runner_v2_028 in 0.1.6",
    ),
    "KVP364": _incompatible(
        "the `p2p` tier", "`test_peer_tier.py` in tests/objects, a peer that stalls"
    ),
    "KVP365": _setup("`secondary_tiers` or `connectors` is no list of objects"),
    "KVP370": _not_validated("`KVPATCH_IDLE` on a release", False),
    "KVP371": _not_validated("`KVPATCH_IDLE` without a CPU tier alone", False),
    "KVP372": _not_validated("`KVPATCH_IDLE` with `KVPATCH_HOST_POOL`", False),
    "KVP373": _not_validated("`KVPATCH_FIRST_LIMIT` on a release", False),
    "KVP374": _not_validated("data parallelism", False),
    "KVP375": _not_validated("offloading with sleep mode on the host device", False),
    "KVP376": _not_validated("two settings that no engine ran with together"),
    "KVP377": _not_validated("a key of `kv_connector_extra_config` that no engine ran with"),
    "KVP378": _incompatible(
        "an engine whose ranks are on several machines",
        "ovg-project/kvcached, get_worker_socket_path in tp_ipc_util.py in 0.1.6",
    ),
    "KVP385": _setup("`KVPATCH_TIER_SIZE` is less than one block file"),
    "KVP386": _not_validated("`KVPATCH_TIER_SIZE` with a tier that is no folder", False),
    "KVP387": _not_validated("vLLM's Rust frontend", False),
    "KVP388": _incompatible(
        "vLLM's own extensible KV cache", "vllm-project/vllm#56492 (open), which maps memory itself"
    ),
    "KVP389": _not_validated("offloading of experts over several ranks"),
    "KVP390": _not_validated("a setting of vLLM that no engine with a KV connector ran with"),
    "KVP391": _incompatible(
        "a KV connector that registers the addresses of the KV cache for others",
        "`test_a_peer_that_reads_an_unmapped_page_gets_other_bytes_and_no_error` in "
        "tests/objects/test_registered_addresses.py; vllm-project/vllm, "
        "`VllmConfig._verify_kv_transfer_compat`",
    ),
    "KVP392": _incompatible(
        "SimpleCPUOffloadConnector with the prefix cache disabled",
        "`test_simple_without_prefix_cache.py` in tests/engine",
    ),
    "KVP393": _incompatible(
        "a model that keeps sliding windows of latents (DeepSeek-V4)",
        "`test_kvcached_takes_no_windows_of_latents` in tests/engine/test_specs_of_kvcached.py; "
        "ovg-project/kvcached, cache_geometry in 0.1.6",
    ),
    "KVP394": _not_validated("offloading of hybrid models of gated delta nets"),
    "KVP395": _incompatible(
        "OffloadingConnector with drafts by `mtp`, of windows or of a hybrid model in chunks",
        "`test_plain_vllm_finds_nothing_beside_mtp` in tests/versions/test_mtp.py",
    ),
    "KVP401": _incompatible(
        "the scheduler's block pool is not kvcached's", "ovg-project/kvcached#316"
    ),
    "KVP402": _incompatible(
        "a layer's KV cache was allocated outside kvcached's memory", "ovg-project/kvcached#269"
    ),
    "KVP403": _setup("kvcached could not be set up in a worker"),
    "KVP404": _incompatible(
        "kvcached cannot manage the model's KV cache",
        "ovg-project/kvcached, KVCacheCoordinatorPatch in 0.1.6",
    ),
    "KVP405": _incompatible(
        "a layer's KV cache has fewer blocks than the scheduler hands out",
        "`test_too_few_blocks` in tests/unit/test_regions.py",
    ),
    "KVP406": _not_validated("a kind of KV cache"),
    "KVP407": _incompatible(
        "a block has another size in memory than in vLLM's KV cache config",
        "`test_a_block_of_another_size_than_the_plans_is_refused` in "
        "tests/unit/test_offloading_legacy.py",
    ),
    "KVP408": _incompatible(
        "the connector copies memory that is not kvcached's", "ovg-project/kvcached#269"
    ),
    "KVP409": _incompatible(
        "the connector's CPU blocks are in kvcached's pool",
        "ovg-project/kvcached, KVCacheCoordinatorPatch in 0.1.6",
    ),
    "KVP410": _incompatible(
        "the connector registered memory other than kvcached's regions",
        "`test_simple_refusals.py` in tests/unit",
    ),
    "KVP411": _incompatible(
        "the primary tier has another size in the worker than in the scheduler",
        "`test_simple_refusals.py` in tests/unit",
    ),
    "KVP412": _incompatible(
        "a secondary tier is created before the KV cache is described",
        "`test_tier_rules.py` in tests/unit",
    ),
    "KVP413": _setup("another engine uses or used the same `engine_id` for its primary tier"),
    "KVP414": _setup("another engine uses the same kvcached name"),
    "KVP415": _not_validated("layers that share their KV cache on Model Runner V1"),
    "KVP416": _setup("a file or folder of the engine belongs to, or is open to, another user"),
    "KVP417": _setup("a file of the engine cannot be made in /dev/shm"),
    "KVP418": _not_validated("a KV cache dtype that the layers of the model have by themselves"),
    "KVP419": _setup("a process keeps the claims of names in /dev/shm locked"),
    "KVP421": _incompatible(
        "a worker did not open the CPU tier of the host pool",
        "`test_host_pool_classes.py` in tests/engine",
    ),
    "KVP422": _setup("a copy between the device and the CPU tier failed, and the engine ends"),
    "KVP423": _incompatible(
        "a model of sliding windows alone with OffloadingConnector before vLLM 0.21",
        "vllm-project/vllm#41445",
    ),
    "KVP424": _setup("`KVPATCH_FIRST_LIMIT` is less than one request needs"),
    "KVP425": _setup("the whole pages of the KV cache hold less than one request needs"),
    "KVP426": _setup("the KV cache is larger than the device"),
    "KVP427": _setup("the name of the CPU tier in /dev/shm was removed while the engine started"),
    "KVP428": _incompatible(
        "a pipeline whose stages have different layers", "ovg-project/kvcached, `map_to_kv_tensors`"
    ),
    "KVP429": _setup("kvcached did not reserve block 0"),
    "KVP501": _setup("no GPU, and kvcached is built for one"),
    "KVP502": _setup("the host device has no size"),
    "KVP503": _setup("the host device has another size in running processes"),
    "KVP504": _setup("the host device is needed or asked for, and not installed"),
    "KVP505": _setup("the KV cache is larger than the host device"),
    "KVP601": _not_validated(
        "a release of vllm-ascend, or another vLLM than it is built for", False
    ),
    "KVP602": _setup("the device is an NPU, and kvcached is not built for one"),
    "KVP603": _not_validated("an engine on an NPU that the probe has not passed", False),
    "KVP604": _incompatible("OffloadingConnector on an NPU", "vllm-project/vllm-ascend#13389"),
    "KVP605": _not_validated("KV caches of other kinds than full attention on an NPU", False),
    "KVP606": _not_validated("what engines on an NPU have not been run with", False),
    "KVP607": _setup("vllm-ascend is installed, and kvpatch-ascend is not"),
}


# The codes of refusals that a verdict of kvpatch verify lifts, and the end of their sentences.
VERIFIABLE = frozenset(code for code, fault in CODES.items() if fault.verifiable)
VERIFY_IT = ", or test it on this machine with kvpatch verify -- COMMAND"


class Refusal(RuntimeError):
    """Stops vLLM at start-up with one sentence: what, why, what to do.

    A RuntimeError, because kvcached re-raises those and only logs other exceptions.

    Args:
        what: the unsupported combination or setting.
        why: the reason.
        remedy: what the operator can do about it, as an imperative.
        code: one of ``CODES``, for lookup in the documentation.

    Attributes:
        opening: how the sentence begins.
        final: whether its process ends by it.
        ways_out: the remedy, and kvpatch verify where that can lift it.
    """

    opening = "kvpatch refuses to start vLLM"
    final = True

    def __init__(self, what: str, why: str, remedy: str, code: str = UNCODED) -> None:
        self.ways_out = remedy + (VERIFY_IT if code in VERIFIABLE else "")
        sentence = f"{self.opening}: {what}, because {why}; {self.ways_out}. [{code}]"
        # A quoted error may have several lines; the refusal must fit in one.
        super().__init__(" ".join(sentence.split()))
        self.what = what
        self.why = why
        self.remedy = remedy
        self.code = code

    @property
    def basis(self) -> Basis:
        """What the refusal is based on."""
        return CODES[self.code].basis

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the pickling between an engine's processes."""
        return (type(self), (self.what, self.why, self.remedy, self.code))


class RefusedCall(Refusal):
    """A refusal of one call to a running engine, which goes on."""

    opening = "kvpatch refuses the call"
    final = False


class Halted(Refusal):
    """The end of a running engine, which could only go on with wrong tokens or stand still."""

    opening = "kvpatch ends the engine"


class RefusedImport(Refusal, ImportError):
    """A refusal of ``import vllm`` itself.

    An ImportError, so that a program for which vllm is optional continues without it,
    as if vllm were not installed.
    """

    def __init__(self, what: str, why: str, remedy: str, code: str = UNCODED) -> None:
        super().__init__(what, why, remedy, code)
        self.name = "vllm"

    @classmethod
    def of(cls, refusal: Refusal) -> RefusedImport:
        """Return ``refusal`` as the error of the import that it stops."""
        return cls(refusal.what, refusal.why, refusal.remedy, refusal.code)
