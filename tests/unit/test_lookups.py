"""Lookups by tier, and hits that were lost: no engine."""

import hashlib
from enum import Enum
from types import SimpleNamespace

import pytest

from kvpatch import state
from kvpatch.patches.metrics import lookups
from kvpatch.telemetry.counters import Totals
from kvpatch.telemetry.remembered import Remembered

BLOCK = 4  # tokens


def hashes(*names):
    return [hashlib.sha256(str(name).encode()).digest() for name in names]


def prompt(length, of=0):
    """The hashes of a prompt, each of which is of all blocks before it too."""
    return hashes(*((of, block) for block in range(length)))


def test_a_prefix_is_known_as_far_as_it_was_computed():
    known = Remembered()
    known.add(prompt(3))
    assert [known.prefix(prompt(length)) for length in (0, 2, 3, 5)] == [0, 2, 3, 3]
    assert known.prefix(prompt(5, of="another")) == 0
    known.forget()
    assert known.prefix(prompt(3)) == 0


def test_a_block_whose_place_another_took_does_not_end_a_prefix():
    known = Remembered(slots=1 << 12)
    known.add(prompt(1000))
    assert sum(known.prefix([one]) for one in prompt(1000)) < 1000
    assert known.prefix(prompt(1200)) >= 998


def test_no_more_is_remembered_than_there_is_room_for():
    known = Remembered(slots=64)
    for number in range(1000):
        known.add(hashes(number))
    assert sum(known.prefix([one]) for one in hashes(*range(1000))) <= 64
    assert known.prefix(hashes(999)) == 1
    assert sum(known.prefix([one]) for one in hashes(*range(1000, 2000))) == 0


def test_two_blocks_of_one_place_are_told_apart():
    known = Remembered(slots=16)
    first, second = (b"\x03" + bytes([number]) * 31 for number in (1, 2))
    known.add([first])
    assert [known.prefix([one]) for one in (first, second)] == [1, 0]
    known.add([second])
    assert [known.prefix([one]) for one in (first, second)] == [0, 1]


class Scheduler:
    """vLLM's, as far as it is looked at."""

    def __init__(self, connector="a connector"):
        self.requests = {}
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(hash_block_size=BLOCK))
        self.connector = connector
        self.totals = state.attach(self, Totals())
        self.ended = set()

    def add(self, name, blocks, computed=0, **changes):
        """Schedule a request of one token more than its blocks, of which a part was found."""
        self.requests[name] = SimpleNamespace(
            block_hashes=hashes(*blocks),
            num_tokens=len(blocks) * BLOCK + 1,
            num_computed_tokens=len(blocks) * BLOCK,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
        )
        vars(self.requests[name]).update(changes)
        self.step((name, computed))
        return self.totals.lost_tokens

    def end(self, name):
        self.ended.add(name)
        del self.requests[name]

    def run(self, name, blocks, **changes):
        """Schedule a request that ends; the tokens that were lost so far."""
        lost = self.add(name, blocks, **changes)
        self.end(name)
        return lost

    def step(self, *begun):
        new = [SimpleNamespace(req_id=name, num_computed_tokens=count) for name, count in begun]
        output = SimpleNamespace(
            finished_req_ids=self.ended,
            scheduled_new_reqs=new,
            num_scheduled_tokens=dict.fromkeys((name for name, _ in begun), BLOCK),
        )
        self.ended = set()
        assert lookups.around_schedule(lambda: output, self, (), {}) is output

    def reset(self, wrapper):
        assert wrapper(lambda: True, self, (), {}) is True


@pytest.fixture
def scheduler():
    return Scheduler()


def test_what_was_computed_before_and_was_not_found_is_lost(scheduler):
    assert scheduler.run("one", (1, 2, 3)) == 0
    assert scheduler.run("two", (1, 2, 3, 4)) == 3 * BLOCK
    # Found on the device or in a tier, in part and as a whole.
    assert scheduler.run("three", (1, 2, 3, 4), computed=BLOCK) == 3 * BLOCK + 3 * BLOCK
    assert scheduler.add("four", (1, 2, 3, 4), computed=4 * BLOCK) == 6 * BLOCK
    assert scheduler.totals.fuse.off == ""


def test_the_last_token_is_computed_always(scheduler):
    scheduler.run("one", (1, 2))
    assert scheduler.add("two", (1, 2), num_tokens=2 * BLOCK) == BLOCK


