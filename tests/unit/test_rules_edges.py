"""Rules, for one of several connectors, the other value of a boundary, and the next release."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import facts
from test_rules import (
    BFLOAT16,
    HYBRID,
    LATENT,
    NO_GROUPS,
    ON_HOST,
    ONE_RANK,
    SCHEME,
    SYNC_LOADS,
    TWO_RANKS,
    V2_OF_30,
    V2_OF_32,
    WINDOWS,
    breaks,
    check,
    chunks,
    code_of,
    config,
    extra_of,
    multi,
    of_connectors,
    rule,
    simple,
    spec,
    the_rule,
    tiers,
)

from kvpatch import admitted, rules
from kvpatch.patches.kvcached_adapters.rules import runs_v2
from kvpatch.patches.offloading.connector_rules import SELF_DESCRIBING, has_tiers
from kvpatch.patches.offloading.model_rules import EXPERTS
from kvpatch.patches.offloading.rules import NEVER_SET
from kvpatch.patches.simple_offload.rules import RULES as SIMPLE_RULES
from kvpatch.rules import Rule

OFFLOADING, SIMPLE = "OffloadingConnector", "SimpleCPUOffloadConnector"
SUPPORT = (Path(__file__).parents[2] / "docs/support.md").read_text().splitlines()


def inside(name, **extra):
    """A connector in a MultiConnector."""
    return {"kv_connector": name, "kv_connector_extra_config": extra}


def together(offloading, simple):
    """Both connectors in a MultiConnector, with an extra config each."""
    return of_connectors([inside(OFFLOADING, **offloading), inside(SIMPLE, **simple)])


def scheduler(given):
    return {"scheduler_config__scheduler_cls": given}


def of_module(module):
    return scheduler(type("Scheduler", (), {"__module__": module}))


MINE = {"kv_transfer_config__kv_connector_module_path": "mine"}
SECOND_MINE = of_connectors(
    [inside(OFFLOADING), inside(SIMPLE) | {"kv_connector_module_path": "m"}]
)
NO_MODEL = {"model_config": None}
ON_XPU = {"machine__device": "xpu"}
OF_22 = {"machine__vllm": "0.22.1"}
OLD = {"machine__vllm": "0.19.1"} | WINDOWS
NO_WINDOWS = {"model_config__get_sliding_window": lambda: None}
OBJECTS, FILES = extra_of(tiers("obj")), extra_of(tiers("fs"))
EDGES = [
    # A class of one's own under a validated name is another connector.
    ({"kv_transfer_config__kv_connector": OFFLOADING} | MINE, "KVP302"),
    ({"kv_transfer_config__kv_connector": SIMPLE} | MINE, "KVP302"),
    ({"kv_transfer_config__kv_connector": "MultiConnector"} | MINE, "KVP302"),
    ({"kv_transfer_config__kv_connector": "NixlConnector"} | MINE, "KVP302"),
    (multi(OFFLOADING, SIMPLE, kv_connector_module_path="mine"), "KVP319"),
    (SECOND_MINE, "KVP319"),
    (multi(SIMPLE, SIMPLE), "KVP320"),
    (multi(SIMPLE, OFFLOADING, SIMPLE), "KVP320"),
    # One of two connectors is enough, in either place.
    (multi(OFFLOADING, SIMPLE), None),
    (together({}, {}), None),
    (together({"canonical_layout": True}, {}), "KVP304"),
    (together({}, {"canonical_layout": True}), "KVP304"),
    (together({"spec_name": "MySpec"}, {}), "KVP303"),
    (together({}, {"spec_name": "MySpec"}), None),  # it has no specs and ignores the key
    (of_connectors([inside(SIMPLE), inside(OFFLOADING, spec_name="MySpec")]), "KVP303"),
    (together({}, {"kv_offload_backend": "disk"}), "KVP315"),
    (together({}, {"kv_offload_backend": "cpu"}), None),
    (together({"kv_offload_backend": "disk"}, {}), None),
    (of_connectors([inside(SIMPLE), inside(OFFLOADING, **OBJECTS)]), "KVP322"),
    (together(OBJECTS, {}), "KVP322"),
    (together(FILES, {}) | OF_22, "KVP329"),
    (together({}, FILES) | OF_22, None),  # the other connector has none
    ({"scheduler_config__policy": "priority"}, None),  # without tiers
    # Specs and their modules.
    (spec("CPUOffloadingSpec", "vllm.v1.kv_offload.cpu"), None),
    (spec("TieringOffloadingSpec", "vllm.v1.kv_offload.tiering.spec"), None),
    (spec("HostOffloadingSpec"), "KVP303"),
    (spec("HostOffloadingSpec", "mine"), "KVP303"),
    (spec("HostTieringOffloadingSpec", "kvpatch.hostdevice.offloading"), "KVP303"),
    # Schedulers.
    (scheduler(None), None),
    (scheduler("vllm.v1.core.sched.scheduler.Scheduler"), None),
    (scheduler("vllm.v1.core.sched.async_scheduler.AsyncScheduler"), None),
    (of_module("vllm.v1.core.sched.scheduler"), None),
    (of_module("mine"), "KVP324"),
    # Kinds of models that are validated in one way only.
    (LATENT | ONE_RANK | V2_OF_32 | tiers("fs"), None),
    (LATENT | ONE_RANK | V2_OF_32 | multi(OFFLOADING), None),
    (LATENT | HYBRID | ONE_RANK | V2_OF_30, "KVP311"),
    (NO_MODEL | {"machine__vllm": "0.19.1"} | simple(), None),
    # Windows in eager mode of old releases.
    (simple(lazy_offload=False) | OLD, "KVP327"),
    (simple(lazy_offload=True) | OLD, None),
    (simple() | OLD | NO_GROUPS, None),
    (simple() | OLD | NO_WINDOWS, None),
    (OLD, None),
    (simple() | OLD | OF_22, None),
    (ON_XPU, None),
    (ON_XPU | multi(OFFLOADING, SIMPLE), "KVP318"),
    # A scheme of a checkpoint whose model is not known, also where fp8 was compared.
    (SCHEME | NO_MODEL, "KVP310"),
    (SCHEME | NO_MODEL | BFLOAT16, None),
]


@pytest.mark.parametrize(("changes", "refused"), EDGES)
def test_edges(changes, refused):
    assert code_of(**changes) == refused


BLOCKS, DISK, LAZY = {"num_cpu_blocks": 100}, {"kv_offload_backend": "disk"}, {"lazy_offload": True}


@pytest.mark.parametrize(
    ("code", "release", "extra", "refused"),
    [
        ("KVP352", "0.28.0", (BLOCKS, {}), True),
        ("KVP352", "0.28.0", ({}, BLOCKS), True),
        ("KVP315", "0.19.1", ({}, DISK), True),
        ("KVP315", "0.19.1", (DISK, {}), True),
        ("KVP315", "0.19.1", ({}, {"kv_offload_backend": "cpu"}), False),
        ("KVP327", "0.19.1", (LAZY, {}), True),
        ("KVP327", "0.19.1", ({}, LAZY), True),
        ("KVP327", "0.19.1", (LAZY, LAZY), False),
        ("KVP316", "0.29.0", (LAZY, {}), True),
        ("KVP316", "0.29.0", ({}, LAZY), True),
        ("KVP316", "0.29.0", (LAZY, LAZY), True),
        ("KVP316", "0.29.0", ({}, {}), False),
        ("KVP316", "0.30.0", (LAZY, LAZY), False),
    ],
)
def test_each_of_two_of_a_kind_counts(code, release, extra, refused):
    """vLLM would run them, if no other rule refused two."""
    connectors = of_connectors([inside(SIMPLE, **one) for one in extra])
    assert breaks(code, connectors | WINDOWS | {"machine__vllm": release}) is refused


@pytest.mark.parametrize(
    ("code", "release", "extra"),
    [
        ("KVP354", "0.16.0", {"eviction_policy": "arc"}),
        ("KVP355", "0.28.0", {"block_size": 64}),
        ("KVP358", "0.34.0", {"store_threshold": 2}),
        ("KVP359", "0.34.0", {"blocks_per_chunk": 2}),
        ("KVP377", "0.34.0", {"backpressure": True}),
        ("KVP377", "0.34.0", {"self_describing_kv_events": True}),
    ],
)
def test_the_second_of_two_tiers_counts(code, release, extra):
    """As above; and of SimpleCPUOffloadConnector, which does not read the keys, none does."""
    changes = WINDOWS | {"machine__vllm": release}
    both = of_connectors([inside(OFFLOADING), inside(OFFLOADING, **extra)])
    assert breaks(code, changes | both)
    assert not breaks(code, changes | of_connectors([inside(OFFLOADING)] * 2))
    assert code == "KVP377" or not breaks(code, changes | simple(**extra))


@pytest.mark.parametrize(
    ("extra", "refused"), [(({}, {}), False), ((SYNC_LOADS, {}), True), (({}, SYNC_LOADS), False)]
)
@pytest.mark.parametrize("turned", [False, True])
def test_loads_within_a_step_are_those_of_one_connector_in_any_place(extra, refused, turned):
    changes = together(*extra)
    if turned:
        extra_of(changes)["connectors"].reverse()
    assert breaks("KVP351", changes | {"machine__vllm": "0.33.0"}) is refused


def test_the_tiers_of_either_connector_count():
    assert has_tiers(config(**together(FILES, {})))
    assert has_tiers(config(**of_connectors([inside(SIMPLE), inside(OFFLOADING, **FILES)])))


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
    made = {"machine__vllm": release, "machine__contiguous": contiguous, "use_v2_model_runner": v2}
    made["kv_transfer_config"] = None
    monkeypatch.setattr(admitted, "table", dict)
    assert breaks("KVP313", made | HYBRID) is refused
    assert not breaks("KVP313", made) and not breaks("KVP313", made | NO_MODEL)
    for runner in ("V1", "V2"):
        for layout in ("contiguous", "non-contiguous"):
            ran = [admitted.name_of(runner, layout, "Offloading", "hybrid")]
            monkeypatch.setattr(admitted, "table", lambda ran=ran: {"none": {release: ran}})
            same = (runner == "V2") is v2 and (layout == "contiguous") is contiguous
            assert breaks("KVP313", made | HYBRID) is (refused and not same)


def test_hybrid_models_where_a_configuration_does_not_name_the_runner():
    """Up to 0.21 it has no such attribute."""
    made = config(connector=False, machine__vllm="0.21.0", **HYBRID)
    del made.use_v2_model_runner
    assert the_rule("KVP313").refusal(made, facts(vllm="0.21.0")) is None


def test_before_0_22_a_scheme_is_not_what_auto_means():
    made = config(**SCHEME, machine__vllm="0.21.0")
    assert check(made).code == "KVP340"
    assert check(made, lifted=("KVP340",)) is None


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
    said = []
    monkeypatch.setattr(rules.log, "warning", lambda text, *values: said.append(text % values))
    one = rule(applies=False, warns=lambda made, here: "it will swap")
    none = rule(applies=False, warns=lambda made, here: "")
    two = rule(applies=False, warns=lambda made, here: "it rounds up")
    assert rules.check(config(), facts(), (one, none, two)) is None
    assert said == ["kvpatch: it will swap", "kvpatch: it rounds up"]


def test_references_to_rules_may_be_left_out():
    reference = "kvpatch.patches.simple_offload.rules:RULES"
    assert rules.of([None, reference, "", reference]) == (*SIMPLE_RULES, *SIMPLE_RULES)


@pytest.mark.parametrize(
    ("size", "more", "refused"),
    [
        (256 << 20, {}, False),  # as much as it has
        ((256 << 20) + 1, {}, True),
        (None, {}, False),  # vLLM decides later
        (1 << 30, {"cache_config__num_gpu_blocks_override": 100}, False),  # which count
        (1 << 30, {"machine__device": "cuda"}, False),
        (1 << 30, {"machine__environment": {}}, False),
    ],
)
@pytest.mark.parametrize("connector", [True, False])
def test_a_kv_cache_larger_than_the_host_device(size, more, refused, connector):
    made = ON_HOST | {"cache_config__kv_cache_memory_bytes": size} | more
    assert code_of(connector=connector, **made) == ("KVP505" if refused else None)


def test_engines_of_which_each_is_on_one_machine_start():
    one_each = {"parallel_config__nnodes": 2, "parallel_config__nnodes_within_dp": 1}
    for connector in (True, False):
        assert code_of(connector=connector, **one_each) is None


def test_experts_of_one_rank_are_all_of_them():
    for apart in (False, True):
        experts = {"model_config__is_moe": True, "parallel_config__enable_expert_parallel": apart}
        assert code_of(**experts, **ONE_RANK) is None


@pytest.mark.parametrize(("apart", "name"), EXPERTS.items())
def test_experts_over_ranks_start_where_they_ran(monkeypatch, apart, name):
    experts = {"model_config__is_moe": True, "parallel_config__enable_expert_parallel": apart}
    made = TWO_RANKS | experts | {"machine__vllm": "0.33.0"}
    one_layer = {"model_config__hf_text_config": SimpleNamespace(num_hidden_layers=1)}
    monkeypatch.setattr(admitted, "table", dict)
    assert check(config(**made)).what.endswith(" and expert parallelism") is apart
    assert code_of(**made | one_layer) == "KVP389"
    monkeypatch.setattr(admitted, "table", lambda: {name: {"0.33.0": ["Offloading"]}})
    assert code_of(**made) is None
    assert code_of(**made | {"parallel_config__enable_expert_parallel": not apart}) == "KVP389"
    assert code_of(**made | {"machine__vllm": "0.32.0"}) == "KVP389"
    if not apart:  # a config.json may name experts that no layer has
        dense = SimpleNamespace(first_k_dense_replace=4, num_hidden_layers=4)
        dense_layers = {"machine__vllm": "0.32.0", "model_config__hf_text_config": dense}
        assert code_of(**made | dense_layers) != "KVP389"


def listed(*beginning):
    """What docs/support.md names in a line that begins so."""
    return re.findall(r"`(\w+)`", next(one for one in SUPPORT if one.startswith(beginning)))


@pytest.mark.parametrize("name", listed("- `NixlConnector`"))
def test_a_connector_that_registers_its_memory_once(name):
    assert breaks("KVP391", {"kv_transfer_config__kv_connector": name})


@pytest.mark.parametrize("key", listed("- `cache_policy_module_path`"))
def test_a_key_that_no_engine_ran_with(monkeypatch, key):
    monkeypatch.setattr(admitted, "ran_with", lambda name, *_: False)
    assert breaks("KVP377", chunks(**{key: True}))
    monkeypatch.setattr(admitted, "ran_with", lambda name, *_: name == SELF_DESCRIBING)
    assert breaks("KVP377", chunks(**{key: True})) is (key != "self_describing_kv_events")


@pytest.mark.parametrize("name", listed("- offloading with `enable_dbo`")[:-2])
def test_a_field_that_no_engine_ran_with(name):
    (section,) = (path.removesuffix(f".{name}") for path in NEVER_SET if path.endswith(f".{name}"))
    method = {"method": "eagle"} if section == "speculative_config" else {}
    owner = getattr(config(), section, None) or SimpleNamespace(**method)
    made = {"machine__vllm": "0.33.0", section: owner}
    assert not breaks("KVP390", made)
    setattr(owner, name, True)
    assert breaks("KVP390", made)


@pytest.mark.parametrize(
    ("role", "refused"), [("kv_both", False), ("kv_producer", True), ("kv_consumer", True)]
)
def test_a_connector_that_only_stores_or_loads(role, refused):
    assert code_of(kv_transfer_config__kv_role=role) == ("KVP390" if refused else None)
