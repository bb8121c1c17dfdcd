"""The fence's two rules, without an engine: pages of ten blocks, two workers."""

from __future__ import annotations

import random

from kvpatch.patches.fence.fence import Fence, Transfer


def fence() -> Fence:
    return Fence(lambda page: (page * 10, page * 10 + 10), workers=2)


def test_a_page_freed_since_the_last_plan_is_held() -> None:
    one = fence()
    assert one.split([(1, [3])], can_plan=True) == ([], [(1, [3])])
    assert one.holding == 1
    one.plan([], epoch=1)
    assert one.split([(1, [3])], can_plan=True) == ([3], [])
    assert one.holding == 0
    assert one.counters.held_for_plan == 1
    assert one.counters.longest_hold == 1


def test_a_page_freed_after_the_plan_waits_for_the_next_one() -> None:
    one = fence()
    one.plan([], epoch=1)
    assert one.split([(1, [3]), (2, [4])], can_plan=True) == ([3], [(2, [4])])


def test_an_engine_that_can_plan_nothing_holds_nothing_for_a_plan() -> None:
    assert fence().split([(7, [3])], can_plan=False) == ([3], [])


def test_a_page_is_held_until_every_worker_reported_its_transfer() -> None:
    one = fence()
    one.plan([(5, Transfer("r", (31, 32)))], epoch=1)
    for reports in range(2):
        assert one.split([(1, [3, 4])], can_plan=True)[1] == [(1, [3])], reports
        one.report(5, 1)
    assert one.split([(1, [3])], can_plan=True) == ([3], [])
    assert one.counters.held_for_transfer == 1
    assert one.transfers == {}


def test_two_transfers_of_one_block_both_hold_its_page() -> None:
    one = fence()
    one.plan([(1, Transfer("r", (30,))), (2, Transfer("s", (30,)))], epoch=1)
    one.report(1, 2)
    assert one.split([(1, [3])], can_plan=True) == ([], [(1, [3])])
    one.report(2, 2)
    assert one.split([(1, [3])], can_plan=True) == ([3], [])


def test_a_transfer_the_fence_never_saw_is_no_error_and_leaves_nothing() -> None:
    one = fence()
    one.report(99, 2)
    one.report(100, 1)  # of two workers
    assert not one._reports


def test_a_reused_page_is_no_longer_counted_as_held() -> None:
    one = fence()
    one.split([(1, [3])], can_plan=True)
    one.split([], can_plan=True)
    assert one.holding == 0


def test_no_page_is_released_while_a_pending_transfer_names_it() -> None:
    """Random plans, reports and frees; the invariant is checked from outside."""
    source = random.Random(11)
    one = fence()
    pending: dict[int, Transfer] = {}
    retired: list[tuple[int, list[int]]] = []
    epoch = 0
    for job in range(400):
        blocks = tuple(source.randrange(100) for _ in range(source.randrange(5)))
        pending[job] = Transfer("r", blocks)
        one.plan([(job, pending[job])], epoch)
        if source.random() < 0.6:
            epoch += 1
            waiting = {page for _, pages in retired for page in pages}
            page = source.randrange(10)
            if page not in waiting:
                retired.append((epoch, [page]))
        for done in source.sample(sorted(pending), k=min(len(pending), source.randrange(3))):
            one.report(done, 2)
            del pending[done]
        released, retired = one.split(retired, can_plan=True)
        named = {block // 10 for transfer in pending.values() for block in transfer.blocks}
        assert not named & set(released)
    for done in pending:
        one.report(done, 2)
    one.plan([], epoch)
    assert one.split(retired, can_plan=True)[1] == []
