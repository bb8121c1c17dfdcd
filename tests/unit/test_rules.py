"""Every rule on the engine's configuration, by the sentence it says."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from kvpatch.registry import simple_connector
from kvpatch.registry import tiers as tier_rows
from kvpatch.registry.releases import HYBRID_RANGE, LATENT_RANGE, MULTI_RANGE
from packaging.version import Version

from kvpatch import configuration, status
from kvpatch.refusal import Refusal
from kvpatch.versions import Installed
from kvpatch.versions import in_words as words


@pytest.fixture(autouse=True)
def machine(monkeypatch, request):
    """The machine that the test's ``changes`` name, instead of this one."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    made = config(**parameters.get("changes", {})).machine
    found = Installed("vllm", "vllm", made.vllm, Version(made.vllm))
    monkeypatch.setattr(configuration, "installed", lambda package: [found])
    monkeypatch.setattr(configuration, "device_here", lambda: made.copies)


def config(connector: bool = True, **changes: Any) -> SimpleNamespace:
    """A configuration that passes; ``changes`` are dotted names with ``__`` for the dot."""
    transfer = SimpleNamespace(
        kv_connector="OffloadingConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={},
    )
    made = SimpleNamespace(
        machine=SimpleNamespace(vllm="0.28.0", copies="ours"),
        use_v2_model_runner=False,
        attention_config=SimpleNamespace(),
        kv_transfer_config=transfer if connector else None,
        scheduler_config=SimpleNamespace(policy="fcfs", scheduler_cls=None),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            world_size=2,
            tensor_parallel_size=2,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            distributed_executor_backend="mp",
        ),
        speculative_config=None,
        kv_events_config=None,
        model_config=SimpleNamespace(
            is_hybrid=False,
            is_encoder_decoder=False,
            use_mla=False,
            architecture="JambaForCausalLM",
        ),
    )
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        setattr(getattr(made, section) if section else made, field, value)
    return made


def spec(name: str, module: str | None = None) -> dict[str, Any]:
    return {
        "kv_transfer_config__kv_connector_extra_config": {"spec_name": name}
        | ({"spec_module_path": module} if module else {})
    }


def simple(**extra: Any) -> dict[str, Any]:
    return {
        "kv_transfer_config__kv_connector": "SimpleCPUOffloadConnector",
        "kv_transfer_config__kv_connector_extra_config": extra,
    }


def tiers(*types: str) -> dict[str, Any]:
    return {
        "kv_transfer_config__kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": name} for name in types],
        }
    }


def multi(*inside: str, **more: Any) -> dict[str, Any]:
    return {
        "kv_transfer_config__kv_connector": "MultiConnector",
        "kv_transfer_config__kv_connector_extra_config": {
            "connectors": [{"kv_connector": name, "kv_role": "kv_both"} | more for name in inside]
        },
    }


@pytest.fixture
def vllm(monkeypatch):
    """Say which vLLM is installed; 0.28.0 unless a test says another."""

    def say(release: str) -> None:
        found = Installed("vllm", "vllm", release, Version(release))
        monkeypatch.setattr(configuration, "installed", lambda package: [found])

    return say


V2_OF_29 = {"machine__vllm": "0.29.0", "use_v2_model_runner": True}
V2_OF_30 = {"machine__vllm": "0.30.0", "use_v2_model_runner": True}
HYBRID = {"model_config__is_hybrid": True}
LATENT = {"model_config__use_mla": True}
ONE_RANK = {"parallel_config__world_size": 1, "parallel_config__tensor_parallel_size": 1}
V2_OF_33 = {"machine__vllm": "0.33.0", "use_v2_model_runner": True}

