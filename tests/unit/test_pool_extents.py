"""Extents: which chunks are handed out, what may be given back."""

import itertools

import pytest

pytest.importorskip("hypothesis")  # of .venv; scripts/pythons is without

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpatch.pool.extents import Extents

CHUNK = 4096


def extents(chunks=10, per=4):
    count = itertools.count(1.0)
    return Extents(chunks, CHUNK, per * CHUNK, lambda: next(count))


def opened(chunks=10, per=4, count=2):
    made = extents(chunks, per)
    for index in range(count):
        made.add(index)
    return made


def test_the_last_extent_may_be_short():
    made = extents(10, 4)
    assert made.count == 3
    assert [made.place(index) for index in range(3)] == [
        (0, 4 * CHUNK),
        (4 * CHUNK, 4 * CHUNK),
        (8 * CHUNK, 2 * CHUNK),
    ]
    for index in range(3):
        assert made.absent() == index
        made.add(index)
    assert made.absent() is None
    assert made.free == 10


def test_an_extent_has_at_least_a_chunk_and_is_no_larger_than_the_tier():
    assert Extents(3, CHUNK, 1, lambda: 0.0).count == 3
    assert Extents(3, CHUNK, 1 << 30, lambda: 0.0).place(0) == (0, 3 * CHUNK)


def test_chunks_of_the_lowest_extent_are_handed_out_first():
    made = opened()
    assert made.allocate("abcde") == [0, 1, 2, 3, 4]
    made.release(2)
    made.release(0)
    assert made.allocate("xyz") == [0, 2, 5]
    assert made.open[0].held == {0: "x", 1: "b", 2: "y", 3: "d"}


def test_of_an_extent_the_lowest_chunk_is_handed_out_first_whenever_it_came_back():
    made = opened()
    made.allocate("abcd")
    made.release(0)
    made.release(2)
    made.release(1)
    assert made.allocate("xyz") == [0, 1, 2]


def test_more_than_there_is_takes_nothing():
    made = opened()
    with pytest.raises(MemoryError):
        made.allocate(range(9))
    assert made.free == 8
    assert made.allocate(range(8)) == list(range(8))
    assert made.free == 0


def test_of_an_extent_that_has_to_go_nothing_is_handed_out():
    made = opened()
    made.allocate("ab")
    made.drain(0)
    made.drain(0)
    assert made.free == 4
    assert made.draining() == [0]
    assert made.allocate("c") == [4]
    made.release(1)
    assert made.free == 3
    made.release(0)
    assert made.idle() == [0]
    assert made.draining() == []


def test_a_closed_extent_is_removed_and_added_again():
    made = opened(count=3)
    made.close(1)
    assert made.free == 6
    assert made.idle() == [2, 0]
    made.remove(1)
    assert made.absent() == 1
    made.add(1)
    assert made.free == 10


def test_only_an_idle_extent_is_closed_and_only_a_closed_one_removed():
    made = opened()
    made.allocate("a")
    with pytest.raises(AssertionError):
        made.close(0)
    with pytest.raises(AssertionError):
        made.remove(1)


def test_an_extent_is_not_idle_while_a_transfer_names_it():
    made = opened()
    made.begin(7, made.allocate("abcde"), workers=2)
    made.reset()
    assert made.free == 8
    assert made.idle() == []
    made.report(7, 1)
    assert made.idle() == []
    assert made.transferring
    made.report(7, 1)
    assert made.idle() == [1, 0]
    assert not made.transferring
    made.report(7, 1)  # of a transfer that nobody knows
    assert made.idle() == [1, 0]


def test_a_reset_takes_every_chunk_back():
    made = opened()
    made.allocate("abcdef")
    made.drain(1)
    made.reset()
    assert made.used == 0
    assert made.free == 4
    assert made.allocate("abcd") == [0, 1, 2, 3]


def test_after_a_reset_an_extent_is_as_cold_as_one_that_never_held_anything():
    made = opened(count=3)
    made.allocate(range(9))
    made.use([8])
    made.reset()
    assert made.coldest() == 2
    assert 0 < made.last_use() < 1
    made.allocate(range(1))
    assert made.coldest() == 2


def test_what_was_not_used_for_longest_goes_first_and_what_is_empty_before_it():
    made = opened(12, 4, 3)
    made.allocate(range(9))
    made.use([0])
    assert made.coldest() == 2  # of equals the highest
    assert made.last_use() == made.open[2].used
    made.release(8)
    assert made.coldest() == 2
    assert 0 < made.last_use() < 1
    made.drain(2)
    assert made.coldest() == 1
    made.drain(1)
    assert made.coldest() == 0
    made.use([100])  # of an extent that is absent


