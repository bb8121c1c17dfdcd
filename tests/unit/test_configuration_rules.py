"""Every rule on the engine's configuration, by the sentence it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from kvpatch import configuration, status
from kvpatch.errors import Refusal
from kvpatch.versions import Installed


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
        kv_transfer_config=transfer if connector else None,
        scheduler_config=SimpleNamespace(policy="fcfs"),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            world_size=2,
            tensor_parallel_size=2,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            distributed_executor_backend="mp",
        ),
        speculative_config=None,
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


# By the position of the rule: the configurations it refuses, and its sentence.
CASES = [
    (
        [{"use_v2_model_runner": True}],
        "this configuration runs on Model Runner V2, because kvpatch is tested on Model Runner V1 "
        "only; set VLLM_USE_V2_MODEL_RUNNER=0, or set KVPATCH=0.",
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
        [simple(lazy_offload=True) | {"machine__vllm": "0.29.0"}],
        "lazy_offload is set in kv_connector_extra_config, because SimpleCPUOffloadConnector of "
        "vLLM 0.29 counts copies of idle steps as done without making them; remove lazy_offload, "
        "install another vLLM, or set KVPATCH=0.",
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
        "copies were never compared with plain vLLM's; leave only OffloadingConnector in it, or "
        "set KVPATCH=0.",
    ),
    (
        [multi("OffloadingConnector", "OffloadingConnector")],
        "a MultiConnector is configured with OffloadingConnector twice, because vLLM gives both "
        "the same engine_id, and so the same host memory; leave one of them, or set KVPATCH=0.",
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
        [{"model_config__use_mla": True}],
        "a KV connector is configured for JambaForCausalLM, because the KV cache of models with "
        "latent attention was never compared with plain vLLM's; run this model without a KV "
        "connector, or set KVPATCH=0.",
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
        [{"model_config__is_hybrid": True}, {"model_config__is_encoder_decoder": True}],
        "a KV connector is configured for JambaForCausalLM, because the KV cache of hybrid and "
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
def test_without_a_connector_only_the_runner_matters(position, changes, sentence):
    changes = {n: v for n, v in changes.items() if not n.startswith("kv_transfer_config")}
    if position == 0:
        with pytest.raises(Refusal, match="Model Runner V2"):
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
        simple() | {"machine__vllm": "0.29.0"},
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
    made = config(use_v2_model_runner=False)

    def resolve():
        made.use_v2_model_runner = True

    with pytest.raises(Refusal, match="Model Runner V2"):
        configuration.around_post_init(resolve, made, (), {})


def test_the_runner_asked_for_is_refused_before_vllm_looks_for_its_needs(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    made = config(use_v2_model_runner=True)
    with pytest.raises(Refusal, match="Model Runner V2"):
        configuration.around_post_init(lambda: pytest.fail("vLLM looked"), made, (), {})


def test_a_configuration_without_a_model_is_not_an_engine(monkeypatch):
    monkeypatch.setattr(status, "on_frontend_config", lambda: pytest.fail("not an engine"))
    made = config(model_config=None, use_v2_model_runner=True)
    assert configuration.around_post_init(lambda: "done", made, (), {}) == "done"
