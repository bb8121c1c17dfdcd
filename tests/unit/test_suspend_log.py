"""What an engine's log says of memory that it gives back: one line for each, and by whom."""

import logging
import re

import pytest
from suspend_world import MOST, PAGE, filled

from kvpatch.patches.suspend.server import Question
from kvpatch.sizes import readable


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="vllm.kvpatch")

    def lines():
        """The lines since the last look, without their seconds."""
        found = [re.sub(r"\d+\.\d+ s", "T s", one.getMessage()) for one in caplog.records]
        caplog.clear()
        return found

    return lines


def ask(world, **asked):
    Question(asked, " by pid 7").take(world.suspension)
    world.until_idle()


def test_a_suspension_and_its_end(worlds, lines):
    world = filled(worlds)
    ask(world, verb="suspend")
    (said,) = lines()
    count = world.suspension.said["resident"]
    assert said.startswith(
        f"kvpatch: suspended by pid 7 in T s: {count} of {count} blocks are in the tier, "
    )
    ask(world, verb="suspend")  # it is
    assert lines() == []
    ask(world, verb="resume")
    assert lines() == [
        f"kvpatch: resumed by pid 7 after T s, in T s: the limit is {readable(MOST * PAGE)}"
    ]


def test_a_suspension_that_is_given_up(worlds, lines):
    world = filled(worlds)
    Question({"verb": "suspend"}).take(world.suspension)
    ask(world, verb="resume")
    assert lines() == ["kvpatch: not suspended: it was resumed before it was suspended"]


def test_a_limit_and_the_same_again(worlds, lines):
    world = filled(worlds)
    size, before = (MOST - 1) * PAGE, MOST * PAGE
    ask(world, verb="limit", size=size)
    ask(world, verb="limit", size=size)
    assert lines() == [
        f"kvpatch: the limit was set from {readable(before)} to {readable(size)} by pid 7"
    ]


def test_what_is_refused(worlds, lines):
    ask(filled(worlds), verb="limit", size=1)
    assert lines() == [
        f"kvpatch: limit by pid 7 is refused: a page is {readable(PAGE)}, and it needs at least one"
    ]


def test_what_is_given_back_for_a_limit_and_at_idle(worlds, lines):
    world = filled(worlds, gives=True)
    world.manager.limit = world.manager.reported = 5 * PAGE
    world.giving.look()
    world.until_idle()
    assert lines() == [
        f"kvpatch: {readable(2 * PAGE)} given back for a lower limit in T s, their blocks stored "
        "first; 0 blocks evicted without a copy"
    ]
    world.giving.rest()
    world.giving.advance()
    world.until_idle()
    (said,) = lines()
    assert " given back by an idle engine in T s, their blocks stored first" in said