def test_of_a_prompt_the_end_is_colder_than_the_beginning_wherever_it_is():
    made = opened(12, 4, 3)
    made.allocate(range(12))
    first, then, last = (made.open[index].used for index in range(3))
    assert first > then > last, "what is stored last is not the coldest"
    made.use([8, 9, 0, 1, 4])  # a prompt that begins in the last extent
    assert made.coldest() == 1
    made.drain(1)
    assert made.coldest() == 0
    made.use([4, 0, 8])
    assert made.last_use_of_held() == made.open[2].used < made.open[0].used


def test_the_last_use_of_what_is_held_passes_over_what_is_empty():
    assert extents().last_use() == 0, "without an extent"
    made = opened(12, 4, 3)
    assert made.last_use_of_held() == 0
    made.allocate(range(5))
    assert made.last_use_of_held() == made.open[1].used
    assert made.last_use() < 1 < made.last_use_of_held()


class Life(RuleBasedStateMachine):
    """A tier through everything that a scheduler and a keeper can do, against a plain model."""

    PER, CHUNKS = 3, 11

    def __init__(self):
        super().__init__()
        self.made = extents(self.CHUNKS, self.PER)
        self.held = {}
        self.jobs = {}
        self.keys = itertools.count()
        self.names = itertools.count()

    @precondition(lambda self: self.made.absent() is not None)
    @rule()
    def grow(self):
        index = self.made.absent()
        assert index is not None
        self.made.add(index)

    @rule(count=st.integers(1, 6))
    def store(self, count):
        keys = [next(self.keys) for _ in range(count)]
        free = self.handed_out()
        if count > len(free):
            with pytest.raises(MemoryError):
                self.made.allocate(keys)
            return
        taken = self.made.allocate(keys)
        assert taken == free[:count], "not the lowest chunks"
        self.held |= dict(zip(taken, keys, strict=True))
        job = next(self.names)
        self.made.begin(job, taken, 2)
        self.jobs[job] = (set(taken), 2)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def report(self, data):
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        chunks, left = self.jobs.pop(job)
        self.made.report(job, 1)
        if left > 1:
            self.jobs[job] = chunks, left - 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def evict(self, data):
        chunk = data.draw(st.sampled_from(sorted(self.held)))
        self.made.release(chunk)
        del self.held[chunk]

    @rule()
    def reset(self):
        self.made.reset()
        self.held.clear()

    @precondition(lambda self: self.made.coldest() is not None)
    @rule()
    def drain(self):
        self.made.drain(self.made.coldest())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def use(self, data):
        self.made.use([data.draw(st.sampled_from(sorted(self.held)))])

    @precondition(lambda self: self.made.idle())
    @rule()
    def give_back(self):
        index = self.made.idle()[0]
        chunks = set(range(index * self.PER, (index + 1) * self.PER))
        assert not chunks & set(self.held), "a chunk that holds something would be punched"
        assert not any(chunks & used for used, _ in self.jobs.values()), "a copy would be punched"
        self.made.close(index)
        self.made.remove(index)

    def handed_out(self):
        return [
            chunk
            for index, one in sorted(self.made.open.items())
            if not one.draining and not one.closed
            for chunk in range(index * self.PER, min((index + 1) * self.PER, self.CHUNKS))
            if chunk not in self.held
        ]

    @invariant()
    def the_coldest_and_the_idle_are_those_of_a_look_at_all(self):
        every = self.made.open.items()
        staying = [
            (one.used if one.held else 0, -index)
            for index, one in every
            if not one.draining and not one.closed
        ]
        assert self.made.coldest() == (-min(staying)[1] if staying else None)
        assert len(self.made._ranks) <= 2 * len(self.made.open) + 101
        idle = [index for index, one in every if not one.held and not one.transfers]
        assert self.made.idle() == sorted(set(idle) - set(self.made.closed()), reverse=True)

    @invariant()
    def counts_are_right(self):
        assert self.made.free == len(self.handed_out())
        assert self.made.used == len(self.held)
        assert {
            chunk: key for one in self.made.open.values() for chunk, key in one.held.items()
        } == self.held
        for index, one in self.made.open.items():
            chunks = set(range(index * self.PER, (index + 1) * self.PER))
            assert one.transfers == sum(bool(chunks & used) for used, _ in self.jobs.values())


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(st.integers(1, 100), st.integers(1, 20))
def test_extents_cover_a_tier_exactly(chunks, per):
    made = extents(chunks, per)
    ends = 0
    for index in range(made.count):
        offset, size = made.place(index)
        assert offset == ends
        assert size > 0
        ends += size
    assert ends == chunks * CHUNK
