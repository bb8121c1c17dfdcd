"""Rules, for one of several connectors, the other value of a boundary, and the next release."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_rules import (
    HYBRID,
    LATENT,
    ONE_RANK,
    RULES,
    SCHEME,
    SYNC_LOADS,
    V2_OF_29,
    V2_OF_30,
    V2_OF_32,
    check,
    config,
    facts,
    multi,
    simple,
    spec,
    tiers,
)

from kvpatch import admitted, rules
from kvpatch.environ import HOST_DEVICE
from kvpatch.patches.kvcached_adapters.rules import runs_v2
from kvpatch.patches.offloading.rules import NEVER_SET, has_tiers
from kvpatch.patches.simple_offload.rules import RULES as SIMPLE_RULES
from kvpatch.rules import Rule
from kvpatch.versions import Span

OFFLOADING, SIMPLE = "OffloadingConnector", "SimpleCPUOffloadConnector"


def code(**changes: Any) -> str | None:
    refused = check(config(**changes))
    return None if refused is None else refused.code


def together(*extra: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Both connectors in a MultiConnector, with an extra config each."""
    names = (OFFLOADING, SIMPLE)
    return {
        "kv_transfer_config__kv_connector": "MultiConnector",
        "kv_transfer_config__kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": name, "kv_connector_extra_config": one} | more
                for name, one in zip(names, extra, strict=True)
            ]
        },
    }


MINE = {"kv_transfer_config__kv_connector_module_path": "mine"}


@pytest.mark.parametrize("name", [OFFLOADING, SIMPLE, "MultiConnector"])
def test_a_class_of_ones_own_under_a_validated_name_is_another_connector(name):
    assert code(kv_transfer_config__kv_connector=name, **MINE) == "KVP302"


def test_a_class_of_ones_own_inside_a_multi_connector_is_another_connector():
    assert code(**multi(OFFLOADING, SIMPLE)) is None
    assert code(**multi(OFFLOADING, SIMPLE, kv_connector_module_path="mine")) == "KVP319"
    second = multi(OFFLOADING, SIMPLE)
    inside = second["kv_transfer_config__kv_connector_extra_config"]["connectors"]
    inside[1]["kv_connector_module_path"] = "mine"
    assert code(**second) == "KVP319"


def test_either_connector_twice_is_refused():
    assert code(**multi(SIMPLE, SIMPLE)) == "KVP320"
    assert code(**multi(OFFLOADING, OFFLOADING)) == "KVP320"
    assert code(**multi(SIMPLE, OFFLOADING, SIMPLE)) == "KVP320"


@pytest.mark.parametrize(
    ("extra", "refused"),
    [
        (({}, {}), None),
        (({"canonical_layout": True}, {}), "KVP304"),
        (({}, {"canonical_layout": True}), "KVP304"),
        (({"spec_name": "MySpec"}, {}), "KVP303"),
        (({}, {"spec_name": "MySpec"}), None),  # it has no specs and ignores the key
        (({}, {"kv_offload_backend": "disk"}), "KVP315"),
        (({}, {"kv_offload_backend": "cpu"}), None),
        (({"kv_offload_backend": "disk"}, {}), None),
    ],
)
def test_one_of_two_connectors_is_enough(extra, refused):
    assert code(**together(*extra)) == refused


@pytest.mark.parametrize("at", [0, 1])
def test_either_connectors_number_of_blocks_counts(at):
    """That there are two of one kind is for another rule to say."""
    changes = multi(SIMPLE, SIMPLE)
    inside = changes["kv_transfer_config__kv_connector_extra_config"]["connectors"]
    inside[at]["kv_connector_extra_config"] = {"num_cpu_blocks": 100}
    assert rules.check(config(**changes), facts(), SIMPLE_RULES).code == "KVP352"


