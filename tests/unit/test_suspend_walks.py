"""Random walks: verbs, limits, pauses and requests in any order; nothing and no limit is lost."""

import random
from contextlib import suppress

import pytest
from suspend_world import BLOCKS, MOST, PAGE, Pause

from kvpatch.patches.suspend import spill
from kvpatch.patches.suspend.suspension import Cannot, Phase
from kvpatch.upstream import kvcached_api

STEPS = 200


class Walk:
    """One walk of a world with a roomy tier."""

    def __init__(self, world, seed):
        self.world = world
        self.source = random.Random(seed)
        self.names = iter(range(1000))
        self.added = []
        self.keys = set()
        self.limit = MOST * PAGE  # the last one that anybody set
        world.tier.steps = self.source.randrange(5)
        world.fence = self.source.randrange(4)
        world.lag = self.source.randrange(1, 6)
        self.piece = self.source.choice([1, 3, 1 << 30])

    def act(self):
        world, source = self.world, self.source
        action = source.randrange(10)
        size = source.randrange(2, MOST + 1) * PAGE
        with suppress(Cannot):
            if action == 0:
                world.suspension.suspend(source.random() < 0.3, source.random() < 0.3, None)
            elif action == 1:
                world.suspension.resume()
            elif action == 2:
                world.suspension.limit(size)
                self.limit = size
            elif action == 3 and size != world.suspension._seen:  # kvctl; the same is no other wish
                world.manager.limit = self.limit = size
            elif action == 4:
                world.giving.look()
            elif action == 5:
                world.giving.rest()
                world.giving.advance()
            elif action == 6:
                world.scheduler.set_pause_state(source.choice(list(Pause)))
            else:
                self.request()

    def request(self):
        """A request that arrives, and that runs if it may: with a block that is free."""
        name = f"request{next(self.names)}"
        free = set(range(BLOCKS, MOST * BLOCKS)) - self.world.pool.used()
        free -= {
            block
            for page in kvcached_api.retired(self.world.manager)
            for block in range(page * BLOCKS, (page + 1) * BLOCKS)
        }
        runs = (
            self.world.scheduler.pause_state is Pause.UNPAUSED
            and self.world.manager.reported == self.world.manager.limit
        )
        blocks = sorted(free)[: self.source.randrange(1, 4)] if runs and free else []
        self.world.add(name, *blocks).left = self.source.randrange(1, 6)
        self.keys |= {f"{name}{block}".encode() for block in blocks}
        self.added.append(name)

    def check(self):
        world = self.world
        world.check()
        here = {world.pool._block_id_to_key[block] for block in world.pool._block_id_to_key}
        there = set(world.tier.blocks)
        assert here | there >= self.keys, sorted(self.keys - here - there)
        if world.suspension.phase is Phase.SUSPENDED:
            assert world.pool.used() == set()
            assert world.scheduler.pause_state is Pause.PAUSED_ALL


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_on_any_walk(worlds, seed, monkeypatch):
    world = worlds(room=10_000, gives=True)
    walk = Walk(world, seed)
    monkeypatch.setattr(spill, "EVERYTHING", walk.piece)
    for _ in range(STEPS):
        if walk.source.random() < 0.3:
            walk.act()
            walk.check()
        if world.scheduler.waiting and world.manager.reported != world.manager.limit:
            world.manager.reported = world.manager.limit  # kvcached's thread, as time passes
        world.step()
        walk.check()
    world.manager.reported = world.manager.limit
    world.scheduler.set_pause_state(Pause.UNPAUSED)
    world.suspension.resume()
    for _ in range(500):
        world.manager.reported = world.manager.limit
        world.step()
    walk.check()
    assert world.suspension.phase is Phase.RUNS
    assert sorted(world.finished) == sorted(walk.added), "a request was lost"
    assert world.giving.lost == 0
    assert world.manager.limit == walk.limit, "a limit was lost"
