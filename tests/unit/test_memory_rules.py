"""Rules of the host's memory by themselves: several CPU tiers, nothing free, nothing known."""

import pytest
from fakes import facts
from test_rules import GIB, OLD, ROOMY, at, config, engines, of_connectors, tier

from kvpatch import rules
from kvpatch.patches.offloading import memory_rules

SIMPLE, OFFLOADING = "SimpleCPUOffloadConnector", "OffloadingConnector"


def several(*inside):
    """A MultiConnector; ``inside`` are names of connectors, and the GiB of their CPU tiers."""
    made = of_connectors(
        [
            {"kv_connector": name, "kv_connector_extra_config": {"cpu_bytes_to_use": size * GIB}}
            for name, size in inside
        ]
    )
    return made | {"machine__memory": ROOMY}


def refused_for_memory(changes):
    """The code and the words of the rule of the host's memory that a configuration breaks."""
    made = config(**changes)
    refused = rules.check(made, facts(**made.machine), memory_rules.RULES)
    return refused and (refused.code, refused.what)


def warned_of_memory(changes):
    made = config(**changes)
    here = facts(**made.machine)
    assert refused_for_memory(changes) is None
    return [said for rule in memory_rules.RULES if rule.warns and (said := rule.warns(made, here))]


def test_a_process_that_cannot_read_the_hosts_memory_refuses_none():
    made = config(**tier(900))
    for memory in (None, lambda: None):
        here = facts()._replace(memory=memory)
        assert rules.check(made, here, memory_rules.RULES[:3]) is None
        assert [rule.warns(made, here) for rule in memory_rules.RULES if rule.warns] == [""]


LARGE = {"machine__memory": ROOMY._replace(container=None, available=900 * GIB)}
ONE_RANGE = "the CPU tier is one range of 512 GiB or more"
TOGETHER = "the CPU tier takes 120.0 GiB and the memory limit of this container has 100.0 GiB left"


@pytest.mark.parametrize(
    ("changes", "code", "what"),
    [
        # Each tier is registered by itself, and those of all connectors add up.
        (several((SIMPLE, 600), (SIMPLE, 1)) | LARGE, "KVP339", ONE_RANGE),
        (several((SIMPLE, 1), (SIMPLE, 600)) | LARGE, "KVP339", ONE_RANGE),
        (several((SIMPLE, 70), (SIMPLE, 50)), "KVP337", TOGETHER),
        (several((SIMPLE, 50), (SIMPLE, 70)), "KVP337", TOGETHER),
        (tier(64, shm=0), "KVP336", "the CPU tier takes 64.0 GiB and /dev/shm has 0 B free"),
    ],
)
def test_tiers_that_do_not_fit(changes, code, what):
    assert refused_for_memory(changes) == (code, what)


@pytest.mark.parametrize(
    "changes",
    [
        tier(64, available=64),  # just fits
        tier(33, container=None) | {"machine__contiguous": False},  # in /dev/shm, not rounded
        {"kv_transfer_config__kv_connector_extra_config": {}, "machine__memory": ROOMY},
        tier(33) | OLD | {"machine__memory": None},
        tier(33) | OLD | {"machine__memory": None, "machine__contiguous": False},
    ],
)
def test_nobody_is_warned_without_need(changes):
    assert warned_of_memory(changes) == []


def test_a_tier_of_one_byte_takes_memory_too():
    changes = tier(1 / GIB) | {"machine__memory": ROOMY._replace(available=0, swap=1)}
    (said,) = warned_of_memory(changes)
    assert said.startswith("the CPU tier takes 1 B and 0 B are available")


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ([(OFFLOADING, 17), (OFFLOADING, 33)], "of 50.0 GiB takes 96.0 GiB"),
        ([(SIMPLE, 20), (OFFLOADING, 33)], "of 33.0 GiB takes 64.0 GiB"),
        ([(OFFLOADING, 33), (SIMPLE, 20)], "of 33.0 GiB takes 64.0 GiB"),
    ],
)
def test_only_what_torch_rounds_is_counted_as_rounded(inside, said):
    (sentence,) = warned_of_memory(several(*inside) | OLD)
    assert sentence.startswith(f"the CPU tier {said}, because torch rounds")


def test_each_engine_of_a_server_has_a_tier_of_the_size():
    two_here = engines(2) | {"parallel_config__data_parallel_size": 4} | at("0.32.0")
    assert refused_for_memory(tier(16, shm=20) | at("0.32.0")) is None
    what = "the CPU tiers of 2 engines take 32.0 GiB and /dev/shm has 20.0 GiB free"
    assert refused_for_memory(tier(16, shm=20) | two_here) == ("KVP336", what)
    tight = tier(16, shm=None, container=None, available=20, swap=20)
    (said,) = warned_of_memory(tight | two_here)
    assert said.startswith("the CPU tiers of 2 engines take 32.0 GiB and 20.0 GiB are available")