@pytest.mark.parametrize(
    ("extra", "refused"), [(({}, {}), None), ((SYNC_LOADS, {}), "KVP351"), (({}, SYNC_LOADS), None)]
)
@pytest.mark.parametrize("first", [OFFLOADING, SIMPLE])
def test_loads_within_a_step_are_those_of_one_connector_in_any_place(extra, refused, first):
    changes = together(*extra) | {"machine__vllm": "0.33.0"}
    inside = changes["kv_transfer_config__kv_connector_extra_config"]["connectors"]
    inside.sort(key=lambda one: one["kv_connector"] != first)
    made = config(**changes)
    (rule,) = (rule for rule in RULES if rule.code == "KVP351")
    found = rule.refusal(made, facts(vllm="0.33.0"))
    assert (None if found is None else found.code) == refused


def test_the_second_connectors_spec_counts():
    inside = [
        {"kv_connector": SIMPLE, "kv_connector_extra_config": {}},
        {"kv_connector": OFFLOADING, "kv_connector_extra_config": {"spec_name": "MySpec"}},
    ]
    changes = multi(SIMPLE, OFFLOADING)
    changes["kv_transfer_config__kv_connector_extra_config"]["connectors"] = inside
    assert code(**changes) == "KVP303"
    inside[1]["kv_connector_extra_config"] = tiers("fs")[
        "kv_transfer_config__kv_connector_extra_config"
    ]
    assert has_tiers(config(**changes))
    inside.reverse()
    assert has_tiers(config(**changes))


def test_lazy_mode_of_one_of_two_is_enough_on_0_29():
    (rule,) = (rule for rule in SIMPLE_RULES if rule.code == "KVP316")
    for first, second in ((True, False), (False, True), (False, False), (True, True)):
        made = config(
            kv_transfer_config__kv_connector="MultiConnector",
            kv_transfer_config__kv_connector_extra_config={
                "connectors": [
                    {"kv_connector": SIMPLE, "kv_connector_extra_config": {"lazy_offload": lazy}}
                    for lazy in (first, second)
                ]
            },
        )
        assert (rule.refusal(made, facts(vllm="0.29.0")) is not None) is (first or second)
        assert rule.refusal(made, facts(vllm="0.30.0")) is None


def test_each_of_two_of_a_kind_counts():
    """vLLM would run them, if no other rule refused two."""
    backends, windows = (
        next(rule for rule in SIMPLE_RULES if rule.code == each) for each in ("KVP315", "KVP327")
    )

    def made(*extra: dict[str, Any]) -> Any:
        inside = [{"kv_connector": SIMPLE, "kv_connector_extra_config": one} for one in extra]
        changes = multi(SIMPLE)
        changes["kv_transfer_config__kv_connector_extra_config"] = {"connectors": inside}
        return config(**changes, **OLD)

    def broken(rule: Rule, *extra: dict[str, Any]) -> bool:
        return rule.refusal(made(*extra), facts(vllm="0.19.1")) is not None

    assert broken(backends, {}, {"kv_offload_backend": "disk"})
    assert broken(backends, {"kv_offload_backend": "disk"}, {})
    assert not broken(backends, {}, {"kv_offload_backend": "cpu"})
    assert broken(windows, {"lazy_offload": True}, {})
    assert broken(windows, {}, {"lazy_offload": True})
    assert not broken(windows, {"lazy_offload": True}, {"lazy_offload": True})


def test_a_tier_of_the_second_connector_counts():
    changes = multi(SIMPLE, OFFLOADING)
    inside = changes["kv_transfer_config__kv_connector_extra_config"]["connectors"]
    inside[1]["kv_connector_extra_config"] = tiers("obj")[
        "kv_transfer_config__kv_connector_extra_config"
    ]
    assert code(**changes) == "KVP322"
    inside.reverse()
    assert code(**changes) == "KVP322"


def test_priorities_are_only_for_engines_without_tiers():
    assert code(scheduler_config__policy="priority") is None
    assert code(scheduler_config__policy="priority", **tiers("fs")) == "KVP323"


