"""Every rule on the engine's configuration, by its sentence."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import facts, namespace, raising, transfer

from harness import parallel_drafts
from harness.matrix import admission
from kvpatch import admitted, patches, rules, supported
from kvpatch.environ import (
    FIRST_LIMIT,
    HOST_DEVICE,
    HOST_POOL,
    HOST_POOL_FLOOR,
    IDLE,
    VLLM_KV_CACHE_LAYOUT,
    VLLM_USE_V2_MODEL_RUNNER,
)
from kvpatch.host_memory import HostMemory
from kvpatch.patches.elastic_memory import configuration, lifting
from kvpatch.patches.kvcached_adapters.rules import V1_ON_LATER
from kvpatch.patches.offloading import place
from kvpatch.patches.offloading.rules import DRAFTING
from kvpatch.pool import ledger
from kvpatch.pool.record import Limit, Owner
from kvpatch.refusal import VERIFIABLE, VERIFY_IT, Refusal
from kvpatch.rules import Rule
from kvpatch.status import Record
from kvpatch.supported import in_ranges, validated
from kvpatch.upstream import connector_keys
from kvpatch.versions import Span

ERRORS = Path(__file__).parents[2] / "docs/errors.md"
RULES = rules.of(feature.rules for feature in patches.FEATURES)


def words(span):
    """The validated releases of a span, as a sentence has them."""
    return in_ranges(validated(span))


def check(made, here=None, **more):
    """The refusal of a configuration, on the machine that it names."""
    return rules.check(made, here or facts(**made.machine), RULES, **more)


def code_of(**changes):
    """The code of the refusal of a configuration with ``changes``, or None."""
    refused = check(config(**changes))
    return None if refused is None else refused.code


def breaks(code, changes):
    """Whether a configuration breaks a rule, whatever others it breaks as well."""
    made = config(**changes)
    return code in {one.code for one in rules.refusals(made, facts(**made.machine), RULES)}


def config(connector=True, **changes):
    """A configuration that passes; ``changes`` are dotted names with ``__`` for the dot."""
    machine = {name: value for name, value in changes.items() if name.startswith("machine__")}
    made = namespace(
        machine={name.removeprefix("machine__"): value for name, value in machine.items()},
        use_v2_model_runner=False,
        attention_config=SimpleNamespace(),
        kv_transfer_config=transfer("OffloadingConnector") if connector else None,
        scheduler_config__policy="fcfs",
        scheduler_config__scheduler_cls=None,
        scheduler_config__enable_chunked_prefill=True,
        scheduler_config__disable_hybrid_kv_cache_manager=False,
        cache_config__enable_prefix_caching=True,
        cache_config__cache_dtype="auto",
        parallel_config__data_parallel_size=1,
        parallel_config__decode_context_parallel_size=1,
        parallel_config__distributed_executor_backend="mp",
        speculative_config=None,
        kv_events_config=None,
        model_config__is_hybrid=False,
        model_config__is_encoder_decoder=False,
        model_config__use_mla=False,
        model_config__architecture="JambaForCausalLM",
        model_config__enforce_eager=True,
        model_config__enable_sleep_mode=False,
        model_config__get_sliding_window=lambda: None,
        model_config__hf_text_config=SimpleNamespace(),
        **ranks(1),
    )
    return namespace(made, **{n: value for n, value in changes.items() if n not in machine})


def spec(name, module=None):
    return chunks(spec_name=name, **({"spec_module_path": module} if module else {}))


def simple(**extra):
    connector = {"kv_transfer_config__kv_connector": "SimpleCPUOffloadConnector"}
    return connector | chunks(**extra)


def chunks(**extra):
    return {"kv_transfer_config__kv_connector_extra_config": extra}


def extra_of(changes):
    return changes["kv_transfer_config__kv_connector_extra_config"]


def tiers(*types):
    return chunks(
        spec_name="TieringOffloadingSpec", secondary_tiers=[{"type": name} for name in types]
    )


def multi(*inside, **more):
    return of_connectors([{"kv_connector": name, "kv_role": "kv_both"} | more for name in inside])


def of_connectors(inside):
    """A MultiConnector."""
    connector = {"kv_transfer_config__kv_connector": "MultiConnector"}
    return connector | chunks(connectors=inside)


def at(release):
    """A release of vLLM."""
    return {"machine__vllm": release}


def v2(release):
    """A release, on Model Runner V2."""
    return at(release) | {"use_v2_model_runner": True}


IN_MULTI = multi("OffloadingConnector")
V2_OF_29, V2_OF_30, V2_OF_32 = v2("0.29.0"), v2("0.30.0"), v2("0.32.0")
V2_OF_33, V2_OF_34 = v2("0.33.0"), v2("0.34.0")


def ranks(tensor, stages=1, world=0):
    """Tensor parallelism, in stages; of ``world`` ranks, where that is not their product."""
    return {
        "parallel_config__world_size": world or tensor * stages,
        "parallel_config__tensor_parallel_size": tensor,
        "parallel_config__pipeline_parallel_size": stages,
    }


def engines(count):
    """Engines of one server, on this machine."""
    return {
        "parallel_config__data_parallel_size": count,
        "parallel_config__data_parallel_size_local": count,
    }


ONE_RANK, TWO_RANKS, FOUR_RANKS = ranks(1), ranks(2), ranks(4)
STAGES, STAGES_OF_RANKS = ranks(1, stages=2), ranks(2, stages=2)
ENGINES = {"machine__device": "cpu"} | engines(2) | ONE_RANK
HYBRID = {"model_config__is_hybrid": True}
DELTA_NETS = HYBRID | {"model_config__hf_text_config": SimpleNamespace(linear_num_value_heads=2)}
LATENT = {"model_config__use_mla": True}
EVENTS = {"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}
POOLING = {"model_config__runner_type": "pooling"}
FP8, BFLOAT16 = {"cache_config__cache_dtype": "fp8"}, {"cache_config__cache_dtype": "bfloat16"}
NO_PREFIX_CACHE = {"cache_config__enable_prefix_caching": False}
SLEEP = {"model_config__enable_sleep_mode": True}
ASLEEP = {"machine__device": "cpu"} | SLEEP | ONE_RANK
ON_HOST = {"machine__device": "cpu", "machine__environment": {HOST_DEVICE.name: "256MiB"}}
DRAFTS = {"speculative_config": SimpleNamespace(method="ngram")}
# As compressed-tensors has it, from a checkpoint of llm-compressor.
SCHEME = {"quant_config": SimpleNamespace(kv_cache_scheme={"num_bits": 8, "type": "float"})}
GIB = 1 << 30
ROOMY = HostMemory(100 * GIB, 100 * GIB, 100 * GIB, 0)


def tier(size, **free):
    """A CPU tier of ``size`` GiB, on a host whose memory is free but for ``free`` GiB."""
    given = {name: left and left * GIB for name, left in free.items()}
    return chunks(cpu_bytes_to_use=size * GIB) | {"machine__memory": ROOMY._replace(**given)}


def pooled(size="64GiB", floor="", **machine):
    """A machine with a host pool."""
    given = {"machine__vllm": "0.28.0", "machine__device": "cpu"} | machine
    kept = {HOST_POOL_FLOOR.name: floor} if floor else {}
    return given | {"machine__environment": {HOST_POOL.name: f"{size}@rules"} | kept}


def of_environment(**variables):
    return {"machine__environment": variables}


ARC = chunks(eviction_policy="arc")
WINDOWS = {"model_config__get_sliding_window": lambda: 4096}
NO_GROUPS = {"scheduler_config__disable_hybrid_kv_cache_manager": True}
TWO_SIZES = {
    "model_config__hf_text_config": SimpleNamespace(global_head_dim=512),
    "machine__contiguous": False,
}
SYNC_LOADS = {"sync_load_budget_bytes": 1 << 30}
CONNECTORS = [{}, simple(), IN_MULTI, tiers("fs")]
IDLE_30S = of_environment(**{IDLE.name: "30s"})

# By the code of a rule, what it refuses, after what the sentence says of it where that has values
# of the configuration. Why and what to do then is in docs/errors.md.
NO_LIST = {"type": "fs", "root_dir": "/tiers"}, ["fs"], "fs", [{"type": "fs"}, "fs"]
OF_TIERS = [{"spec_name": "TieringOffloadingSpec", "secondary_tiers": one} for one in NO_LIST]
EXAMPLE = {"kv_transfer_config__kv_connector": "ExampleConnector"}
COMPRESSES = SimpleNamespace(index_topk=64, compress_rates={"compressed_sparse_attention": 4})
WHOLE = {"scheduler_config__enable_chunked_prefill": False}
MTP = {"speculative_config": SimpleNamespace(method="mtp")}
LORA = {"lora_config": SimpleNamespace()}
OF_FP8 = FP8 | ONE_RANK | V2_OF_30
DTYPE = "a KV connector is configured with the KV cache dtype"
FULL = "for a model that is not of full attention alone"
CASES = {
    "KVP301": [at("0.34.0")],
    # Without a connector: test_hybrid_models_where_kvcached_has_no_adapter.
    "KVP313": ["JambaForCausalLM has state-space layers"],
    "KVP314": [
        "VLLM_KV_CACHE_LAYOUT=LBHNC is set and kvcached's memory is contiguous",
        V2_OF_30 | of_environment(**{VLLM_KV_CACHE_LAYOUT.name: "LBHNC"}),
    ],
    "KVP326": [v2("0.27.1")],
    "KVP363": ["JambaForCausalLM runs on Model Runner V2"],  # as KVP313
    "KVP387": [of_environment(VLLM_USE_RUST_FRONTEND="1")],
    "KVP388": [{"cache_config__enable_extensible_kv_cache": True}],
    "KVP604": [{"machine__device": "npu"} | ONE_RANK],
    "KVP606": [
        "on an NPU kv_transfer_config.kv_role is unset and not kv_both",
        {"machine__device": "npu", "kv_transfer_config__kv_connector": "SimpleCPUOffloadConnector"},
    ],
    "KVP505": [
        "the KV cache is to have 1.0 GiB, and KVPATCH_HOST_DEVICE is 256 MiB",
        ON_HOST | {"cache_config__kv_cache_memory_bytes": 1 << 30},
        # By another name up to 0.19, where --kv-cache-memory-bytes is not read.
        ON_HOST
        | {
            "machine__vllm": "0.19.1",
            "cache_config__cpu_kvcache_space_bytes": 1 << 30,
            "cache_config__kv_cache_memory_bytes": 1 << 20,
        },
    ],
    "KVP375": [ASLEEP | at("0.31.0"), ASLEEP | TWO_RANKS, ASLEEP | IN_MULTI, ASLEEP | tiers("fs")],
    "KVP312": [{"attention_config__hisparse_config": SimpleNamespace()}],
    "KVP378": [
        "the ranks of this engine are on 2 machines",
        {"parallel_config__nnodes_within_dp": 2},
    ],
    "KVP373": [of_environment(**{FIRST_LIMIT.name: "8GiB"}) | at("0.27.0")],
    "KVP365": [
        "secondary_tiers is not a list of objects",
        *(chunks(**extra) for extra in OF_TIERS),
        multi("OffloadingConnector", kv_connector_extra_config=OF_TIERS[0]),
        "connectors is not a list of objects",
        of_connectors({"kv_connector": "OffloadingConnector"}),
        of_connectors(["OffloadingConnector"]),
    ],
    "KVP391": [
        "the KV connector NixlConnector is configured",
        {"kv_transfer_config__kv_connector": "NixlConnector"},
        multi("OffloadingConnector", "NixlConnector"),
        multi("NixlConnector", "OffloadingConnector"),
    ],
    "KVP302": [
        "the KV connector ExampleConnector is configured",
        EXAMPLE,
        EXAMPLE | {"kv_transfer_config__kv_connector_module_path": "mine"},
    ],
    "KVP328": [IN_MULTI | at("0.25.9"), IN_MULTI | V2_OF_34],
    "KVP362": [
        multi("OffloadingConnector", "SimpleCPUOffloadConnector") | at("0.21.0"),
        multi("SimpleCPUOffloadConnector") | at("0.19.0"),
    ],
    "KVP319": [
        "a MultiConnector is configured with LMCacheConnectorV1 inside",
        multi("OffloadingConnector", "LMCacheConnectorV1"),
        multi("LMCacheConnectorV1", "OffloadingConnector"),
        multi("LMCacheConnectorV1", "LMCacheConnectorV1"),
    ],
    "KVP320": [
        "a MultiConnector is configured with OffloadingConnector twice",
        multi("OffloadingConnector", "OffloadingConnector"),
    ],
    "KVP303": [
        "the offloading spec MySpec is configured",
        spec("MySpec", "some.module"),
        multi("OffloadingConnector", kv_connector_extra_config={"spec_name": "MySpec"}),
        "the offloading spec HostOffloadingSpec is configured",
        spec("HostOffloadingSpec", "mine"),
    ],
    "KVP304": [
        chunks(canonical_layout=True),
        multi("OffloadingConnector", kv_connector_extra_config={"canonical_layout": True}),
    ],
    "KVP354": [ARC | at("0.16.0")],
    "KVP355": [
        WINDOWS | chunks(block_size=64),
        WINDOWS | chunks(blocks_per_chunk=2) | V2_OF_32,
        WINDOWS | multi("OffloadingConnector", kv_connector_extra_config={"block_size": 64}),
    ],
    "KVP356": [TWO_SIZES, TWO_SIZES | IN_MULTI],
    "KVP351": [chunks(**SYNC_LOADS) | V2_OF_33],
    "KVP305": [
        "a KV connector is configured for JambaForCausalLM",
        LATENT | ONE_RANK | V2_OF_34,
        LATENT | V2_OF_34 | TWO_RANKS,
        LATENT
        | ONE_RANK
        | V2_OF_32
        | {"model_config__hf_text_config": SimpleNamespace(index_topk=64)},
    ],
    "KVP393": [
        "a KV connector is configured for JambaForCausalLM",
        LATENT | ONE_RANK | V2_OF_32 | {"model_config__hf_text_config": COMPRESSES},
    ],
    "KVP306": [NO_PREFIX_CACHE | V2_OF_34, NO_PREFIX_CACHE | V2_OF_32 | WINDOWS],
    "KVP357": [WHOLE | V2_OF_34, WHOLE | {"model_config": None} | V2_OF_32],
    "KVP358": [
        chunks(store_threshold=2),  # of 0.28.0, which counts lookups
        chunks(store_threshold="2") | V2_OF_34,
        chunks(store_threshold=2) | V2_OF_32 | WINDOWS,
    ],
    "KVP359": [
        chunks(block_size=64) | V2_OF_34,
        chunks(blocks_per_chunk=2) | V2_OF_34 | WINDOWS,
        chunks(block_size=64) | ONE_RANK | LATENT | V2_OF_32,
    ],
    "KVP360": [NO_GROUPS | WINDOWS | V2_OF_34],
    "KVP307": [
        ranks(1, world=4),
        STAGES | V2_OF_34,
        STAGES | V2_OF_32 | WINDOWS,
        STAGES | V2_OF_30 | HYBRID,
        STAGES | V2_OF_32 | tiers("fs"),
        STAGES_OF_RANKS | V2_OF_34,
        ranks(3, stages=2) | V2_OF_32,
        ranks(1, stages=2, world=4),
        {"parallel_config__decode_context_parallel_size": 2},
    ],
    "KVP308": [
        "a KV connector is configured with the executor ray",
        {"parallel_config__distributed_executor_backend": "ray"},
    ],
    "KVP324": [
        "a KV connector is configured with the scheduler builtins.dict",
        {"scheduler_config__scheduler_cls": "builtins.dict"},
        {"scheduler_config__scheduler_cls": dict},
    ],
    "KVP309": [
        "a KV connector is configured with speculative decoding by ngram",
        DRAFTS | ONE_RANK | V2_OF_34,
        DRAFTS | ONE_RANK | V2_OF_32 | LATENT,
        DRAFTS | ONE_RANK | V2_OF_32 | WINDOWS,
        DRAFTS | ONE_RANK | V2_OF_32 | {"model_config": None},
    ],
    "KVP395": [
        MTP | ONE_RANK | V2_OF_33 | WINDOWS,
        MTP | ONE_RANK | V2_OF_33 | HYBRID | chunks(blocks_per_chunk=2),
    ],
    "KVP340": [
        *(
            SCHEME | {"machine__vllm": release, "cache_config__cache_dtype": dtype}
            for release in ("0.16.0", "0.19.1")
            for dtype in ("auto", "bfloat16")
        )
    ],
    "KVP310": [
        f"{DTYPE} fp8",
        FP8 | ONE_RANK | at("0.20.2"),
        FP8 | ONE_RANK | {"model_config": None},
        FP8 | V2_OF_34,
        f"{DTYPE} fp8 and --calculate-kv-scales",  # by the first requests
        OF_FP8 | {"cache_config__calculate_kv_scales": True},
        f"{DTYPE} fp8 in some of the layers",
        OF_FP8 | {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        f"{DTYPE} fp8 {FULL} (latent attention)",
        OF_FP8 | LATENT,
        f"{DTYPE} fp8 {FULL} (hybrid)",
        OF_FP8 | HYBRID,
        f"{DTYPE} fp8 {FULL} (sliding window)",
        OF_FP8 | WINDOWS,
        # As vLLM's Attention.__init__ decides, in the worker; it was admitted as ``auto``.
        f"{DTYPE} fp8, by the checkpoint's kv_cache_scheme, {FULL} (sliding window)",
        *(SCHEME | WINDOWS | ONE_RANK | at(release) for release in ("0.22.1", "0.26.0")),
        f"{DTYPE} fp8_ds_mla",
        V2_OF_32 | {"cache_config__cache_dtype": "fp8_ds_mla"},
        f"{DTYPE} fp8_per_token_head",
        V2_OF_32 | {"cache_config__cache_dtype": "fp8_per_token_head"},
        f"{DTYPE} nvfp4",
        V2_OF_32 | {"cache_config__cache_dtype": "nvfp4"},
    ],
    "KVP311": [
        "a KV connector is configured for JambaForCausalLM",
        HYBRID | FOUR_RANKS | V2_OF_32 | simple(lazy_offload=True),
        HYBRID | ONE_RANK | V2_OF_30 | LATENT,
    ],
    "KVP394": [
        "a KV connector is configured for JambaForCausalLM, a hybrid of gated delta nets",
        DELTA_NETS | ONE_RANK | V2_OF_30,
    ],
    "KVP331": [
        "a KV connector is configured for JambaForCausalLM",
        {"model_config__is_encoder_decoder": True},
    ],
    "KVP361": [
        "a KV connector is configured for JambaForCausalLM, which is run for its pooled states",
        POOLING | TWO_RANKS,
        POOLING | ONE_RANK | at("0.27.1"),
        POOLING | ONE_RANK | V2_OF_29 | simple(),
        POOLING | ONE_RANK | WINDOWS,
        POOLING | ONE_RANK | tiers("fs"),
        POOLING | ONE_RANK | IN_MULTI,
    ],
    "KVP332": [LORA, tiers("fs") | LORA],
    "KVP377": [
        "cache_policy_module_path is set in kv_connector_extra_config",
        chunks(cache_policy_module_path=1),
        chunks(cache_policy_module_path=1) | V2_OF_32,
    ],
    "KVP389": [
        "a KV connector is configured with experts over several ranks and expert parallelism",
        TWO_RANKS | {"parallel_config__enable_expert_parallel": True},
    ],
    "KVP390": [
        "a KV connector is configured, and enable_dbo is set",
        {"parallel_config__enable_dbo": True},
    ],
    "KVP336": [
        "the CPU tier takes 64.0 GiB and /dev/shm has 2.0 GiB free",
        tier(64, shm=2),
        tier(64, shm=2, container=None),
        # As large as a /dev/shm that has some files.
        "the CPU tier takes 68719476736 bytes and /dev/shm has 68719472640 bytes free",
        tier(64) | {"machine__memory": ROOMY._replace(shm=64 * GIB - 4096)},
    ],
    "KVP337": [
        "the CPU tier takes 64.0 GiB and the memory limit of this container has 30.0 GiB left",
        tier(64, container=30),
        tier(64, container=30, swap=1),
    ],
    "KVP338": [
        "the CPU tier takes 256.0 GiB (130.0 GiB before torch rounds it) and this machine has "
        "120.0 GiB available",
        tier(130, available=120, container=None) | ONE_RANK | at("0.26.0"),
        tier(130, available=120, container=None, swap=8) | at("0.26.0"),
    ],
    "KVP339": [
        tier(512, shm=900, container=None, available=900),
        tier(1024, shm=0, container=None, available=1100)
        | V2_OF_32
        | {"kv_transfer_config__kv_connector": "SimpleCPUOffloadConnector"},
    ],
    "KVP315": [
        "the kv_offload_backend disk is configured",
        simple(kv_offload_backend="disk", disk_path="/tmp/x"),
    ],
    "KVP392": [
        NO_PREFIX_CACHE | V2_OF_32 | simple(),
        NO_PREFIX_CACHE | V2_OF_32 | multi("OffloadingConnector", "SimpleCPUOffloadConnector"),
    ],
    "KVP352": [
        simple(num_cpu_blocks=100),
        multi("SimpleCPUOffloadConnector", kv_connector_extra_config={"num_cpu_blocks": 100}),
    ],
    "KVP316": [simple(lazy_offload=True) | V2_OF_29],
    "KVP317": [simple(lazy_offload=True) | V2_OF_34, simple() | at("0.23.9")],
    "KVP327": [simple() | WINDOWS | at("0.19.1")],
    "KVP318": [simple() | {"machine__device": "xpu"}],
    "KVP342": [pooled(machine__vllm="0.26.0"), pooled() | V2_OF_34],
    "KVP343": [
        pooled(machine__vllm="0.32.0") | multi("SimpleCPUOffloadConnector"),
        pooled(machine__vllm="0.32.0") | multi("OffloadingConnector", "SimpleCPUOffloadConnector"),
    ],
    "KVP349": [pooled(floor="65GiB"), of_environment(**{HOST_POOL_FLOOR.name: "1GiB"})],
    "KVP344": [pooled(machine__device="cuda")],
    "KVP348": [
        "an engine may take 64.0 GiB of the host pool, and /dev/shm and the memory of this machine "
        "and its container have 32.0 GiB for it",
        pooled() | tier(64, shm=32),
        pooled("100GiB") | tier(64, container=32),
        pooled() | tier(80, available=20, container=None, swap=12),
    ],
    "KVP325": [EVENTS | at("0.25.1")],
    "KVP374": [
        "data parallelism over 2 engines is configured",
        ENGINES | at("0.25.1"),
        ENGINES | V2_OF_32 | {"machine__device": "cuda"},
    ],
    "KVP329": [tiers("fs") | at("0.22.1")],
    "KVP330": [tiers("fs") | V2_OF_34],
    "KVP321": [tiers("example"), tiers("fs", "example")],
    "KVP364": [tiers("p2p"), tiers("fs", "p2p")],
    "KVP322": [
        "the secondary tier obj is configured",
        tiers("obj"),
        tiers("fs", "obj"),
        multi("OffloadingConnector", kv_connector_extra_config=extra_of(tiers("obj"))),
    ],
    "KVP323": [tiers("fs") | {"scheduler_config__policy": "priority"}],
    "KVP333": [
        "a secondary tier is configured with prefix_caching_hash_algo xxhash",
        tiers("fs") | {"cache_config__prefix_caching_hash_algo": "xxhash"},
    ],
    "KVP386": [tiers("fs", "obj") | at("0.32.0") | of_environment(KVPATCH_TIER_SIZE="1GiB")],
    "KVP370": [IDLE_30S | at("0.27.0")],
    "KVP372": [
        simple()
        | {"machine__vllm": "0.32.0", "machine__device": "cpu"}
        | of_environment(**{IDLE.name: "30s", HOST_POOL.name: "1GiB@rules"})
    ],
    "KVP371": [
        *(
            multi(inside) | at("0.32.0") | IDLE_30S
            for inside in ("OffloadingConnector", "SimpleCPUOffloadConnector")
        )
    ],
    "KVP341": [
        "a KV connector is configured with sleep mode",
        *(SLEEP | one for one in (*CONNECTORS, simple(lazy_offload=True))),
        SLEEP | {"model_config__enable_cumem_allocator": True},
        *(SLEEP | at(release) for release in ("0.16.0", "0.32.0")),
        "a KV connector is configured with the cumem allocator",
        {"model_config__enable_cumem_allocator": True},
    ],
    "KVP376": [
        "KV cache events and a pooling model are configured together",
        POOLING | V2_OF_30 | EVENTS,
        POOLING | V2_OF_30 | simple() | EVENTS,
    ],
}


def the_rule(code):
    (found,) = (rule for rule in RULES if rule.code == code)
    return found


def each_case():
    """Every configuration of ``CASES``, with the code and what the sentence says of it."""
    for code, case in CASES.items():
        what = the_rule(code).what
        for number, one in enumerate(case):
            if isinstance(one, str):
                what = one
            else:
                yield pytest.param(code, what, one, id=f"{code}-{number}")


@cache
def documented():
    """By the code of a rule, why it refuses and what to do, as docs/errors.md has them."""
    rows = (line.split(" | ") for line in ERRORS.read_text().splitlines() if " | " in line)
    return {row[0].strip("|` "): (row[2], row[4].removesuffix(" |")) for row in rows}


def sentence_of(code, vllm="", what=None):
    """The sentence of a rule on a release, which it names; what can be verified ends with how."""
    why, remedy = documented()[code]
    verify = VERIFY_IT if code in VERIFIABLE else ""
    if what is None:
        what = CASES[code][0] if callable(the_rule(code).what) else the_rule(code).what
    said = f"{what}, because {why}; {remedy}, or set KVPATCH=0{verify}. [{code}]"
    return f"kvpatch refuses to start vLLM: {said}".replace("this release", f"vLLM {vllm}")


@pytest.mark.parametrize("beside", [FP8, TWO_RANKS, EVENTS], ids=["fp8", "ranks", "events"])
def test_an_object_tier_ran_with_nothing_else(beside):
    alone = ONE_RANK | V2_OF_32
    assert code_of(**tiers("obj") | alone) is code_of(**tiers("fs") | alone | beside) is None
    assert code_of(**tiers("obj") | alone | beside) == "KVP376"


def test_two_settings_start_where_an_engine_ran_with_both(monkeypatch):
    made = config(**EVENTS, **TWO_RANKS, **V2_OF_32)
    monkeypatch.setattr(admitted, "table", dict)
    assert check(made).code == "KVP376"
    for connector, starts in (("Offloading", True), ("Simple", False)):
        ran_with = {"KV events + several ranks": {"0.32.0": [connector]}}
        monkeypatch.setattr(admitted, "table", lambda ran_with=ran_with: ran_with)
        assert (check(made) is None) is starts


def test_every_rule_has_its_case():
    assert sorted(CASES) == sorted(rule.code for rule in RULES)


@pytest.mark.parametrize(("code", "what", "changes"), list(each_case()))
def test_the_rule_refuses_with_its_sentence(code, what, changes):
    made = config(**changes)
    said = str(check(made))
    assert said == sentence_of(code, facts(**made.machine).vllm.public, what)
    variables = made.machine.get("environment")
    assert not variables or any(name in said for name in variables)
    broken = [rule for rule in RULES if rule.refusal(made, facts(**made.machine))]
    assert [rule.code for rule in broken if not rule.last or rule.code == code] == [code]
    # Without a connector only what kvcached cannot run matters.
    changes = {n: v for n, v in changes.items() if not n.startswith("kv_transfer_config")}
    wanted = code if not the_rule(code).with_connector else None
    if changes.get("machine__device") == "npu":
        wanted = "KVP606"  # which refuses an engine without one
    if code == "KVP372":
        wanted = "KVP371"  # an idle one has nowhere to store
    assert code_of(connector=False, **changes) == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {},
        spec("CPUOffloadingSpec"),
        spec("HostOffloadingSpec", "kvpatch.hostdevice.offloading"),
        simple(),
        simple(lazy_offload=True, kv_offload_backend="cpu"),
        simple(spec_name="TieringOffloadingSpec"),  # a key that it does not read
        simple() | {"machine__device": "cpu"},
        {"use_v2_model_runner": True},
        simple(lazy_offload=True) | {"use_v2_model_runner": True},
        IN_MULTI | {"use_v2_model_runner": True},
        simple() | at("0.32.0"),
        LATENT | V2_OF_29 | ONE_RANK,
        HYBRID | V2_OF_30 | ONE_RANK,
        LATENT | V2_OF_29 | ONE_RANK | simple(),
        POOLING | ONE_RANK,
        POOLING | ONE_RANK | V2_OF_30 | simple(lazy_offload=True),
        V2_OF_32,
        at("0.32.0"),  # on Runner V1
        {"machine__vllm": "0.25.1", "kv_events_config": SimpleNamespace(enable_kv_cache_events=0)},
        EVENTS,
        spec("TieringOffloadingSpec"),
        spec("HostTieringOffloadingSpec", "kvpatch.hostdevice.tiering"),
        tiers("fs"),
        tiers("fs", "fs"),
        tiers("fs") | of_environment(KVPATCH_TIER_SIZE="1GiB"),
        tiers("fs") | {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"cache_config__prefix_caching_hash_algo": "xxhash"},
        IN_MULTI,
        IN_MULTI | at("0.21.0"),
        ARC,
        WINDOWS,
        WINDOWS | chunks(blocks_per_chunk=1),
        WINDOWS | simple(block_size=64),  # which ignores it
        TWO_SIZES | {"machine__contiguous": True},
        TWO_SIZES | simple(),
        {"model_config__enable_sleep_mode": False, "model_config__enable_cumem_allocator": False},
        {"parallel_config__distributed_executor_backend": None},
        {"parallel_config__distributed_executor_backend": "uni"},
        *({"cache_config__cache_dtype": dtype} for dtype in ("bfloat16", "float16", "float32")),
        {"kv_transfer_config__kv_connector_extra_config": None},
        {"kv_transfer_config__kv_connector": None},
        {"model_config": None},
        SCHEME | LATENT | ONE_RANK | V2_OF_32,  # which does not read the scheme
        {"quant_config": SimpleNamespace(kv_cache_scheme=None)},
        *(SCHEME | at(one) | BFLOAT16 for one in ("0.22.1", "0.26.0")),  # as the sentence says
        {"quant_config": None},
        *(of_environment(VLLM_USE_RUST_FRONTEND=off) for off in ("", "0")),
        # Tiers that fit.
        tier(64),
        tier(100),
        tier(64, shm=None, container=None),
        tier(64, shm=0) | at("0.26.0"),  # not in /dev/shm
        tier(512, shm=900, container=None, available=900) | V2_OF_32,
        tier(400, shm=2) | {"machine__memory": None},  # in a process of an engine
    ],
)
def test_what_is_validated_passes(changes):
    assert check(config(**changes)) is None


def test_a_pool_takes_no_more_than_it_has_and_needs_no_more_than_the_tier(monkeypatch):
    assert check(config(**pooled("16GiB") | tier(64, shm=16))) is None
    assert check(config(**pooled("64GiB") | tier(16, shm=16))) is None
    # What others have of the pool, they give back.
    owner = Owner(20 * GIB, 0, 0, 0, 0, 0.0, 0.0, 0, "")
    shown = Limit(64 * GIB, 64 * GIB), [ledger.Peer(Path("one"), owner, False)]
    monkeypatch.setattr(ledger, "show", lambda home: shown)
    assert check(config(**pooled() | tier(64, shm=44))) is None
    assert check(config(**pooled() | tier(64, shm=43))).code == "KVP348"
    # And what they may still take, they take too.
    owner = owner._replace(committed=10 * GIB, ceiling=40 * GIB)
    shown = Limit(64 * GIB, 64 * GIB), [ledger.Peer(Path("one"), owner, False)]
    assert check(config(**pooled() | tier(40, shm=54))) is None
    refused = check(config(**pooled() | tier(40, shm=30)))
    assert refused.code == "KVP348"
    assert "this engine and 1 more may take 64.0 GiB of the host pool" in str(refused)
    shown = Limit(64 * GIB, 40 * GIB), shown[1]  # by kvpatch pool
    assert check(config(**pooled() | tier(40, shm=30))) is None
    shown = Limit(64 * GIB, 40 * GIB), [ledger.Peer(Path("one"), owner, True)]
    assert check(config(**pooled() | tier(60, shm=50))) is None
    assert check(config(**pooled() | tier(60, shm=49))).code == "KVP348"
    monkeypatch.setattr(ledger, "show", raising(ledger.Busy))
    assert check(config(**pooled() | tier(64, shm=44))).code == "KVP348"
    assert check(config(**pooled() | tier(64, shm=64))) is None


def fewer(*values):
    """A reader that finds another value each time: somebody takes memory meanwhile."""
    left = list(values)
    return lambda *_: left.pop(0) if len(left) > 1 else left[0]


def test_a_check_reads_the_memory_once():
    """So that no refusal says that there is room."""
    made = config(**tier(20, shm=64))
    here = facts(**made.machine)
    little, much = (one._replace(shm=size * GIB) for one, size in ((ROOMY, 10), (ROOMY, 30)))
    refused = check(made, here._replace(memory=fewer(little, much)))
    assert "takes 20.0 GiB and /dev/shm has 10.0 GiB free" in str(refused)
    assert check(made, here._replace(memory=fewer(much, little))) is None
    assert check(made, here._replace(memory=lambda: little)) is not None  # the next one reads anew


def test_a_check_reads_the_pool_once(monkeypatch):
    owner = Owner(0, 0, 40 * GIB, 0, 0, 0.0, 0.0, 0, "")
    peers = [ledger.Peer(Path("one"), owner, False)]
    shown = Limit(64 * GIB, 64 * GIB), peers
    monkeypatch.setattr(ledger, "show", fewer(shown, (shown[0], [])))
    refused = check(config(**pooled() | tier(40, shm=30)))
    assert "this engine and 1 more may take 64.0 GiB" in str(refused)


@pytest.mark.parametrize(
    "release", [*validated(V1_ON_LATER), "0.28.0", "0.31.0+cpu", supported.INSPECTED, "0.99.1"]
)
@pytest.mark.parametrize("runner_v2", [True, False])
def test_runner_v1_where_it_is_not_validated(release, runner_v2):
    refused = check(config(connector=False, use_v2_model_runner=runner_v2), facts(release))
    if runner_v2 or release.partition("+")[0] in validated():
        assert refused is None
    else:
        assert str(refused) == sentence_of("KVP301", release)


@pytest.mark.parametrize(
    ("release", "runner_v2", "code"),
    [
        ("0.28.0", False, ""),
        ("0.28.0", True, "KVP363"),
        ("0.30.0", True, ""),
        ("0.30.0", False, ""),  # they ran
        ("0.30.0+cpu", True, ""),
        ("0.31.0", True, ""),
        ("0.32.0", True, ""),
        ("0.32.0", False, "KVP313"),
    ],
)
def test_hybrid_models_where_kvcached_has_no_adapter(release, runner_v2, code):
    made = config(connector=False, use_v2_model_runner=runner_v2, model_config__is_hybrid=True)
    refused = check(made, facts(release))
    assert (str(refused) == sentence_of(code, release)) if code else (refused is None)


@pytest.mark.parametrize(
    ("requested", "contiguous", "kept"),
    [
        ("BLHNC", True, True),
        ("BLNHC", True, True),
        ("LBHNC", True, False),
        ("HND", True, False),
        ("BHLNC", True, False),
        ("LBHNC", False, True),
        ("NHD", False, True),
        ("BLHNC", False, False),
        ("LHBNC", False, False),
    ],
)
def test_a_layout_that_kvcached_cannot_have(requested, contiguous, kept):
    here = {"contiguous": contiguous, "environment": {VLLM_KV_CACHE_LAYOUT.name: requested}}
    made = config(connector=False)
    assert check(made, facts("0.28.0", **here)) is None  # before 0.29 it means another thing
    made.use_v2_model_runner = True
    refused = check(made, facts("0.30.0", **here))
    memory = "contiguous" if contiguous else "not contiguous"
    what = f"VLLM_KV_CACHE_LAYOUT={requested} is set and kvcached's memory is {memory}"
    assert (refused and refused.what) == (None if kept else what)


def test_model_runner_v2_before_kvcacheds_adapter():
    assert check(config(), facts("0.27.1")) is None
    refused = check(config(use_v2_model_runner=True), facts("0.27.1"))
    assert str(refused) == sentence_of("KVP326")
    # Up to 0.21 a configuration does not know its runner.
    older = config()
    del older.use_v2_model_runner
    assert check(older, facts("0.21.0")) is None
    on = {VLLM_USE_V2_MODEL_RUNNER.name: "1"}
    assert str(check(older, facts("0.21.0", environment=on))) == sentence_of("KVP326")


@pytest.mark.parametrize("release", ["0.27.1", "0.28.0", "0.32.0"])
@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_starts_where_it_was_compared(release, dtype):
    given = v2(release) if release == "0.32.0" else at(release)
    given |= ONE_RANK | {"cache_config__cache_dtype": dtype}
    for connector in CONNECTORS:
        assert code_of(**given, **connector) is code_of(**given, **connector, **SCHEME) is None


def test_fp8_and_several_ranks_are_a_pair(monkeypatch):
    monkeypatch.setattr(admitted, "ran_with", lambda name, *rest: "+" not in name)
    refusal = check(config(**FP8 | TWO_RANKS | V2_OF_32))
    assert refusal.code == "KVP376"
    assert refusal.what == "an fp8 KV cache and tensor parallelism are configured together"


@cache
def tried(features, models):
    return admission.tried(features, ["0.32.0"], models)


@pytest.fixture
def ran(monkeypatch):
    """Say that all cells of features of 0.32.0 ran, with some kinds of model, and no others."""
    monkeypatch.setattr(admission, "earned", dict)

    def ran(*features, models=()):
        monkeypatch.setattr(admitted, "table", lambda: tried(features, models))

    return ran


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(
    ("method", "feature"), [one for one in DRAFTING.items() if one[1] not in parallel_drafts.KINDS]
)
def test_drafts_that_were_compared_start(ran, method, feature, connector, v2):
    ran(feature)
    made = {"speculative_config": SimpleNamespace(method=method), "use_v2_model_runner": v2}
    assert check(config(**made, **connector, **ONE_RANK, machine__vllm="0.32.0")) is None


@pytest.mark.parametrize("method", ["medusa", "dflash"])
def test_drafts_of_another_method_are_refused(ran, method):
    ran("ngram")
    made = config(speculative_config=SimpleNamespace(method=method), **ONE_RANK, **V2_OF_32)
    refusal = check(made)
    what = f"a KV connector is configured with speculative decoding by {method}"
    assert (refusal.code, refusal.what) == ("KVP309", what)


METHODS = {
    **{"ngram": "ngram", "draft_model": "draft model", "eagle": "EAGLE", "eagle3": "EAGLE-3"},
    **{"mtp": "mtp", "dflash": "dflash", "dspark": "dspark"},
}


@pytest.mark.parametrize(("method", "feature"), METHODS.items())
def test_each_method_of_drafting_starts_where_it_ran(monkeypatch, method, feature):
    made = V2_OF_32 | {"speculative_config": SimpleNamespace(method=method)}
    for ran in (True, False):
        monkeypatch.setattr(
            place, "starts_with", lambda name, *_, ran=ran: (name == feature) is ran
        )
        assert breaks("KVP309", made) is not ran


@pytest.mark.parametrize(
    ("changes", "nothing"),
    [
        (MTP | WINDOWS, True),
        (MTP | WINDOWS | multi("OffloadingConnector"), True),
        (MTP | WINDOWS | multi("OffloadingConnector", "SimpleCPUOffloadConnector"), False),
        (MTP | WINDOWS | simple(), False),
        (DRAFTS | WINDOWS, False),
        (WINDOWS, False),
        (MTP, False),
        (MTP | HYBRID | WINDOWS, False),
        (MTP | HYBRID | chunks(blocks_per_chunk=2), True),
    ],
)
def test_drafts_by_mtp_beside_windows_leave_nothing_to_be_found(monkeypatch, changes, nothing):
    monkeypatch.setattr(admitted, "table", dict)
    assert breaks("KVP395", changes | V2_OF_33) is nothing
    assert not breaks("KVP395", changes | V2_OF_32)
    if nothing:  # and that is all there is to say of the drafts
        assert not breaks("KVP309", changes | V2_OF_33)
        assert breaks("KVP309", changes | V2_OF_32)


OF_KINDS = [(LATENT, "latent attention", "KVP305"), (HYBRID, "hybrid", "KVP311")]


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("changes", "kind", "code"), OF_KINDS)
def test_a_kind_of_model_starts_where_it_ran(ran, monkeypatch, changes, kind, code, connector, v2):
    # On 0.32 kvcached has no hybrid models: KVP313, which is not this rule's.
    made = changes | connector | ONE_RANK | V2_OF_32 | {"use_v2_model_runner": v2}
    monkeypatch.setattr(admitted, "table", dict)
    assert breaks(code, made)
    ran("none", models=(kind,))
    assert not breaks(code, made)
    assert breaks(code, made | at("0.33.0"))
    assert breaks(code, made | {"parallel_config__world_size": 2})
    ran("none", models=tuple({kind for _, kind, _ in OF_KINDS} - {kind}))
    assert breaks(code, made)


@pytest.mark.parametrize("field", ["compress_rates", "compress_ratios"])
def test_windows_of_compressed_latents_are_of_model_runner_v2(field):
    made = LATENT | {"model_config__hf_text_config": SimpleNamespace(**{field: [4, 8]})}
    assert breaks("KVP393", made | V2_OF_32)
    assert not breaks("KVP393", made | at("0.32.0"))
    before = config(**made)  # up to 0.21 it has no such attribute
    del before.use_v2_model_runner
    assert the_rule("KVP393").refusal(before, facts(vllm="0.21.0")) is None


def test_a_known_fault_goes_before_what_is_not_validated():
    """Its sentence is of use; the other one offers to verify what cannot be right."""
    made = config(**simple(lazy_offload=True), **STAGES_OF_RANKS, machine__vllm="0.29.0")
    assert [one.code for one in rules.refusals(made, facts("0.29.0"), RULES)] == [
        "KVP307",
        "KVP316",
    ]
    assert check(made).code == "KVP316"
    assert check(made, lifted={"KVP316"}).code == "KVP307"


@pytest.mark.parametrize("connector", CONNECTORS)
def test_latent_attention_on_several_ranks_starts_where_it_ran(ran, monkeypatch, connector):
    made = LATENT | V2_OF_32 | connector
    monkeypatch.setattr(admitted, "table", dict)
    assert code_of(**made | TWO_RANKS) == "KVP305"
    ran("2 ranks")
    assert code_of(**made | TWO_RANKS) is None
    assert code_of(**made | STAGES) == "KVP307"  # not all of tensor parallelism
    assert code_of(**made | ONE_RANK) == "KVP305"  # a run with several ranks is not one with one


def test_an_fp8_cache_of_a_hybrid_starts_where_it_ran(ran, monkeypatch):
    made = OF_FP8 | HYBRID | V2_OF_32
    monkeypatch.setattr(admitted, "ran_with", lambda *given: True)
    assert breaks("KVP310", made)
    ran("fp8", models=("hybrid",))
    assert not breaks("KVP310", made)
    assert breaks("KVP310", made | {"cache_config__calculate_kv_scales": True})


def test_a_hybrid_on_several_ranks_starts_where_two_ran(ran):
    alone, four = (HYBRID | V2_OF_32 | ranks for ranks in (ONE_RANK, FOUR_RANKS))
    ran("none", models=("hybrid",))
    assert breaks("KVP311", four)
    ran("2 ranks", models=("hybrid",))
    assert not breaks("KVP311", four)
    assert breaks("KVP311", alone)


def test_gated_delta_nets_start_where_they_ran(monkeypatch):
    """States of Mamba2 that ran say nothing of them, nor they alone of what is beside them."""
    here = DELTA_NETS | V2_OF_33 | ONE_RANK
    monkeypatch.setattr(place, "starts_with", lambda *_: True)
    ran = {"fp8"}
    monkeypatch.setattr(admitted, "ran_with", lambda name, *_: name in ran)
    assert code_of(**HYBRID | V2_OF_33 | ONE_RANK | FP8) is None
    assert code_of(**here) == "KVP394"
    ran.add("gated delta net")
    assert (code_of(**here), code_of(**here | FP8)) == (None, "KVP376")
    ran.add("fp8 + gated delta net")
    assert code_of(**here | FP8) is None


@pytest.mark.parametrize(
    "ranks", [ranks(1, stages=3), ranks(1, world=2), ranks(1, stages=2, world=4)]
)
def test_ranks_that_are_not_two_stages_ran_nowhere(monkeypatch, ranks):
    monkeypatch.setattr(place, "starts_with", lambda *_: True)
    assert breaks("KVP307", ranks | V2_OF_32)
    assert not breaks("KVP307", STAGES | V2_OF_32)


def test_two_stages_of_one_rank_are_not_those_of_two(ran):
    ran("2 stages")
    assert check(config(**STAGES | V2_OF_32)) is None
    assert check(config(**STAGES_OF_RANKS | V2_OF_32)).code == "KVP307"


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(
    "connector", [*CONNECTORS, simple(lazy_offload=True), {"kv_transfer_config": None}]
)
def test_engines_of_one_server_start_where_they_ran(ran, monkeypatch, connector, v2):
    made = config(**ENGINES | connector, use_v2_model_runner=v2, machine__vllm="0.32.0")
    monkeypatch.setattr(admitted, "table", dict)
    assert check(made).code == "KVP374"
    ran("2 engines")
    assert check(made) is None
    assert check(config(**ENGINES | connector, machine__vllm="0.28.0")).code == "KVP374"


@pytest.mark.parametrize(
    "changes",
    [
        engines(3),
        {"parallel_config__data_parallel_size": 4},  # of which two are on another machine
        {"parallel_config__data_parallel_size_local": 1},
        {"parallel_config__data_parallel_backend": "ray"},
        TWO_RANKS,
        {"model_config__is_moe": True},
        {"machine__device": "cuda"},
        {"machine__environment": {HOST_POOL.name: "64GiB@rules"}, "machine__memory": None},
        {"machine__environment": {IDLE.name: "30s"}},
        {"cache_config__cache_dtype": "fp8"},
        DRAFTS,
        WINDOWS,
        multi("OffloadingConnector", engine_id="mine"),
    ],
)
def test_engines_of_one_server_start_as_they_ran_only(ran, changes):
    ran("2 engines", "4 engines", "ngram")
    assert breaks("KVP374", ENGINES | V2_OF_32 | changes)


def test_four_engines_start_with_what_ran(ran):
    ran("2 engines", "4 engines")
    four = ENGINES | V2_OF_32 | engines(4)
    assert (code_of(**four), code_of(**four | simple())) == (None, "KVP374")


ONE_GROUP = NO_GROUPS | WINDOWS


@pytest.mark.parametrize(
    ("feature", "changes", "code"),
    [
        ("no prefix cache", NO_PREFIX_CACHE, "KVP306"),
        ("no prefix cache", NO_PREFIX_CACHE | tiers("fs"), "KVP306"),
        ("whole prompts", WHOLE, "KVP357"),
        ("whole prompts", WHOLE | WINDOWS, "KVP357"),
        ("whole prompts", WHOLE | simple(lazy_offload=True), "KVP357"),
        ("store threshold", chunks(store_threshold=3), "KVP358"),
        ("chunks", chunks(block_size=64), "KVP359"),
        ("chunks", chunks(blocks_per_chunk="4"), "KVP359"),
        ("2 stages", STAGES, "KVP307"),
        ("2 stages", STAGES | IN_MULTI, "KVP307"),
        ("2 stages of 2 ranks", STAGES_OF_RANKS, "KVP307"),
        ("no hybrid manager", ONE_GROUP, "KVP360"),
        ("no hybrid manager", ONE_GROUP | simple(), "KVP360"),
    ],
)
def test_a_setting_that_ran_starts(ran, monkeypatch, feature, changes, code):
    made = config(**V2_OF_32, **changes)
    monkeypatch.setattr(admitted, "table", dict)
    assert check(made).code == code
    ran(feature)
    assert check(made) is None
    elsewhere = facts(**made.machine)._replace(contiguous=False)
    assert check(made, elsewhere) is None  # which ran as well
    assert check(config(**changes, machine__vllm="0.31.0")).code == code


@pytest.mark.parametrize(
    "changes",
    [
        chunks(store_threshold=1),
        chunks(store_threshold=0),
        chunks(blocks_per_chunk=1),
        {"cache_config__block_size": 32},
        chunks(block_size=32) | {"cache_config__block_size": 32},
        simple(store_threshold=2, block_size=64),  # keys that it does not read
        NO_GROUPS | V2_OF_32,
        ONE_GROUP | at("0.21.0"),  # whose cells ran so
    ],
)
def test_a_setting_that_changes_nothing_starts(monkeypatch, changes):
    monkeypatch.setattr(admitted, "table", dict)
    assert check(config(**changes)) is None


def test_the_cells_of_latent_attention_ran_with_whole_prompts(ran):
    ran("none", models=("latent attention",))
    assert check(config(**WHOLE | LATENT | ONE_RANK | V2_OF_32)) is None


OLD = at("0.26.0") | ONE_RANK
ROUNDED = (
    "of 33.0 GiB takes 64.0 GiB, because torch rounds pinned memory of each rank up to a power of "
    "two; ask for a power of two per rank, or install vLLM 0.27.1"
)
ROUNDED_LAYERS = (
    "of 33.0 GiB may take up to 66.0 GiB, because torch rounds pinned memory of each layer up to a "
    "power of two; install vLLM 0.27.1, or see that twice the memory is free"
)
SWAPPED = (
    "takes 64.0 GiB and 60.0 GiB are available: the kernel will swap, or end a process; ask for a "
    "smaller CPU tier (--kv-offloading-size or cpu_bytes_to_use)"
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (tier(33) | OLD, [ROUNDED]),
        (tier(33) | OLD | {"machine__contiguous": False}, [ROUNDED_LAYERS]),
        (tier(64, swap=10, available=60), [SWAPPED]),
        (tier(64, swap=10, container=60), [SWAPPED]),
        (tier(64), []),
        (tier(64) | OLD, []),
        (tier(33) | {"machine__memory": None}, []),
    ],
)
def test_a_tier_that_is_rounded_or_swapped_is_warned_of(warned, changes, said):
    assert check(config(**changes)) is None
    lines = [f"kvpatch: the CPU tier {one}" for one in said]
    assert list(dict.fromkeys(warned.messages)) == lines


def test_a_refused_configuration_is_not_warned_of(warned):
    assert code_of(**tier(64, swap=10, available=60), **MTP) is not None
    assert warned.records == []


def rule(applies=True, **fields):
    """A rule that refuses every configuration, or none."""
    return Rule("KVP302", "all", lambda *_: applies, "it is", "so", "do this", **fields)


ONLY, UNLESS = {"only_in": Span("0.22", "0.24")}, {"unless_validated": Span("0.24")}


@pytest.mark.parametrize(
    ("fields", "release", "refused"),
    [
        (ONLY, "0.21.0", False),
        (ONLY, "0.22.0", True),
        (ONLY, "0.22.1", True),
        (ONLY, "0.22.1+cpu", True),
        (ONLY, "0.24.0", False),
        # A release that nobody has seen has the rules of the newest inspected one.
        ({"only_in": Span(supported.INSPECTED)}, "0.99.1", True),
        ({"only_in": Span("0.22", supported.INSPECTED)}, "0.99.1", False),
        (UNLESS, "0.22.1", True),  # validated, and before the span
        (UNLESS, "0.24.0", False),
        (UNLESS, "0.25.9", True),  # in the span, and not validated
        (UNLESS, "0.32.0+cpu", False),
        (UNLESS, "0.33.9", True),
        (UNLESS, "0.99.1", True),
    ],
)
def test_the_releases_of_a_rule(fields, release, refused):
    assert (rule(**fields).refusal(config(), facts(release)) is not None) is refused


def test_a_rule_that_does_not_apply_is_not_asked_for_its_subject():
    def what(config, facts):
        raise AssertionError("asked")

    one = Rule("KVP302", "none", lambda config, facts: False, what, "so", "do this")
    assert one.refusal(config(), facts()) is None


def test_a_lifted_rule_is_skipped():
    first, second = RULES[0], rule()
    made = config(machine__vllm="0.33.9")
    here = facts("0.33.9")
    assert rules.check(made, here, (first, second)).code == first.code
    assert rules.check(made, here, (first, second), lifted={first.code}).code == second.code
    assert rules.check(made, here, (first, second), lifted={first.code, second.code}) is None


def test_the_rules_of_features_are_loaded_in_their_order():
    references = [feature.rules for feature in patches.FEATURES if feature.rules]
    assert rules.of([*references, None]) == RULES
    assert rules.of([None]) == ()


@pytest.fixture
def process(monkeypatch):
    """A process that passed the gates on vLLM 0.28.0, and what it announced."""
    announced = []
    record = Record(facts=facts(), rules=[f.rules for f in patches.FEATURES if f.rules])
    monkeypatch.setattr(configuration, "record", record)
    monkeypatch.setattr(lifting, "record", record)
    monkeypatch.setattr(configuration, "device_type", lambda: "cuda")
    monkeypatch.setattr(configuration.kvcached_api, "contiguous", lambda environment: True)
    monkeypatch.setattr(configuration, "announce_frontend", lambda: announced.append("frontend"))
    record.announced = announced
    return record


def test_the_check_runs_after_vllm_resolved_the_configuration(process, monkeypatch):
    monkeypatch.setattr(admitted, "table", dict)
    made = config()

    def resolve():
        made.cache_config.enable_prefix_caching = False

    with pytest.raises(Refusal, match="the prefix cache is disabled"):
        configuration.around_post_init(resolve, made, (), {})
    assert process.announced == []
    process.lifted = frozenset({"KVP306"})
    configuration.around_post_init(resolve, made, (), {})
    assert process.announced == ["frontend"]


def test_a_release_that_no_verdict_lifts_is_refused_with_its_configuration(process):
    process.facts = facts("99.0.0")
    with pytest.raises(Refusal, match=r"99\.0\.0 .*KVP107"):
        configuration.around_post_init(lambda: None, config(), (), {})
    assert process.announced == []


def test_a_configuration_without_a_model_is_not_an_engine(process):
    made = config(model_config=None, kv_transfer_config__kv_connector="ExampleConnector")
    assert configuration.around_post_init(lambda: "done", made, (), {}) == "done"
    assert process.announced == []


def test_the_facts_of_an_engine_are_those_of_the_gates_and_of_vllm(process, monkeypatch):
    monkeypatch.setattr(configuration, "device_type", lambda: "xpu")
    seen = []
    monkeypatch.setattr(configuration.kvcached_api, "contiguous", lambda given: seen.append(given))
    here = configuration.facts_of_engine()
    assert (here.vllm, here.device, here.contiguous) == (process.facts.vllm, "xpu", None)
    assert seen == [process.facts.environment]


def test_a_key_that_vllm_ignores_is_told(monkeypatch, warned):
    ignored = {"lazy_ofload": "lazy_offload", "secondary_tiers": "", "mine": ""}
    monkeypatch.setattr(connector_keys, "unread", lambda leaf: ignored)
    assert check(config(**multi("OffloadingConnector", "SimpleCPUOffloadConnector"))) is None
    (said,) = (one.message for one in warned.records if "ignores" in one.message)
    tiers = "ignores secondary_tiers of {}'s kv_connector_extra_config: {}, and vLLM "
    beside = "it takes spec_name TieringOffloadingSpec beside it"
    assert tiers.format("OffloadingConnector", beside) in said
    simple = "only OffloadingConnector has secondary tiers"
    assert tiers.format("SimpleCPUOffloadConnector", simple) in said
    assert "ignores lazy_ofload of SimpleCPUOffloadConnector's " in said
    assert "did you mean lazy_offload?" in said
    assert said.endswith(
        "ignores mine of SimpleCPUOffloadConnector's kv_connector_extra_config: remove it"
    )