# By the position of the rule: the configurations it refuses, and its sentence.
CASES = [
    (
        [{"attention_config__hisparse_config": SimpleNamespace()}],
        "HiSparse is configured, because it allocates its KV cache outside kvcached's memory; "
        "remove the HiSparse configuration, or set KVPATCH=0.",
    ),
    (
        [],  # needs a release of its own: test_runner_v1_where_it_was_not_tried
        "this configuration runs on Model Runner V1, because there kvcached has no adapter for it, "
        f"and ours was compared on vLLM {words(configuration.V1_ON_LATER)} only; use Model "
        "Runner V2, or set KVPATCH=0.",
    ),
    (
        [],  # needs a release of its own: test_hybrid_models_where_kvcached_has_no_adapter
        "JambaForCausalLM has state-space layers, because kvcached's patches for them were not "
        "tried on this release and runner; use Model Runner V2 of vLLM 0.30, or set KVPATCH=0.",
    ),
    (
        [],  # needs a release and an environment: test_a_layout_that_kvcached_cannot_have
        "VLLM_KV_CACHE_LAYOUT=LBHNC is set and kvcached's memory is contiguous, because kvcached "
        "has BLNHC or BLHNC there, and with KVCACHED_CONTIGUOUS_LAYOUT=false LBNHC or LBHNC; "
        "unset VLLM_KV_CACHE_LAYOUT or change KVCACHED_CONTIGUOUS_LAYOUT, or set KVPATCH=0.",
    ),
    (
        [],  # needs a release of its own: test_model_runner_v2_before_kvcacheds_adapter
        "this configuration runs on Model Runner V2, because kvcached has no adapter for it "
        "before vLLM 0.28; set VLLM_USE_V2_MODEL_RUNNER=0, or set KVPATCH=0.",
    ),
    (
        [
            {
                "machine__vllm": "0.25.1",
                "kv_events_config": SimpleNamespace(enable_kv_cache_events=True),
            }
        ],
        "kv_events_config switches KV cache events on, because kvcached's block pool gives none "
        "out, and kvpatch knows how to only from vLLM 0.26 on; remove kv_events_config, install a "
        "later vLLM, or set KVPATCH=0.",
    ),
    (
        [
            {"kv_transfer_config__kv_connector": "ExampleConnector"},
            {
                "kv_transfer_config__kv_connector": "ExampleConnector",
                "kv_transfer_config__kv_connector_module_path": "mine",
            },
        ],
        "the KV connector ExampleConnector is configured, because only vLLM's own "
        "OffloadingConnector and SimpleCPUOffloadConnector are known to be right on kvcached's "
        "memory; use one of these, or set KVPATCH=0.",
    ),
    (
        [simple(kv_offload_backend="disk", disk_path="/tmp/x")],
        "the kv_offload_backend disk is configured, because its blocks were never compared with "
        "plain vLLM's after a round trip; remove kv_offload_backend from "
        "kv_connector_extra_config, or set KVPATCH=0.",
    ),
    (
        [simple(lazy_offload=True) | V2_OF_29],
        "lazy_offload is set in kv_connector_extra_config, because SimpleCPUOffloadConnector of "
        "vLLM 0.29 counts copies of idle steps as done without making them; remove lazy_offload, "
        "install another vLLM, or set KVPATCH=0.",
    ),
    (
        [
            simple(lazy_offload=True) | V2_OF_33,
            simple() | {"machine__vllm": "0.23.0"},
        ],
        "SimpleCPUOffloadConnector is configured on this release, because it was compared with "
        f"plain vLLM's on vLLM {words(simple_connector.FEATURE.vllm)} only; use "
        "OffloadingConnector, or one of these releases, or set KVPATCH=0.",
    ),
    (
        [
            simple()
            | {
                "machine__vllm": "0.19.1",
                "scheduler_config__disable_hybrid_kv_cache_manager": False,
                "model_config__get_sliding_window": lambda: 256,
            }
        ],
        "SimpleCPUOffloadConnector is configured in eager mode for sliding windows whose blocks "
        "are given back, because before vLLM 0.22 it stops storing a request at the first block "
        "that has left its window and is gone, and some prompts never come back from the CPU "
        "tier; set --disable-hybrid-kv-cache-manager or lazy_offload, install vLLM 0.22.1, or set "
        "KVPATCH=0.",
    ),
    (
        [
            multi("OffloadingConnector") | {"machine__vllm": "0.25.1"},
            multi("OffloadingConnector") | V2_OF_33,
        ],
        "MultiConnector is configured on this release, because it was compared with plain vLLM's "
        f"on vLLM {words(MULTI_RANGE)} only; use one connector, or one of these releases, or set "
        "KVPATCH=0.",
    ),
    (
        [tiers("fs") | {"machine__vllm": "0.22.1"}],
        "a secondary tier is configured, because the tiers of this vLLM keep their blocks when "
        "the cache is reset (vllm-project/vllm#44541) and ask a disk on the scheduler's own "
        "thread (vllm-project/vllm#44193); use OffloadingConnector without tiers, or install "
        "vLLM 0.24, or set KVPATCH=0.",
    ),
    (
        [tiers("fs") | V2_OF_33],
        "a secondary tier is configured on this release, because it was compared with plain vLLM's "
        f"on vLLM {words(tier_rows.FEATURE.vllm)} only; use OffloadingConnector without "
        "tiers, or one of these releases, or set KVPATCH=0.",
    ),
    (
        [simple() | {"machine__copies": None}],
        "the KV connector SimpleCPUOffloadConnector is configured, because kvpatch knows no way "
        "to copy its blocks on this device; use OffloadingConnector, or set KVPATCH=0.",
    ),
    (
        [
            multi("OffloadingConnector", "NixlConnector"),
            multi("NixlConnector", "OffloadingConnector"),
            multi("NixlConnector", "NixlConnector"),
        ],
        "a MultiConnector is configured with NixlConnector inside, because that connector's "
        "copies were never compared with plain vLLM's; leave only OffloadingConnector and "
        "SimpleCPUOffloadConnector in it, or "
        "set KVPATCH=0.",
    ),
    (
        [multi("OffloadingConnector", "OffloadingConnector")],
        "a MultiConnector is configured with OffloadingConnector twice, because vLLM gives two "
        "OffloadingConnectors one host memory, and no two of another were compared; leave one of "
        "them, or set KVPATCH=0.",
    ),
    (
        [
            spec("MySpec", "some.module"),
            multi("OffloadingConnector", kv_connector_extra_config={"spec_name": "MySpec"}),
        ],
        "the offloading spec MySpec is configured, because its blocks were never "
        "compared with plain vLLM's after a round trip; remove spec_name from "
        "kv_connector_extra_config, or set KVPATCH=0.",
    ),
    (
        [tiers("example"), tiers("fs", "example")],
        "the secondary tier example is configured, because vLLM's example keeps the names of "
        "blocks and no bytes, so that what comes back from it is whatever lies in the CPU tier; "
        "use the tier fs, or set KVPATCH=0.",
    ),
    (
        [
            tiers("obj"),
            tiers("fs", "obj"),
            multi(
                "OffloadingConnector",
                kv_connector_extra_config=tiers("obj")[
                    "kv_transfer_config__kv_connector_extra_config"
                ],
            ),
        ],
        "the secondary tier obj is configured, because no test of kvpatch ran on it; use the tier "
        "fs, or set KVPATCH=0.",
    ),
    (
        [tiers("fs") | {"scheduler_config__policy": "priority"}],
        "a secondary tier is configured with the scheduling policy priority, because a request "
        "that waits for the tier can then keep those from running that hold the memory it needs; "
        "use the scheduling policy fcfs, or set KVPATCH=0.",
    ),
    (
        [
            {"kv_transfer_config__kv_connector_extra_config": {"canonical_layout": True}},
            multi("OffloadingConnector", kv_connector_extra_config={"canonical_layout": True}),
        ],
        "canonical_layout is set in kv_connector_extra_config, because vLLM cannot certify that "
        "layout on kvcached's memory; remove canonical_layout, or set KVPATCH=0.",
    ),
    (
        [
            LATENT | ONE_RANK,
            LATENT | ONE_RANK | {"machine__vllm": "0.32.0"},  # on Runner V1
            LATENT | ONE_RANK | V2_OF_33,
            LATENT | ONE_RANK | V2_OF_29 | multi("OffloadingConnector"),
            LATENT | ONE_RANK | V2_OF_29 | tiers("fs"),
            LATENT | V2_OF_29,  # of two ranks
        ],
        "a KV connector is configured for JambaForCausalLM, because the KV cache of models with "
        "latent attention was compared with plain vLLM's for OffloadingConnector and "
        "SimpleCPUOffloadConnector without tiers, on Model Runner V2 of vLLM "
        f"{words(LATENT_RANGE)} and one rank only; use one of these, or run this model without a "
        "KV connector, or set KVPATCH=0.",
    ),
    (
        [{"cache_config__enable_prefix_caching": False}],
        "prefix caching is off while a KV connector is configured, because no test of kvpatch ran "
        "on it; remove --no-enable-prefix-caching, or set KVPATCH=0.",
    ),
    (
        [
            {"parallel_config__world_size": 4},
            {"parallel_config__data_parallel_size": 2},
            {"parallel_config__decode_context_parallel_size": 2},
        ],
        "a KV connector is configured with parallelism other than tensor parallelism, because no "
        "test of kvpatch ran on it; use tensor parallelism only, or set KVPATCH=0.",
    ),
    (
        [{"parallel_config__distributed_executor_backend": "ray"}],
        "a KV connector is configured with the executor ray, because kvpatch is tested with the "
        "executors uni and mp only; set --distributed-executor-backend mp, or set KVPATCH=0.",
    ),
    (
        [
            {"scheduler_config__scheduler_cls": "builtins.dict"},
            {"scheduler_config__scheduler_cls": dict},
        ],
        "a KV connector is configured with the scheduler builtins.dict, because it may free or "
        "hand out blocks in another order than the transfers are fenced for; remove "
        "--scheduler-cls, or set KVPATCH=0.",
    ),
    (
        [{"speculative_config": SimpleNamespace(method="ngram")}],
        "a KV connector is configured with speculative decoding, because its blocks were never "
        "compared with plain vLLM's after a round trip; remove the speculative configuration, or "
        "set KVPATCH=0.",
    ),
    (
        [{"cache_config__cache_dtype": "fp8"}],
        "a KV connector is configured with the cache dtype fp8, because its blocks were never "
        "compared with plain vLLM's after a round trip; use one of auto, bfloat16, float16, "
        "float32, or set KVPATCH=0.",
    ),
    (
        [
            HYBRID | ONE_RANK,
            HYBRID | V2_OF_30,  # of two ranks
            HYBRID | ONE_RANK | V2_OF_29,
            HYBRID | ONE_RANK | V2_OF_30 | tiers("fs"),
            HYBRID | ONE_RANK | V2_OF_30 | simple(),
            HYBRID | ONE_RANK | V2_OF_30 | LATENT,
        ],
        "a KV connector is configured for JambaForCausalLM, because the KV cache of hybrid models "
        "was compared with plain vLLM's for OffloadingConnector without tiers, on Model Runner V2 "
        f"of vLLM {words(HYBRID_RANGE)} and one rank only; use that, or run this model without a "
        "KV connector, or set KVPATCH=0.",
    ),
    (
        [{"model_config__is_encoder_decoder": True}],
        "a KV connector is configured for JambaForCausalLM, because the KV cache of "
        "encoder-decoder models was never compared with plain vLLM's; run this model without a KV "
        "connector, or set KVPATCH=0.",
    ),
]
EACH = [
    pytest.param(position, changes, sentence, id=f"{position}-{number}")
    for position, (many, sentence) in enumerate(CASES)
    for number, changes in enumerate(many)
]


