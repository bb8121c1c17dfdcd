"""Freed pages that stay mapped for a while, and who has them given up."""

import random

import pytest
from test_fence_hooks import Engine, Manager, build, job, report
from test_fence_hooks import pages as pages

from kvpatch import state
from kvpatch.patches.fence import hooks
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.fence.reserve import PART, STEPS, Reserve
from kvpatch.upstream import kvcached_api

ROOM = 1000  # pages of the device that nobody has


def pages_of(retired):
    return [page for _, pages in retired for page in pages]


def steps(reserve, *counts):
    """Return how many pages are to go in steps that each see so many freed ones."""
    return [len(pages_of(reserve.split([(1, list(range(count)))], ROOM)[0])) for count in counts]


def test_what_is_free_in_so_many_steps_goes():
    reserve = Reserve()
    assert steps(reserve, 0, *[9] * (STEPS - 2), 8) == [0] * STEPS  # none was, in all of them
    assert steps(reserve, *[9] * 10, 7, *[9] * (STEPS - 11)) == [0] * (STEPS - 1) + [7]
    assert reserve.kept == 2
    assert steps(reserve, *[3] * STEPS) == [0] * (STEPS - 1) + [2]


def test_a_load_in_waves_keeps_what_each_of_them_needs():
    reserve = Reserve()
    assert not any(steps(reserve, *[abs(at % 60 - 30) for at in range(10 * STEPS)]))


def test_what_was_freed_first_goes_first():
    reserve = Reserve()
    third = (3, [30, 31])
    retired = [(1, [10]), (2, [20, 21, 22]), third]
    reserve.split(retired[:2], ROOM)  # four in the first step, of which three are free later
    for _ in range(STEPS - 2):
        assert reserve.split(retired, ROOM) == ([], retired)
    due, kept = reserve.split([(1, [10]), (2, [20]), third], ROOM)
    assert (due, kept) == ([], [(1, [10]), (2, [20]), third])
    for _ in range(STEPS - 1):
        reserve.split([(1, [10]), (2, [20, 21]), third], ROOM)
    due, kept = reserve.split([(1, [10]), (2, [20, 21]), third], ROOM)
    assert (due, kept) == ([(1, [10]), (2, [20, 21]), (3, [30])], [(3, [31])])
    assert kept[0][1] == [31]


@pytest.mark.parametrize("seed", range(20))
def test_no_page_is_lost_or_made_up(seed):
    source, reserve = random.Random(seed), Reserve()
    for _ in range(3 * STEPS):
        retired = [
            (epoch, [10 * epoch + page for page in range(source.randrange(1, 4))])
            for epoch in range(source.randrange(5))
        ]
        due, kept = reserve.split(retired, source.choice([0, 3, ROOM]))
        assert pages_of(due) + pages_of(kept) == pages_of(retired)
        assert reserve.kept == len(pages_of(kept))


class Device(Manager):
    """A page manager on a device with so many free pages."""

    def __init__(self, *retired):
        super().__init__(*retired)
        self.in_shrink = False
        self.free = ROOM

    def _get_cached_avail_physical_pages(self):
        return self.free


@pytest.fixture
def made(monkeypatch):
    monkeypatch.delenv("KVCACHED_MAX_RESERVED_PAGES")
    return start


def start():
    one = Engine(Device((1, [1, 2]), (2, [3])))
    one.manager = kvcached_api.manager_of(one)
    one.fenced = one.install()
    one.unfinished = True
    build(one, {}, {})
    return one


def test_an_engine_that_computes_keeps_what_it_has_freed_and_asks_no_worker(made):
    one = made()
    seen = []
    one.fenced.on_release.append(seen.extend)
    for _ in range(STEPS - 1):
        hooks.release_now(one)
    assert not one.manager.unmapped + seen
    assert pages_of(one.manager._retired_pages) == [1, 2, 3]
    hooks.release_now(one)
    assert not one.manager.unmapped  # of the first steps none is known
    for _ in range(STEPS):
        hooks.release_now(one)
    assert one.manager.unmapped == seen == [1, 2, 3]


@pytest.mark.parametrize(
    "because",
    ["nothing runs", "a limit", "kvcached shrinks", "the device is full", "no spare page"],
)
def test_it_gives_up_at_once(made, monkeypatch, because):
    if because == "no spare page":
        monkeypatch.setenv("KVCACHED_MAX_RESERVED_PAGES", " 0 ")
    one, asked = made(), []
    one.fenced.asked += [lambda: False, lambda: bool(asked)]
    if because != "no spare page":
        hooks.release_now(one)
        assert not one.manager.unmapped
    if because == "nothing runs":
        one.unfinished = False
    elif because == "a limit":
        asked.append("limit")
    elif because == "kvcached shrinks":
        one.manager.in_shrink = True
    elif because == "the device is full":
        one.manager.free = PART * 3 - 1
    hooks.release_now(one)
    assert one.manager.unmapped == [1, 2, 3]
    assert not one.fenced.holding


def test_as_many_stay_as_a_part_of_what_is_free(made):
    one = made()
    one.manager.free = PART * 3
    hooks.release_now(one)
    assert not one.manager.unmapped


def test_what_is_given_up_still_waits_for_its_copy(made):
    """A window's block may be stored while its page stays mapped."""
    one = made()
    hooks.release_now(one)
    build(one, {1: job("a", [21], [90])}, {})
    one.unfinished = False
    hooks.release_now(one)
    assert one.manager.unmapped == [1, 3]
    assert one.fenced.holding == 1
    report(one, {1: 1})
    hooks.release_now(one)
    assert one.manager.unmapped == [1, 3, 2]


def test_an_engine_that_is_paused_is_stepped_until_it_has_given_up(made):
    one = made()
    hooks.release_now(one)
    one.unfinished = False
    assert hooks.around_pending_work(lambda: False, one.planner, (), {}) is True
    hooks.release_now(one)
    assert hooks.around_pending_work(lambda: False, one.planner, (), {}) is False


def test_a_connector_that_pins_its_blocks_keeps_no_page(made):
    """It cannot ask for a step, so that a paused engine would keep them."""
    one = Engine(Device((1, [1])))
    one.scheduler.connector = type("Other", (), {"scheduler_manager": object()})()
    one.install()
    one.unfinished = True
    hooks.release_now(one)
    manager = kvcached_api.manager_of(one)
    assert manager.unmapped == [1]
    fenced = state.find(manager, Fenced)
    assert fenced is not None and fenced.holding == 0