@pytest.mark.parametrize(
    ("name", "module", "refused"),
    [
        ("CPUOffloadingSpec", None, None),
        ("CPUOffloadingSpec", "vllm.v1.kv_offload.cpu", None),
        ("TieringOffloadingSpec", "vllm.v1.kv_offload.tiering.spec", None),
        ("HostOffloadingSpec", "kvpatch.hostdevice.offloading", None),
        ("HostTieringOffloadingSpec", "kvpatch.hostdevice.tiering", None),
        ("HostOffloadingSpec", None, "KVP303"),
        ("HostOffloadingSpec", "mine", "KVP303"),
        ("HostTieringOffloadingSpec", "kvpatch.hostdevice.offloading", "KVP303"),
    ],
)
def test_specs_and_their_modules(name, module, refused):
    assert code(**spec(name, module)) == refused


@pytest.mark.parametrize(
    ("scheduler", "refused"),
    [
        (None, None),
        ("vllm.v1.core.sched.scheduler.Scheduler", None),
        ("vllm.v1.core.sched.async_scheduler.AsyncScheduler", None),
        (type("Scheduler", (), {"__module__": "vllm.v1.core.sched.scheduler"}), None),
        (type("Scheduler", (), {"__module__": "mine"}), "KVP324"),
    ],
)
def test_schedulers(scheduler, refused):
    assert code(scheduler_config__scheduler_cls=scheduler) == refused


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("executor", [None, "uni", "mp"])
def test_what_is_validated_passes(dtype, executor):
    changes = {
        "cache_config__cache_dtype": dtype,
        "parallel_config__distributed_executor_backend": executor,
    }
    assert code(**changes) is None


ALONE = LATENT | ONE_RANK | V2_OF_29


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (ALONE, None),
        (ALONE | simple(), None),
        (LATENT | ONE_RANK | V2_OF_32 | tiers("fs"), None),
        (LATENT | ONE_RANK | V2_OF_32 | multi(OFFLOADING), None),
        (HYBRID | ONE_RANK | V2_OF_30, None),
        (LATENT | HYBRID | ONE_RANK | V2_OF_30, "KVP311"),
    ],
)
def test_kinds_of_models_that_are_validated_in_one_way_only(changes, refused):
    assert code(**changes) == refused


def test_a_configuration_without_a_model_is_of_no_kind():
    assert code(model_config=None) is None
    window = {"scheduler_config__disable_hybrid_kv_cache_manager": False}
    assert code(model_config=None, machine__vllm="0.19.1", **simple(), **window) is None


OLD = {
    "machine__vllm": "0.19.1",
    "scheduler_config__disable_hybrid_kv_cache_manager": False,
    "model_config__get_sliding_window": lambda: 256,
}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (simple() | OLD, "KVP327"),
        (simple(lazy_offload=False) | OLD, "KVP327"),
        (simple(lazy_offload=True) | OLD, None),
        (simple() | OLD | {"scheduler_config__disable_hybrid_kv_cache_manager": True}, None),
        (simple() | OLD | {"model_config__get_sliding_window": lambda: None}, None),
        (OLD, None),
        (simple() | OLD | {"machine__vllm": "0.22.1"}, None),
    ],
)
def test_windows_in_eager_mode_of_old_releases(changes, refused):
    assert code(**changes) == refused


@pytest.mark.parametrize(
    ("device", "changes", "refused"),
    [
        ("cuda", simple(), None),
        ("cpu", simple(), None),
        ("xpu", simple(), "KVP318"),
        ("xpu", {}, None),
        ("xpu", multi(OFFLOADING, SIMPLE), "KVP318"),
    ],
)
def test_devices(device, changes, refused):
    assert code(machine__device=device, **changes) == refused


@pytest.mark.parametrize(
    ("value", "runs"), [(None, False), ("", False), ("0", False), ("1", True), ("true", True)]
)
def test_up_to_0_21_a_variable_alone_decides_on_the_runner(value, runs):
    environment = {} if value is None else {"VLLM_USE_V2_MODEL_RUNNER": value}
    here = facts(environment=environment)
    assert runs_v2(SimpleNamespace(), here) is runs
    assert runs_v2(SimpleNamespace(use_v2_model_runner=True), here) is True
    assert runs_v2(SimpleNamespace(use_v2_model_runner=False), here) is False


