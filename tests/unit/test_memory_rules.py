"""Rules of the host's memory by themselves: several CPU tiers, nothing free, nothing known."""

import pytest
from fakes import facts
from test_rules import GIB, OLD, ONE_RANK, ROOMY, config, tier

from kvpatch import rules
from kvpatch.patches.offloading import memory_rules

CONNECTORS = {"simple": "SimpleCPUOffloadConnector", "tier": "OffloadingConnector"}


def several(*inside, **more):
    """A MultiConnector; ``inside`` have the GiB of one of ``CONNECTORS`` each."""
    connectors = [
        {
            "kv_connector": CONNECTORS[name],
            "kv_connector_extra_config": {"cpu_bytes_to_use": size * GIB},
        }
        for one in inside
        for name, size in one.items()
    ]
    return {
        "kv_transfer_config__kv_connector": "MultiConnector",
        "kv_transfer_config__kv_connector_extra_config": {"connectors": connectors},
        "machine__memory": ROOMY,
        **more,
    }


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


@pytest.mark.parametrize("sizes", [(600, 1), (1, 600)])
def test_each_tier_is_registered_by_itself(sizes):
    inside = [{"simple": size} for size in sizes]
    roomy = ROOMY._replace(container=None, available=900 * GIB)
    changes = several(*inside, machine__memory=roomy) | ONE_RANK
    assert refused_for_memory(changes) == ("KVP339", "the CPU tier is one range of 512 GiB or more")


@pytest.mark.parametrize("sizes", [(70, 50), (50, 70)])
def test_the_tiers_of_all_connectors_add_up(sizes):
    inside = [{"simple": size} for size in sizes]
    assert refused_for_memory(several(*inside)) == (
        "KVP337",
        "the CPU tier takes 120.0 GiB and the memory limit of this container has 100.0 GiB left",
    )


def test_nothing_free_is_said_as_that():
    assert refused_for_memory(tier(64, shm=0)) == (
        "KVP336",
        "the CPU tier takes 64.0 GiB and /dev/shm has 0 B free",
    )


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
        ([{"tier": 17}, {"tier": 33}], "of 50.0 GiB takes 96.0 GiB"),
        ([{"simple": 20}, {"tier": 33}], "of 33.0 GiB takes 64.0 GiB"),
        ([{"tier": 33}, {"simple": 20}], "of 33.0 GiB takes 64.0 GiB"),
    ],
)
def test_only_what_torch_rounds_is_counted_as_rounded(inside, said):
    (sentence,) = warned_of_memory(several(*inside) | OLD)
    assert sentence.startswith(f"the CPU tier {said}, because torch rounds")


def test_each_engine_of_a_server_has_a_tier_of_the_size():
    engines = {
        "parallel_config__data_parallel_size": 4,
        "parallel_config__data_parallel_size_local": 2,
        **ONE_RANK,
    }
    of_one = tier(16, shm=20) | {"machine__vllm": "0.32.0"}
    assert refused_for_memory(of_one | ONE_RANK) is None
    code, what = refused_for_memory(of_one | engines)
    assert code == "KVP336"
    assert what == "the CPU tiers of 2 engines take 32.0 GiB and /dev/shm has 20.0 GiB free"
    tight = tier(16, shm=None, container=None, available=20, swap=20)
    (said,) = warned_of_memory(tight | engines | {"machine__vllm": "0.32.0"})
    assert said.startswith("the CPU tiers of 2 engines take 32.0 GiB and 20.0 GiB are available")
