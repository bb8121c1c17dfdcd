"""The simulation of engines that share: what is simulated, and that its memory is never more."""

import random

from harness.balancing import host_pool, many
from harness.balancing.arms import ARMS
from harness.balancing.host_pool import Request
from harness.balancing.traces import Turn

BLOCK = 1 << 20


def requests(engines=2, count=60):
    """Prompts of a few conversations of each engine, one after the other."""
    drawn = random.Random(0)
    found = []
    for number in range(count):
        engine, conversation = number % engines, drawn.randrange(4)
        keys = tuple(range(conversation * 100, conversation * 100 + drawn.randrange(4, 20)))
        found.append(Request(5.0 * number, engine, keys, 100))
    return found


def test_loads_in_turns_go_on_where_they_stood_still():
    load = [(float(second), Turn((second,), 512, 1)) for second in range(4)]
    found = host_pool.in_turns([load, load], 2.0, 4.0)
    assert [(one.at, one.engine, one.keys[0]) for one in found] == [
        (0.0, 0, 0), (1.0, 0, 1), (2.0, 1, 0), (3.0, 1, 1),
        (4.0, 0, 2), (5.0, 0, 3), (6.0, 1, 2), (7.0, 1, 3),
    ]  # fmt: skip
    at_once = host_pool.in_turns([load, load], 0.0, 2.0)
    assert [(one.at, one.engine) for one in at_once] == [(0.0, 0), (0.0, 1), (1.0, 0), (1.0, 1)]


def test_with_memory_for_all_every_arm_finds_the_same():
    asked = requests()
    blocks = 1000
    halves = host_pool.parts(asked, blocks, 2)
    assert host_pool.one_lru(asked, blocks, 2).hits == halves.hits
    found = host_pool.pooled(asked, blocks * BLOCK, BLOCK, 2)
    assert found.hits == halves.hits
    assert found.lost == found.given == 0


def test_a_short_pool_is_shared_and_never_exceeded(monkeypatch):
    blocks, most = 32, 0
    turn = host_pool.Keeper.turn
    tiers = set()

    def turned(self):
        nonlocal most
        turn(self)
        tiers.add(self.extents)
        most = max(most, sum(len(one.open) * one.per for one in tiers))

    monkeypatch.setattr(host_pool.Keeper, "turn", turned)
    monkeypatch.setattr(host_pool, "EXTENT", 4 * BLOCK)
    found = host_pool.pooled(requests(), blocks * BLOCK, BLOCK, 2)
    assert len(tiers) == 2
    assert blocks // 2 < most <= blocks
    assert all(found.hits)
    assert found.given > 0


def test_the_same_requests_find_the_same(tmp_path):
    first, again = (host_pool.pooled(requests(), 32 * BLOCK, BLOCK, 2) for _ in range(2))
    assert first == again


def test_many_models_on_one_lru_serve_no_less_than_on_static_parts():
    sessions = [
        [Turn(tuple(range(8 * turn)), 4096 * turn, 20, 5.0) for turn in range(1, 6)]
        for _ in range(20)
    ]
    parts, *_, ideal = (many.simulate(arm, 300.0, sessions, 1) for arm in ARMS)
    assert len(parts["models"]) == many.MODELS
    assert 0 < parts["tokens_per_second"] <= ideal["tokens_per_second"]