@pytest.mark.parametrize(
    ("release", "v2", "refused"),
    [
        ("0.28.0", False, False),
        ("0.29.0", False, True),
        ("0.29.0", True, False),
        ("0.30.0", True, False),
        ("0.31.0", True, True),
        ("0.33.0", True, True),
    ],
)
@pytest.mark.parametrize("contiguous", [False, True])
def test_hybrid_models_are_where_kvcached_has_them_or_they_ran(
    monkeypatch, release, v2, refused, contiguous
):
    made = config(connector=False, use_v2_model_runner=v2, machine__vllm=release, **HYBRID)
    here = facts(vllm=release, contiguous=contiguous)
    (rule,) = (rule for rule in RULES if rule.code == "KVP313")
    monkeypatch.setattr(admitted, "table", dict)
    assert (rule.refusal(made, here) is not None) is refused
    for runner in ("V1", "V2"):
        for layout in ("contiguous", "non-contiguous"):
            ran = [admitted.name_of(runner, layout, "Offloading", "hybrid")]
            monkeypatch.setattr(admitted, "table", lambda ran=ran: {"none": {release: ran}})
            same = (runner == "V2") is v2 and (layout == "contiguous") is contiguous
            assert (rule.refusal(made, here) is not None) is (refused and not same)
    made.model_config.is_hybrid = False
    assert rule.refusal(made, facts(vllm=release)) is None
    made.model_config = None
    assert rule.refusal(made, facts(vllm=release)) is None


def test_hybrid_models_where_a_configuration_does_not_name_the_runner():
    """Up to 0.21 it has no such attribute."""
    made = config(connector=False, machine__vllm="0.21.0", **HYBRID)
    del made.use_v2_model_runner
    (rule,) = (rule for rule in RULES if rule.code == "KVP313")
    assert rule.refusal(made, facts(vllm="0.21.0")) is None


def test_secondary_tiers_of_one_of_two_connectors():
    extra = tiers("fs")["kv_transfer_config__kv_connector_extra_config"]
    release = {"machine__vllm": "0.22.1"}
    assert code(**together(extra, {}), **release) == "KVP329"
    assert code(**together({}, extra), **release) is None  # the other connector has none


# The engine of the rules


def rule(applies: bool = True, **fields: Any) -> Rule:
    return Rule("KVP302", "k", lambda made, here: applies, "what", "why", "remedy", **fields)


def test_a_rule_is_for_its_releases():
    made = config()
    assert rule().refusal(made, facts()) is not None
    assert rule(applies=False).refusal(made, facts()) is None
    limited = rule(only_in=Span("0.27", "0.28"))
    assert limited.refusal(made, facts(vllm="0.27.1")) is not None
    assert limited.refusal(made, facts(vllm="0.28.0")) is None
    lifted = rule(unless_validated=Span("0.28"))
    assert lifted.refusal(made, facts(vllm="0.27.1")) is not None
    assert lifted.refusal(made, facts(vllm="0.28.0")) is None
    assert lifted.refusal(made, facts(vllm="0.28.9")) is not None


def test_a_scheme_of_a_checkpoint_whose_model_is_not_known():
    assert code(**SCHEME, model_config=None) == "KVP310"  # also where fp8 was compared
    assert code(**SCHEME, cache_config__cache_dtype="bfloat16", model_config=None) is None


def test_before_0_22_a_scheme_is_not_what_auto_means():
    made = config(**SCHEME, machine__vllm="0.21.0")
    assert check(made).code == "KVP340"
    assert check(made, lifted=("KVP340",)) is None


def test_sleep_mode_is_named_before_its_allocator():
    both = {"model_config__enable_sleep_mode": True, "model_config__enable_cumem_allocator": True}
    assert "is configured with sleep mode, because" in str(check(config(**both)))


def test_the_words_of_a_rule_may_depend_on_the_configuration():
    named = Rule("KVP302", "k", lambda *a: True, lambda made, here: here.device, "why", "remedy")
    assert str(named.refusal(config(), facts(device="xpu"))) == (
        "kvpatch refuses to start vLLM: xpu, because why; remedy, or set KVPATCH=0. [KVP302]"
    )
    assert named.refusal(config(), facts()).code == "KVP302"
    assert named.fault is rule().fault