def test_a_block_of_a_request_that_runs_is_not_there_yet(scheduler):
    """A tier has it when it was stored: requests of one moment lose nothing."""
    scheduler.add("one", (1, 2))
    assert scheduler.add("two", (1, 2)) == 0


def test_only_what_was_computed_of_an_aborted_request_is_remembered(scheduler):
    scheduler.run("one", (1, 2, 3), num_computed_tokens=2 * BLOCK - 1)
    assert scheduler.add("two", (1, 2, 3)) == BLOCK


def test_what_was_generated_is_remembered(scheduler):
    scheduler.add("one", (1,))
    one = scheduler.requests["one"]
    one.block_hashes += hashes(2)
    one.num_computed_tokens = 2 * BLOCK
    scheduler.end("one")
    assert scheduler.add("two", (1, 2, 3)) == 2 * BLOCK


@pytest.mark.parametrize("why", [{"num_preemptions": 1}, {"skip_reading_prefix_cache": True}])
def test_a_request_that_has_to_compute_loses_nothing(scheduler, why):
    """It was preempted, or asks for log-probabilities of its prompt; its blocks are known then."""
    scheduler.run("one", (1, 2))
    assert scheduler.run("two", (1, 2, 3), **why) == 0
    assert scheduler.add("three", (3,)) == BLOCK


def test_a_request_is_counted_once(scheduler):
    """A session goes on as a new request, and so do resumed ones of Model Runner V2."""
    scheduler.run("one", (1, 2))
    scheduler.add("two", (1, 2))
    scheduler.step(("two", 0))
    assert scheduler.totals.lost_tokens == 2 * BLOCK


def test_a_request_that_is_aborted_before_it_runs_is_nothing(scheduler):
    scheduler.ended.add("never ran")
    scheduler.step(("gone", 0))
    assert scheduler.totals.lost_tokens == 0
    assert scheduler.totals.fuse.off == ""


@pytest.mark.parametrize(
    ("connector", "wrapper", "lost"),
    [
        ("one", lookups.around_reset, 2 * BLOCK),  # it has them still
        ("one", lookups.around_reset_connector, 0),
        (None, lookups.around_reset, 0),
    ],
)
def test_what_was_reset_was_not_lost(connector, wrapper, lost):
    """Weights that are replaced end all that was computed, with the same hashes."""
    scheduler = Scheduler(connector)
    scheduler.reset(wrapper)  # before anything was computed
    scheduler.run("one", (1, 2))
    scheduler.step()
    scheduler.add("runs", (3,))
    scheduler.reset(wrapper)
    scheduler.end("runs")
    assert scheduler.run("two", (1, 2)) == lost
    scheduler.add("three", (3,))
    assert scheduler.totals.lost_tokens == lost + (BLOCK if lost else 0)


def test_an_error_switches_counting_off_and_nothing_else(scheduler):
    scheduler.kv_cache_manager = None
    scheduler.add("one", (1,))
    assert "block_pool" in scheduler.totals.fuse.off
    scheduler.add("two", (1,))
    nobody = SimpleNamespace()
    assert lookups.around_schedule(lambda: "output", nobody, (), {}) == "output"


def test_nothing_is_kept_of_requests_that_have_ended(scheduler):
    for number in range(20):
        scheduler.run(f"{number}", (number,))
    scheduler.step()
    assert state.of(scheduler, lookups.Computed).running == {}


class Source(str, Enum):
    """As vLLM's, from 0.32 on."""

    HOST = "host"
    DISK = "disk"


def stats(hits, queries, **more):
    return SimpleNamespace(hits=hits, queries=queries, **more)


def test_hits_on_a_disk_are_those_that_the_stats_name():
    totals = Totals()
    totals.add_hits("device", stats(5, 10))
    totals.add_hits("tier", stats(4, 5, hits_by_source={Source.HOST: 1, Source.DISK: 3}))
    totals.add_hits("tier", stats(0, 5, hits_by_source={}))
    assert totals.hits == {"device": 5, "tier": 4, "disk": 3}


def test_hits_on_a_disk_before_the_stats_name_them_are_added_with_the_step():
    totals = Totals()
    totals.from_disk = 3
    totals.add_hits("device", stats(5, 10))
    assert "disk" not in totals.hits
    totals.add_hits("tier", stats(4, 5))
    totals.add_hits("tier", stats(0, 5))
    assert totals.hits == {"device": 5, "tier": 4, "disk": 3}
    assert totals.from_disk == 0
