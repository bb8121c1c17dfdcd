"""Every rule on the engine's configuration, by the sentence it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch import configuration, status
from kvpatch.errors import Refusal


def config(connector: bool = True, **changes: Any) -> SimpleNamespace:
    """A configuration that passes; ``changes`` are dotted names with ``__`` for the dot."""
    transfer = SimpleNamespace(
        kv_connector="OffloadingConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={},
    )
    made = SimpleNamespace(
        use_v2_model_runner=False,
        kv_transfer_config=transfer if connector else None,
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


# By the position of the rule: the configurations it refuses, and its sentence.
CASES = [
    (
        [{"use_v2_model_runner": True}],
        "this configuration runs on Model Runner V2, because kvpatch is tested on Model Runner V1 "
        "only; set VLLM_USE_V2_MODEL_RUNNER=0, or set KVPATCH=0.",
    ),
    (
        [
            {"kv_transfer_config__kv_connector": "SimpleCPUOffloadConnector"},
            {
                "kv_transfer_config__kv_connector": "SimpleCPUOffloadConnector",
                "kv_transfer_config__kv_connector_module_path": "mine",
            },
        ],
        "the KV connector SimpleCPUOffloadConnector is configured, because only vLLM's own "
        "OffloadingConnector is known to be right on kvcached's memory; use OffloadingConnector, "
        "or set KVPATCH=0.",
    ),
    (
        [spec("TieringOffloadingSpec"), spec("TieringOffloadingSpec", "some.module")],
        "the offloading spec TieringOffloadingSpec is configured, because its blocks were never "
        "compared with plain vLLM's after a round trip; remove spec_name from "
        "kv_connector_extra_config, or set KVPATCH=0.",
    ),
    (
        [{"kv_transfer_config__kv_connector_extra_config": {"canonical_layout": True}}],
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
