"""Stripes: a chunk is a block in every region of every rank, an extent a range of each."""

import mmap
import os
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")  # of .venv; scripts/pythons is without

from hypothesis import given
from hypothesis import strategies as st

from kvpatch.pool import stripes
from kvpatch.pool.extents import Extents
from kvpatch.pool.memory import Memory
from kvpatch.pool.stripes import Stripes

PAGE = mmap.PAGESIZE
BLOCKS = st.integers(2, 200)
REGIONS = st.lists(st.sampled_from([512, 1024, 4096, 6144, 65536]), min_size=1, max_size=4)
RANKS = st.integers(1, 3)


def extents(layout, size=1 << 18):
    chunks = layout.blocks - 1
    return Extents(chunks, layout.chunk_bytes, size, lambda: 1.0, layout.multiple)


@given(BLOCKS, REGIONS, RANKS)
def test_every_byte_of_a_block_is_in_one_extent(blocks, regions, ranks):
    layout = Stripes(blocks, tuple(regions), ranks)
    made = extents(layout)
    owners = {}  # extent by the place of each of its blocks
    for index in range(made.count):
        found = list(layout.ranges(*made.place(index)))
        assert sum(length for _, length in found) == made.place(index)[1]
        assert all(first >= 0 and first + length <= layout.size for first, length in found)
        for number, (first, length) in enumerate(found):
            block = regions[number % len(regions)]
            owners |= dict.fromkeys(range(first, first + length, block), index)
    places = {}
    for rank in range(ranks):
        for region, size in enumerate(regions):
            for block in range(1, blocks):
                place = layout.begin(rank, region) + block * size
                assert place not in places
                places[place] = (block - 1) // made.per
    assert owners == places


@given(BLOCKS, REGIONS, RANKS)
def test_no_two_extents_share_a_page(blocks, regions, ranks):
    layout = Stripes(blocks, tuple(regions), ranks)
    made = extents(layout)
    pages = set()
    for index in range(made.count):
        for first, length in layout.ranges(*made.place(index)):
            assert first % PAGE == 0
            mine = set(range(first // PAGE, -(-(first + length) // PAGE)))
            assert not mine & pages
            pages |= mine


def test_the_parts_of_ranks_are_apart():
    layout = Stripes(10, (4096, 8192), 2)
    offset, size = 0, 9 * layout.chunk_bytes
    both = list(layout.ranges(offset, size))
    apart = [list(layout.of_rank(rank, offset, size)) for rank in range(2)]
    assert both == apart[0] + apart[1]
    assert max(first + length for first, length in apart[0]) <= apart[1][0][0]


def test_a_null_block_has_no_memory(tmp_path):
    layout = Stripes(33, (4096, 4096), 1)
    made = extents(layout, 64 << 10)
    file = os.open(f"/dev/shm/kvpatch-test-stripes-{os.getpid()}", os.O_RDWR | os.O_CREAT)
    Path(f"/dev/shm/kvpatch-test-stripes-{os.getpid()}").unlink()
    os.ftruncate(file, layout.size)
    memory = Memory(file, layout.ranges)
    for index in range(made.count):
        memory.commit(*made.place(index))
    assert memory.committed == 32 * layout.chunk_bytes
    memory.punch(*made.place(1))
    assert memory.committed == 32 * layout.chunk_bytes - made.place(1)[1]
    for index in (0, *range(2, made.count)):
        memory.punch(*made.place(index))
    assert memory.committed == 0
    memory.close()


def test_an_extent_whose_memory_cannot_be_had_has_none(monkeypatch):
    from kvpatch.pool import memory as module

    calls = []

    def fallocate(file, mode, offset, size):
        calls.append((mode, offset, size))
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_fallocate", fallocate)
    layout = Stripes(5, (4096, 4096, 4096), 1)
    with pytest.raises(OSError, match="No space"):
        Memory(-1, layout.ranges).commit(0, 4 * layout.chunk_bytes)
    ranges = list(layout.ranges(0, 4 * layout.chunk_bytes))
    assert [call[1:] for call in calls] == ranges[:3] + ranges


def test_regions_are_told_and_understood():
    assert stripes.unpack(stripes.pack((4096, 1 << 40))) == (4096, 1 << 40)
    assert stripes.unpack(b"") == ()
