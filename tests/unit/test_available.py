"""Pages are counted when they change, and their blocks known in between."""

from contextlib import nullcontext

import pytest
from fakes import module

from kvpatch.patches.elastic_memory import available

SECONDS = 0.1


class Manager:
    """kvcached's manager: 4 blocks in mapped pages, and what its allocator answers."""

    def __init__(self):
        self._lock = nullcontext()
        self.num_avail_blocks, self.reserved_blocks = 3, [7]
        self.in_shrink = False
        self._avail_physical_pages_cache = None
        self._avail_physical_pages_ts = 0.0
        self.now = 100.0
        self.pages = 10
        self.counted = 0

    def count(self):
        """As ``available_size``, with pages of 8 blocks."""
        self.counted += 1
        if self._avail_physical_pages_cache is None or self.now >= self.read_until:
            self._avail_physical_pages_cache = self.pages
            self._avail_physical_pages_ts = self.now
        pages = 0 if self.in_shrink else self._avail_physical_pages_cache
        return self.num_avail_blocks + len(self.reserved_blocks) + 8 * pages

    @property
    def read_until(self):
        return self._avail_physical_pages_ts + SECONDS


@pytest.fixture
def manager(monkeypatch):
    module(monkeypatch, "kvcached.kv_cache_manager", _AVAIL_PHYSICAL_PAGES_TTL_S=SECONDS)
    made = Manager()
    monkeypatch.setattr(available.time, "monotonic", lambda: made.now)
    return made


@pytest.fixture
def size(manager):
    replaced = available.remembered(Manager.count)
    return lambda: replaced(manager)


def test_pages_are_counted_once(manager, size):
    assert [size() for _ in range(9)] == [84] * 9
    assert manager.counted == 1


def test_blocks_that_are_taken_and_freed_count_at_once(manager, size):
    assert size() == 84
    manager.num_avail_blocks -= 2
    assert size() == 82
    manager.reserved_blocks.append(8)
    assert size() == 83
    assert manager.counted == 1


def test_a_page_that_is_mapped_or_unmapped_is_counted(manager, size):
    assert size() == 84
    manager.pages, manager._avail_physical_pages_cache = 9, None  # as kvcached forgets it
    assert size() == 76
    assert size() == 76
    assert manager.counted == 2


def test_what_somebody_else_has_read_anew_is_counted_anew(manager, size):
    assert size() == 84
    manager.now += SECONDS / 2
    manager.pages = 2
    manager._avail_physical_pages_cache = None
    manager.count()  # as another of kvcached's methods reads it
    assert size() == 20


def test_what_a_neighbour_takes_is_seen_after_a_tenth_of_a_second(manager, size):
    assert size() == 84
    manager.pages = 0
    manager.now += SECONDS * 0.9
    assert size() == 84
    manager.now += SECONDS * 0.2
    assert size() == 4


def test_while_a_limit_waits_no_page_counts_and_afterwards_they_do(manager, size):
    assert size() == 84
    manager.in_shrink = True
    assert size() == 4
    assert size() == 4
    assert manager.counted == 3
    manager.in_shrink = False
    assert size() == 84
