"""The blocks that requests with windows know: what is forgotten, and how much is looked at."""

import random

from fakes import known, planner, scheduler

from kvpatch import state
from kvpatch.patches.fence.fence import Fence
from kvpatch.patches.fence.hooks import Fenced, after_reset_of_tier, forget_freed_blocks
from kvpatch.patches.fence.windows import KnownBlocks, span_of

PAGE = 100  # blocks: no whole number of spans


class Looked(KnownBlocks):
    """Counts the positions that are read."""

    looks = 0

    def __getitem__(self, position):
        self.looks += 1
        return super().__getitem__(position)


def fence():
    return Fence(lambda page: (page * PAGE, page * PAGE + PAGE), workers=1)


def forget(blocks, gone):
    blocks.catch_up()
    blocks.forget(gone, set(map(span_of, gone)))


def one_window(*blocks):
    """A planner of a group with a window and a request, and what it has of both."""
    made = planner({"a": blocks}, groups=1, windows=(0,))
    return made, made._req_status["a"].group_states[0]


def test_only_places_near_freed_blocks_are_looked_at():
    known = Looked(range(1, 100_001))
    known.catch_up()
    for page in range(500, 510):
        known.looks = 0
        forget(known, set(range(page * PAGE, page * PAGE + PAGE)))
        assert known.looks < 5 * PAGE
    left = [block for block in range(1, 100_001) if not 500 <= block // PAGE < 510]
    assert [*filter(None, known)] == left


def test_a_step_that_frees_nothing_looks_at_no_place():
    planner, of = one_window()
    of.block_ids = blocks = Looked(range(1, 1001))
    for _ in range(3):
        forget_freed_blocks(planner, fence(), [])
    assert blocks.looks == 0
    assert of.block_ids is blocks


def test_a_list_is_taken_over_once_and_a_new_one_again():
    planner, of = one_window(150, 250)
    forget_freed_blocks(planner, fence(), [])
    kept = of.block_ids
    forget_freed_blocks(planner, fence(), [1])
    assert of.block_ids is kept
    assert kept == [0, 250]
    of.block_ids = [150]
    forget_freed_blocks(planner, fence(), [1])
    assert of.block_ids == [0]


def test_blocks_are_forgotten_as_by_a_walk_over_all_of_them():
    source = random.Random(3)
    for _ in range(30):
        plain = []
        known = KnownBlocks(plain)
        forgotten = 0
        for _ in range(200):
            match source.randrange(12):
                case 0:
                    plain.clear()
                    known.clear()
                case 1 | 2 | 3 if plain:  # vLLM's own, when a block is allocated again
                    position = source.randrange(len(plain))
                    plain[position] = known[position] = 0
                case 4 | 5:
                    gone = set(range(begin := source.randrange(400), begin + PAGE))
                    forget(known, gone)
                    forgotten += len(gone.intersection(plain))
                    plain = [0 if block in gone else block for block in plain]
                case 6:
                    known.catch_up()
                case _:
                    begin = source.randrange(400)
                    more = [*range(begin, begin + source.randrange(40)), 0, source.randrange(400)]
                    plain.extend(more)
                    known.extend(more)
            assert known == plain
        assert forgotten


def test_a_reset_of_the_tier_stores_no_block_that_has_left_a_window():
    planner, of = one_window(5, 6, 7, 8, 9)
    resets = []
    after_reset_of_tier(lambda *args: resets.append(args), planner, (1,), {})
    assert (resets, of.block_ids) == ([(1,)], [5, 6, 7, 8, 9]), "without a fence"
    holding = scheduler({"a": [True, False, True, False]}, groups=1)
    state.attach(planner, Fenced(fence(), None, holding))
    after_reset_of_tier(lambda *args: resets.append(args), planner, (2,), {})
    assert (resets, known(planner, "a")) == ([(1,), (2,)], [[0, 6, 0, 8, 9]])
