"""What an engine's extents are worth beside those of others."""

import pytest

from kvpatch.pool import worth
from kvpatch.pool.worth import Reuse


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_rate_is_what_is_found_of_what_is_stored(clock):
    reuse = Reuse(clock)
    assert reuse.rate == pytest.approx(1), "nothing is known at first"
    reuse.stored(1000)
    assert reuse.rate == pytest.approx(worth.LEAST, abs=2e-3)
    reuse.found(3000)
    assert reuse.rate == pytest.approx(3, rel=0.02)


def test_what_is_long_past_counts_less(clock):
    reuse = Reuse(clock)
    reuse.stored(1000)
    clock.now += worth.MEMORY
    reuse.found(1000)
    assert reuse.rate == pytest.approx(2, rel=0.03)
    clock.now += worth.MEMORY
    assert reuse.rate == pytest.approx(2, rel=0.03)
    assert reuse.rate == reuse.rate, "it is forgotten once"
    clock.now += 1000 * worth.MEMORY
    assert reuse.rate == pytest.approx(1)


def test_what_is_stored_is_as_old_as_it_is(clock):
    reuse = Reuse(clock)
    reuse.stored(1000)
    clock.now += 600.0  # ten minutes, see docs/how-it-works.md
    reuse.stored(1000)
    reuse.found(1500)
    assert reuse.rate == pytest.approx(worth.LEAST + 1500.95 / 1501)


def test_an_age_counts_by_the_square_root_and_less_at_an_equal_part():
    assert worth.age(10, 1.0, 3, 2.5) == 10
    assert worth.age(10, 4.0, 3, 2.5) == 5
    assert worth.age(10, 0.25, 3, 2.5) == 20
    assert worth.age(10, 1.0, 2, 2) == 4