def test_every_rule_has_its_case():
    assert len(CASES) == len(configuration.RULES)


@pytest.mark.parametrize(("position", "changes", "sentence"), EACH)
def test_the_rule_refuses_with_its_sentence(position, changes, sentence):
    with pytest.raises(Refusal) as refused:
        configuration.check(config(**changes))
    rule = configuration.RULES[position]
    assert str(refused.value) == f"kvpatch refuses to start vLLM: {sentence} [{rule.code}]"
    broken = [rule for rule in configuration.RULES if rule.applies(config(**changes))]
    assert broken == [configuration.RULES[position]]


@pytest.mark.parametrize(("position", "changes", "sentence"), EACH)
def test_without_a_connector_only_what_kvcached_cannot_run_matters(position, changes, sentence):
    changes = {n: v for n, v in changes.items() if not n.startswith("kv_transfer_config")}
    rule = configuration.RULES[position]
    if not rule.with_connector:
        with pytest.raises(Refusal, match=rule.code):
            configuration.check(config(connector=False, **changes))
    else:
        configuration.check(config(connector=False, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        spec("CPUOffloadingSpec"),
        spec("HostOffloadingSpec", "kvpatch.hostdevice.offloading"),
        simple(),
        simple(lazy_offload=True, kv_offload_backend="cpu"),
        simple(spec_name="TieringOffloadingSpec"),  # a key that it does not read
        {"use_v2_model_runner": True},
        simple(lazy_offload=True) | {"use_v2_model_runner": True},
        multi("OffloadingConnector") | {"use_v2_model_runner": True},
        simple() | {"machine__vllm": "0.32.0"},
        LATENT | V2_OF_29 | ONE_RANK,
        HYBRID | V2_OF_30 | ONE_RANK,
        LATENT | V2_OF_29 | ONE_RANK | simple(),
        {"machine__vllm": "0.32.0", "use_v2_model_runner": True},
        {"machine__vllm": "0.32.0"},  # on Runner V1
        {
            "machine__vllm": "0.25.1",
            "kv_events_config": SimpleNamespace(enable_kv_cache_events=False),
        },
        {"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)},
        spec("TieringOffloadingSpec"),
        spec("HostTieringOffloadingSpec", "kvpatch.hostdevice.tiering"),
        tiers("fs"),
        tiers("fs", "fs"),
        multi("OffloadingConnector"),
        {"parallel_config__distributed_executor_backend": None},
        {"parallel_config__distributed_executor_backend": "uni"},
        {"kv_transfer_config__kv_connector_extra_config": None},
        {"kv_transfer_config__kv_connector": None},
        {"model_config": None},
    ],
)
def test_what_is_tested_passes(changes):
    configuration.check(config(**changes))


def test_a_proven_spec_of_another_module_is_another_spec():
    with pytest.raises(Refusal, match="the offloading spec HostOffloadingSpec"):
        configuration.check(config(**spec("HostOffloadingSpec", "mine")))


def test_the_check_runs_after_vllm_resolved_the_configuration(monkeypatch):
    monkeypatch.setattr(status, "on_frontend_config", lambda: None)
    made = config()

    def resolve():
        made.cache_config.enable_prefix_caching = False

    with pytest.raises(Refusal, match="prefix caching is off"):
        configuration.around_post_init(resolve, made, (), {})


@pytest.mark.parametrize("release", ["0.28.0", "0.29.0", "0.31.0+cpu", "0.32.0", "0.33.0"])
@pytest.mark.parametrize("runner_v2", [True, False])
def test_runner_v1_where_it_was_not_tried(vllm, release, runner_v2):
    vllm(release)
    made = config(connector=False, use_v2_model_runner=runner_v2)
    if runner_v2 or release != "0.33.0":
        configuration.check(made)
        return
    with pytest.raises(Refusal) as refused:
        configuration.check(made)
    assert str(refused.value) == f"kvpatch refuses to start vLLM: {CASES[1][1]} [KVP301]"


@pytest.mark.parametrize(
    ("release", "runner_v2", "runs"),
    [
        ("0.28.0", False, True),
        ("0.28.0", True, True),
        ("0.30.0", True, True),
        ("0.30.0+cpu", True, True),
        ("0.31.0", True, False),
        ("0.32.0", True, False),
    ],
)
def test_hybrid_models_where_kvcached_has_no_adapter(vllm, release, runner_v2, runs):
    vllm(release)
    made = config(connector=False, use_v2_model_runner=runner_v2, model_config__is_hybrid=True)
    if runs:
        configuration.check(made)
        return
    with pytest.raises(Refusal) as refused:
        configuration.check(made)
    assert str(refused.value) == f"kvpatch refuses to start vLLM: {CASES[2][1]} [KVP313]"


@pytest.mark.parametrize(
    ("asked", "contiguous", "kept"),
    [
        ("BLHNC", "true", True),
        ("BLNHC", "true", True),
        ("LBHNC", "true", False),
        ("HND", "true", False),
        ("BHLNC", "true", False),
        ("LBHNC", "false", True),
        ("NHD", "false", True),
        ("BLHNC", "false", False),
        ("LHBNC", "false", False),
    ],
)
def test_a_layout_that_kvcached_cannot_have(vllm, monkeypatch, asked, contiguous, kept):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", asked)
    monkeypatch.setenv("KVCACHED_CONTIGUOUS_LAYOUT", contiguous)
    configuration.check(config(connector=False))  # before 0.29 it means another thing
    vllm("0.30.0")
    made = config(connector=False, use_v2_model_runner=True)
    if kept:
        configuration.check(made)
        return
    with pytest.raises(Refusal) as refused:
        configuration.check(made)
    sentence = CASES[3][1].replace("LBHNC is", f"{asked} is", 1)
    if contiguous == "false":
        sentence = sentence.replace("is contiguous", "is not contiguous")
    assert str(refused.value) == f"kvpatch refuses to start vLLM: {sentence} [KVP314]"


def test_model_runner_v2_before_kvcacheds_adapter(vllm, monkeypatch):
    refused = f"kvpatch refuses to start vLLM: {CASES[4][1]}"
    vllm("0.27.1")
    configuration.check(config())
    with pytest.raises(Refusal, match=re.escape(refused)):
        configuration.check(config(use_v2_model_runner=True))
    # Up to 0.21 a configuration does not know its runner.
    vllm("0.21.0")
    older = config()
    del older.use_v2_model_runner
    configuration.check(older)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(Refusal, match=re.escape(refused)):
        configuration.check(older)


def test_a_configuration_without_a_model_is_not_an_engine(monkeypatch):
    monkeypatch.setattr(status, "on_frontend_config", lambda: pytest.fail("not an engine"))
    made = config(model_config=None)
    assert configuration.around_post_init(lambda: "done", made, (), {}) == "done"


@pytest.mark.parametrize(
    "changes",
    [
        simple(**extra)
        | {
            "machine__vllm": release,
            "scheduler_config__disable_hybrid_kv_cache_manager": kept,
            "model_config__get_sliding_window": lambda window=window: window,
        }
        for release, extra, kept, window in (
            ("0.22.1", {}, False, 256),
            ("0.19.1", {"lazy_offload": True}, False, 256),
            ("0.19.1", {}, True, 256),
            ("0.19.1", {}, False, None),
        )
    ],
)
def test_windows_that_an_older_connector_stores_pass(changes):
    configuration.check(config(**changes))
