"""The simulation of an engine with faults inside, and each of its components broken once."""

import pytest

from harness.simulate.__main__ import simulate

SEEDS = 40  # within which a mutation is found; most are in the first two


def test_every_invariant_holds():
    found = simulate(seed=1000, seeds=50)
    assert not [one["what"] for one in found["failed"]]
    assert found["counts"]["steps"] > 20_000


@pytest.mark.parametrize("kind", ["pooled", "pooled eager", "pooled lazy"])
def test_every_invariant_holds_with_a_host_pool(kind):
    found = simulate(seed=1000, seeds=25, kind=kind)
    assert not [one["what"] for one in found["failed"]]
    assert found["counts"]["looks at the pool"] > 1000
    assert found["counts"]["asked for memory"] > 10


@pytest.mark.parametrize(("kind", "mutations"), [(None, 20), ("pooled", 10)])
def test_the_world_finds_each_component_that_is_broken(kind, mutations):
    found = simulate("mutate", seeds=SEEDS, kind=kind)
    assert len(found) == mutations
    assert not [name for name, what in found.items() if not what]
