"""A short simulation of an engine with faults inside: every invariant holds, by fixed seeds."""

import pytest

from harness.simulate.__main__ import simulate

SEEDS = 8  # of all kinds of connectors
OPERATIONS = 120


@pytest.fixture(scope="module")
def played():
    return simulate(seed=1, seeds=SEEDS, steps=OPERATIONS, again=8)


def test_every_invariant_holds_in_every_world(played):
    assert not [one["what"] for one in played["failed"]]
    assert sum(played["kinds"].values()) == SEEDS
    assert set(played["kinds"]) == {"offloading", "tiers", "eager", "lazy"}
    assert played["counts"]["steps"] > 2000


def test_something_happened_in_them(played):
    for what in ("finished", "copies", "pages unmapped", "preemptions", "aborts", "limit moves"):
        assert played["counts"][what] > 0, what


def test_a_seed_is_replayed_by_its_number(played):
    assert played["replayed"] is True