def test_the_first_rule_that_is_broken_is_reported():
    passes, first, second = rule(applies=False), rule(), rule()
    assert rules.check(config(), facts(), (passes, first, second)) is not None
    assert rules.check(config(), facts(), (passes,)) is None
    assert rules.check(config(), facts(), (first,), lifted=("KVP302",)) is None
    always = rule(with_connector=False)
    for transfer in (None, SimpleNamespace(kv_connector=None)):
        made = config()
        made.kv_transfer_config = transfer
        assert rules.check(made, facts(), (first,)) is None
        assert rules.check(made, facts(), (always,)) is not None


def test_every_warning_about_a_configuration_is_logged(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(rules.log, "warning", lambda text, *values: said.append(text % values))
    one = rule(applies=False, warns=lambda made, here: "it will swap")
    none = rule(applies=False, warns=lambda made, here: "")
    two = rule(applies=False, warns=lambda made, here: "it rounds up")
    assert rules.check(config(), facts(), (one, none, two)) is None
    assert said == ["kvpatch: it will swap", "kvpatch: it rounds up"]


def test_references_to_rules_may_be_left_out():
    reference = "kvpatch.patches.simple_offload.rules:RULES"
    assert rules.of([None, reference, "", reference]) == (*SIMPLE_RULES, *SIMPLE_RULES)


# What the host device has room for


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({"cache_config__kv_cache_memory_bytes": 256 << 20}, False),  # as much as it has
        ({"cache_config__kv_cache_memory_bytes": (256 << 20) + 1}, True),
        ({"cache_config__kv_cache_memory_bytes": None}, False),  # vLLM decides later
        (
            {
                "cache_config__kv_cache_memory_bytes": 1 << 30,
                "cache_config__num_gpu_blocks_override": 100,  # which count
            },
            False,
        ),
        ({"cache_config__kv_cache_memory_bytes": 1 << 30, "machine__device": "cuda"}, False),
        ({"cache_config__kv_cache_memory_bytes": 1 << 30, "machine__environment": {}}, False),
    ],
)
@pytest.mark.parametrize("connector", [True, False])
def test_a_kv_cache_larger_than_the_host_device(more, refused, connector):
    here = {"machine__device": "cpu", "machine__environment": {HOST_DEVICE.name: "256MiB"}}
    assert code(connector=connector, **here | more) == ("KVP505" if refused else None)


# Several machines


@pytest.mark.parametrize("connector", [True, False])
def test_ranks_on_several_machines(connector):
    assert code(connector=connector, parallel_config__nnodes_within_dp=2) == "KVP378"
    # Engines of data parallelism, of which each is on one.
    one_each = {"parallel_config__nnodes": 2, "parallel_config__nnodes_within_dp": 1}
    assert code(connector=connector, **one_each) is None


# What no engine ran with


def test_experts_of_one_rank_are_all_of_them():
    experts = {"parallel_config__enable_expert_parallel": True}
    ranks = {"parallel_config__world_size": 2, "parallel_config__tensor_parallel_size": 2}
    assert code(**experts) is None
    assert code(**experts | ranks) == "KVP389"
    assert code(connector=False, **experts | ranks) is None


def _breaks(made: SimpleNamespace, code: str) -> bool:
    found = rules.refusals(made, facts(**made.machine), RULES)
    return code in {one.code for one in found}


@pytest.mark.parametrize("path", NEVER_SET)
def test_a_field_that_no_engine_ran_with(path):
    section, _, name = path.partition(".")
    method = {"method": "eagle"} if section == "speculative_config" else {}
    made = config(machine__vllm="0.33.0")
    owner = getattr(made, section, None) or SimpleNamespace(**method)
    setattr(made, section, owner)
    assert _breaks(made, "KVP390") is False
    setattr(owner, name, True)
    assert _breaks(made, "KVP390") is True


@pytest.mark.parametrize(
    ("role", "refused"), [("kv_both", False), ("kv_producer", True), ("kv_consumer", True)]
)
def test_a_connector_that_only_stores_or_loads(role, refused):
    assert code(kv_transfer_config__kv_role=role) == ("KVP390" if refused else None)
