"""What the fence adds to a scheduler's step, by requests, pages and blocks."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from parts import sizes

from kvpatch import state
from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import Fenced, around_build

PAGE = 32  # blocks
PROMPT = 128  # blocks


def filled(requests: int, pages: int) -> tuple[Fence, list[tuple[int, list[int]]]]:
    """A fence with a transfer in flight for each request, and retired pages that are not theirs."""
    made = Fence(lambda page: (page * PAGE, (page + 1) * PAGE), workers=1)
    jobs = [
        (job, Transfer(f"r{job}", tuple(range(job * PROMPT, (job + 1) * PROMPT))))
        for job in range(requests)
    ]
    made.plan(jobs, epoch=0)
    first = requests * PROMPT // PAGE
    return made, [(1, list(range(first, first + pages)))]


@pytest.mark.parametrize("requests", sizes(10, 100, 1000))
def test_a_step(part, requests):
    """A transfer ends, another begins, and one freed page is looked at."""
    made, retired = filled(requests, pages=1)
    job = count(requests)
    blocks = tuple(range(PROMPT))
    newest = [job.__next__()]
    made.plan([(newest[0], Transfer("r", blocks))], epoch=1)

    def step() -> None:
        made.report(newest[0], 1)
        newest[0] = next(job)
        made.plan([(newest[0], Transfer("r", blocks))], epoch=1)
        released, held = made.split(retired, can_plan=True)
        assert len(released) == 1 and not held

    part("fence: a step, so many transfers in flight", requests, "requests", step)


@pytest.mark.parametrize("pages", sizes(10, 100, 1000, 10000))
def test_retired_pages(part, pages):
    made, retired = filled(requests=8, pages=pages)

    def split() -> None:
        released, _ = made.split(retired, can_plan=True)
        assert not released

    made._planned_epoch = 0  # none may go yet: all are looked at and held again
    part("fence: held pages looked at", pages, "pages", split)


@pytest.mark.parametrize("pages", sizes(10, 100, 1000, 10000))
def test_pages_under_transfers(part, pages):
    """Pages whose blocks are compared with those of the transfers, none of them named."""
    made, retired = filled(requests=8, pages=pages)
    made._planned_epoch = 1

    def split() -> None:
        released, _ = made.split(retired, can_plan=True)
        assert len(released) == pages

    part("fence: freed pages compared with transfers", pages, "pages", split)


@pytest.mark.parametrize("blocks", sizes(64, 512, 4096))
def test_a_plan(part, blocks):
    """The wrapper around vLLM's planning of a step with one transfer."""
    jobs = count()
    ids = np.arange(blocks)

    def meta(planner: object) -> SimpleNamespace:
        spec = SimpleNamespace(block_ids=ids)
        job = SimpleNamespace(req_id="r", src_spec=spec)
        return SimpleNamespace(store_jobs={next(jobs): job}, load_jobs={})

    made = Fence(lambda page: (0, 0), workers=1)
    manager = SimpleNamespace(capture_physical_release_marker=lambda: 0)
    planner = SimpleNamespace()
    state.attach(planner, Fenced(made, manager, scheduler=None))

    def build() -> None:
        around_build(meta, planner, (planner,), {})
        made.report(next(iter(made.transfers)), 1)

    part("fence: a transfer planned and ended", blocks, "blocks", build)
