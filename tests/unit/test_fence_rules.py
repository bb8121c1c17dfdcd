"""The fence's two rules, without an engine: pages of ten blocks, two workers."""

import random

from kvpatch.patches.fence.fence import Fence, Transfer


def fence():
    return Fence(lambda page: (page * 10, page * 10 + 10), workers=2)


class Counted(Fence):
    """Counts the pages whose blocks are compared with those of the transfers."""

    def __init__(self):
        super().__init__(self.look, workers=2)
        self.looks = 0

    def look(self, page):
        self.looks += 1
        return page * 10, page * 10 + 10


class Pages(list[int]):
    """Counts how often its pages are looked through."""

    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()


def test_a_page_freed_since_the_last_plan_is_held():
    one = fence()
    assert one.split([(1, [3])], can_plan=True) == ([], [(1, [3])])
    assert one.holding == 1
    one.plan([], epoch=1)
    assert one.split([(1, [3])], can_plan=True) == ([3], [])
    assert one.holding == 0
    assert one.counters.held_for_plan == 1
    assert one.counters.longest_hold == 1


def test_a_page_is_held_until_every_worker_reported_its_transfer():
    one = fence()
    jobs = (5, 6, 7)  # which name one block
    one.plan([(job, Transfer("r", (31, 32))) for job in jobs], epoch=1)
    for report in jobs * 2:
        assert one.split([(1, [3, 4])], can_plan=True)[1] == [(1, [3])], report
        one.report(report, 1)
    assert one.split([(1, [3])], can_plan=True) == ([3], [])
    assert one.counters.held_for_transfer == 1
    assert one.transfers == {}


def test_a_transfer_the_fence_never_saw_is_no_error_and_leaves_nothing():
    one = fence()
    one.report(99, 2)
    one.report(100, 1)  # of two workers
    assert not one._reports


def test_a_step_in_which_nothing_changed_looks_at_no_held_page():
    one = Counted()
    jobs = [(job, Transfer("r", (job * 10, job * 10 + 5))) for job in range(100)]
    one.plan([*jobs, (100, Transfer("s", (5, 9990)))], epoch=1)
    retired = [(1, Pages(range(50))), (1, Pages(range(50, 100))), (2, Pages([200]))]
    one.split(retired, can_plan=True)
    lists = [pages for _, pages in retired if isinstance(pages, Pages)]
    looks = [pages.looks for pages in lists]
    for _ in range(20):
        assert one.split(retired, can_plan=True) == ([], retired)
    assert [pages.looks for pages in lists] == looks
    assert one.looks == 100  # each once, and none that waits for a plan
    one.report(0, 2)  # the page has another block of a transfer
    one.report(70, 1)
    assert one.split(retired, can_plan=True) == ([], retired)
    assert lists[1].looks == looks[1] + 1  # to see that none of its pages was let go
    looks = [pages.looks for pages in lists]
    one.split(retired, can_plan=True)
    assert [pages.looks for pages in lists] == looks
    one.report(70, 1)
    released, retired = one.split(retired, can_plan=True)
    assert released == [70]
    assert one.looks == 102
    one.plan([], epoch=2)
    assert one.split(retired, can_plan=True)[0] == [200]
    assert one.looks == 103


def test_a_page_that_was_allocated_and_freed_again_waits_for_the_plan_after():
    one = fence()
    one.plan([(1, Transfer("r", (31, 41)))], epoch=1)
    one.split([(1, [3, 4])], can_plan=True)
    assert one.holding == 2
    one.split([], can_plan=True)
    assert one.holding == 0
    one.report(1, 2)
    assert one.split([(2, [3])], can_plan=True) == ([], [(2, [3])])
    one.plan([], epoch=2)
    assert one.split([(2, [3])], can_plan=True) == ([3], [])
    assert one.counters.held_for_transfer == 0  # nothing is left of the time before
    assert one.counters.held_for_plan == 1
    one.split([(3, [3])], can_plan=True)
    one.split([], can_plan=True)
    one.plan([], epoch=4)
    assert one.split([(4, [3])], can_plan=True) == ([3], [])
    assert one.counters.held_for_plan == 1


def test_changes_tell_whether_other_pages_are_held():
    one = fence()
    seen = [one.changes]
    for retired in ([(1, [3, 4])], [(1, [3, 4])], [(1, [4])], [(1, [4])], [(1, [4]), (2, [5])]):
        one.split(retired, can_plan=True)
        seen.append(one.changes)
    one.plan([], epoch=2)
    one.split([(1, [4]), (2, [5])], can_plan=True)
    assert [*seen, one.changes] == [0, 2, 2, 3, 3, 4, 6]


def test_what_is_released_is_what_both_rules_permit_at_every_step():
    source = random.Random(7)
    one = fence()
    pending = {}
    retired = []
    epoch = planned = counted = 0
    for job in range(3000):
        if source.random() < 0.6:
            blocks = tuple(source.randrange(400) for _ in range(source.randrange(6)))
            pending[job], planned = Transfer("r", blocks), epoch
            one.plan([(job, pending[job])], epoch)
        waiting = {page for _, pages in retired for page in pages}
        if waiting and source.random() < 0.3:
            taken = source.choice(sorted(waiting))
            retired = [
                (of, left) for of, pages in retired if (left := [*filter(taken.__ne__, pages)])
            ]
        if source.random() < 0.5:
            epoch += 1
            fresh = sorted(set(source.sample(range(40), k=source.randrange(1, 6))) - waiting)
            retired += [(epoch, fresh)] * bool(fresh)
        for done in source.sample(sorted(pending), k=min(len(pending), source.randrange(3))):
            for _ in range(2):
                one.report(done, 1)
            del pending[done]
        can_plan = source.random() < 0.9
        named = {block // 10 for transfer in pending.values() for block in transfer.blocks}
        may = [
            page
            for of, pages in retired
            for page in pages
            if not (can_plan and of > planned) and page not in named
        ]
        held = {page for _, pages in retired for page in pages} - set(may)
        released, retired = one.split(retired, can_plan)
        assert released == may
        assert {page for _, pages in retired for page in pages} == held == set(one.held)
        counted += len(released)
    assert one.counters.released == counted > 500
